"""What is said of jobs that made no step, or were slow for a while."""

from pathlib import Path

import pytest

from holdfast.cli.commands import report_command
from holdfast.cli.launch import controller_console
from holdfast.cli.terminal.quantity_text import NO_STEP, clock_text, no_step_said
from holdfast.logs.secret_masking import Masker
from tests.cli.test_report_command import LINES, printed, run_dir, write
from tests.core.test_ledger import START, account

assert callable(run_dir)


def closing_line(tmp_path: Path, *lines: str) -> str:
    told, console = account(*lines), controller_console.SaidLog(tmp_path, Masker(hosts=False))
    controller_console.ConsoleTeller(tmp_path, console).tell_end(told, 0)
    console._file.close()
    return (tmp_path / "said.log").read_text().splitlines()[-1]


def test_an_end_without_steps(tmp_path: Path) -> None:
    said = closing_line(tmp_path, *START[:4], "30 ended n0", "31 outcome 3 ok")
    assert said == (f"holdfast: done: 0 incidents, ETTR not known, because {NO_STEP}; more: holdfast report {tmp_path}")


STOPPED = "it was stopped before its ranks made a step: they had run for 2.0 s"


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        ((*START[:2], "1.5 order stop by ann", "1.6 outcome 2 ok"), "it was stopped before its ranks began"),
        ((*START[:4], "6 order stop by ann", "6.1 outcome 3 ok"), STOPPED),
        ((*START[:4], "400 order stop by ann", "401 outcome 3 ok"), NO_STEP),
    ],
)
def test_a_job_that_was_stopped_before_its_first_step_is_not_called_one_without_steps(
    tmp_path: Path, lines: tuple[str, ...], known: str
) -> None:
    why = f"ETTR not known, because {known}"
    assert closing_line(tmp_path, *lines) == f"holdfast: done: 0 incidents, {why}; more: holdfast report {tmp_path}"


def test_a_job_that_was_stopped_says_in_its_report_how_far_it_came(run_dir: Path) -> None:
    write(run_dir, *LINES[:6], "6 order stop by ann", "7 outcome 3 ok")
    found = report_command.load_report(run_dir)
    assert (found.early_end, found.ettr, found.spent_s["run"]) == ("stopped", None, 2.0)
    assert no_step_said(2.0, over=True, early_end="stopped") == STOPPED
    assert STOPPED in printed(report_command.render_report(found), width=400)
    assert no_step_said(0.0, over=True, early_end="ended") == "it ended before its ranks began"


def test_what_slowness_cost_is_told_with_when_and_for_whom(run_dir: Path) -> None:
    slow = ("130 slowed since 100 until 130 cost 10", "140 slowed since 100 until 140 cost 20 for n1")
    write(run_dir, *LINES[:8], *slow, "150 progress 240 at 149 from 1 since 5")
    found = report_command.load_report(run_dir)
    [told] = found.slow_times
    assert (told.until, told.cost_s, told.node) == (140.0, 20.0, "n1"), "the newest of what is told of one time"
    shown = " ".join(printed(report_command.render_report(found), width=400).split())
    said = (
        f"slow from {clock_text(100)} to {clock_text(140)}: steps took 2.0 times as long as before, "
        "as others waited for n1; this cost 20.0 s, which the ETTR counts as training"
    )
    assert said in shown
    assert report_command.load_report(run_dir, "5s").slow_times == ()
    assert found.spent_s["train"] == pytest.approx(145.0), "time is booked once"
