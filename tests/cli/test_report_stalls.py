"""`holdfast report` says when and where a job stood still."""

import io

import pytest
from rich.console import Console

from holdfast.cli.commands import report_command
from holdfast.cli.terminal.quantity_text import clock_text
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.model.decider_events import Event, Progress
from holdfast.model.detector_alarm import Stance
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN
from tests.core.test_ledger_standstill import entries, stands


def test_the_longest_stalls_are_told_one_by_one() -> None:
    told, stood_at = list[tuple[float, Event]](), 20.0
    for step, lasted_s in enumerate((40.0, 10.0, 50.0, 60.0, 70.0), 17):
        went_on_at = stood_at + lasted_s
        told.append((stood_at + 5.0, stands(stood_at, Stance.OBSERVE)))
        went_on = Progress(generation=1, step=step, at=went_on_at, first_step=1, first_at=5.0, counted=False)
        told.append((went_on_at, went_on))
        stood_at = went_on_at
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(report_command.render_report(report_of(fold_entries(entries(*told), stood_at + 1.0))))
    shown = console.export_text()
    lines = [line.strip() for line in shown.splitlines() if "no step from" in line or "shorter" in line]
    where = "all 2 ranks are in load (train.py)"
    times = ((20.0, 60.0), (70.0, 120.0), (120.0, 180.0), (180.0, 250.0))
    expected = [f"no step from {clock_text(since)} to {clock_text(until)}: {where}" for since, until in times]
    assert lines == [*expected, "and 1 shorter stall"]


STANDS = TRAIN.replace("import holdfast\n", "import holdfast\ndef load():\n    time.sleep(600)\n").replace(
    "    holdfast.step(step, loss=1 / step)\n",
    "    holdfast.step(step, loss=1 / step)\n    if os.path.exists(f'{folder}/stand'):\n        load()\n",
)


@pytest.mark.e2e
def test_a_job_that_is_ended_while_it_stands_has_not_trained_since(start: Start) -> None:
    job = start("--nnodes", "1", script=STANDS)
    job.trains()
    (job.folder / "stand").touch()
    job.until(lambda: job.report().spent_s["stall"] > 1.0, "a stand")
    job.interrupt()
    job.ends(130)
    found = job.report()
    stall = max((span for span in found.spans if span.use is TimeUse.STALL), key=lambda span: span.seconds)
    assert stall.seconds > 1.0 and "in load" in stall.place
    assert all(span.end_at <= stall.start_at for span in found.spans if span.use is TimeUse.TRAIN)
