"""Figures of a report, rounded: rows, causes and uses add up."""

import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from holdfast.cli.commands.report_command import render_report
from holdfast.core.record.job_account import CAUSES, HOLDS, START_AND_END, Span, TimeUse
from holdfast.core.record.job_report import Report, report_of
from holdfast.core.record.lost_time_bill import draw_bill
from holdfast.core.sum_preserving_rounding import share_tenths
from tests.core.test_ledger import CRASH, START, account

SECONDS = st.floats(0.0, 500.0)


@given(st.dictionaries(st.integers(), SECONDS))
def test_parts_add_up_to_the_rounded_whole(parts: dict[int, float]) -> None:
    shared = share_tenths(parts)
    assert f"{sum(shared.values()):.1f}" == f"{float(f'{sum(parts.values()):.1f}'):.1f}"
    assert all(abs(shared[key] - seconds) < 0.1001 for key, seconds in parts.items())


def with_spans(lengths: list[tuple[TimeUse, int, int, float]]) -> Report:
    report, at, spans = report_of(account(*START, now=15.0)), 0.0, []
    for use, incident, change, seconds in lengths:
        spans.append(Span(use=use, start_at=at, end_at=at + seconds, incident=incident, change=change))
        at += seconds
    return msgspec.structs.replace(report, spans=tuple(spans), wall_s=at)


@given(
    st.lists(
        st.tuples(st.sampled_from(TimeUse), st.integers(0, 2), st.integers(0, 2), st.floats(0.001, 9.0)), max_size=30
    )
)
def test_causes_and_uses_add_up(lengths: list[tuple[TimeUse, int, int, float]]) -> None:
    bill = draw_bill(with_spans(lengths))
    rows = sum(sum(row.values()) for row in (*bill.incidents.values(), *bill.changes.values()))
    beside = sum(bill.causes.get(cause, 0.0) for cause in {*CAUSES.values(), START_AND_END})
    assert bill.lost_s == pytest.approx(rows + beside)
    assert sum(bill.uses.values()) == pytest.approx(bill.lost_s if bill.uses else 0.0)


def test_rows_say_what_the_causes_say() -> None:
    """The parts of 6.8 s are 1.38, 1.12, 2.16, 1.5 and, of work done again, 0.64."""
    crash = ("30 progress 21 at 28.76 from 1 since 5", "30.14 alarm crash n0 rank 0 code -9", "31.26 outcome 3 ok")
    again = ("33.42 outcome 4 ok", "36 progress 20 at 34.92", "46 progress 30 at 41.32 from 20 since 34.92")
    report = report_of(account(*START, *crash, *again, now=50.0))
    bill = draw_bill(report)
    parts = {TimeUse.DETECT: 1.4, TimeUse.STOP: 1.1, TimeUse.LAUNCH: 2.2, TimeUse.START_UP: 1.5, TimeUse.REDO: 0.6}
    assert bill.incidents == {1: parts}
    assert bill.causes == {"SIGKILL of unknown sender": 6.8, START_AND_END: 5.0} and bill.lost_s == 11.8
    console = Console(width=300)
    with console.capture() as captured:
        console.print(render_report(report))
    shown = captured.get()
    row = re.search(r" 6\.8 s: 6\.2 s \((.*?)\) without a step, 2 steps .* 0\.6 s", shown)
    assert row and row[1] == "detect 1.4, stop 1.1, launch 2.2, start-up 1.5"
    [lost] = [line.strip() for line in shown.splitlines() if line.strip().startswith("lost ")]
    assert [float(number) for number in re.findall(r"\d+\.\d", lost)] == [11.8, 6.8, 5.0, 3.0, 1.0, 1.0]
    uses = dict(re.findall(r"█ ([\w-]+) ([\d.]+) s", shown))
    assert sum(float(seconds) for use, seconds in uses.items() if use != "train") == pytest.approx(11.8)


def test_a_cause_has_one_row_however_sure_of_it_each_incident_is() -> None:
    second = ("40 alarm crash n0 rank 0 code -9", "41 outcome 5 ok", "43 outcome 6 ok", "46 progress 23 at 45")
    found = account(*START, *CRASH, "36 progress 22 at 35", *second, now=50.0)

    def costs(*labels: str) -> tuple[set[str], set[str]]:
        named = [msgspec.structs.replace(r, label=label) for r, label in zip(found.incidents, labels, strict=True)]
        booked = msgspec.structs.replace(found, incidents=tuple(named))
        return set(booked.lost_s()) - {START_AND_END}, set(draw_bill(report_of(booked)).causes) - {START_AND_END}

    assert costs("CUDA error (55% sure)", "CUDA error (60% sure)") == ({"CUDA error"}, {"CUDA error (55 to 60% sure)"})
    assert costs("CUDA error (55% sure)", "CUDA error") == ({"CUDA error"}, {"CUDA error (55 to 100% sure)"})
    assert costs("CUDA error (55% sure)", "CUDA error (55% sure)")[1] == {"CUDA error (55% sure)"}
    assert costs("CUDA error (55% sure)", "host out of memory")[1] == {"CUDA error (55% sure)", "host out of memory"}


def test_rows_have_the_seconds_of_the_console() -> None:
    chance = random.Random(7)
    for _ in range(50):
        at = [28.0]
        for _ in range(6):
            at.append(round(at[-1] + chance.uniform(0.2, 1.4), 2))
        crash = (f"{at[1]} alarm crash n0 rank 0 code -9", f"{at[2]} outcome 3 ok", f"{at[3]} outcome 4 ok")
        first = f"{at[6]} progress 22 at {at[5]} grouped {at[4]}"
        found = account(*START, f"28.1 progress 21 at {at[0]} from 1 since 5", *crash, first, now=50.0)
        said = re.findall(r"(detect|stop|launch) ([\d.]+)", found.incidents[0].sentence)
        row = draw_bill(report_of(found)).incidents[1]
        assert [(use.value, f"{row[use]:.1f}") for use in (TimeUse.DETECT, TimeUse.STOP, TimeUse.LAUNCH)] == said


def shown_report(*lines: str, now: float) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(render_report(report_of(account(*START, *lines, now=now))))
    return captured.get()


def legend_and_rows(shown: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each use in the legend, and their sums over all rows and the start, without new steps."""
    legend = {use: float(seconds) for use, seconds in re.findall(r"█ ([\w-]+) ([\d.]+) s", shown) if use != "train"}
    rows: dict[str, float] = {}
    for told in re.findall(r" s \((.*?)\)", shown):
        for use, seconds in re.findall(r"(?:^|, )([\w-]+) ([\d.]+)", told):
            rows[use] = round(rows.get(use, 0.0) + float(seconds), 1)
    return legend, rows


def test_a_wait_for_nodes_is_no_launch() -> None:
    lost = (
        "30 progress 21 at 29.9 from 1 since 5",
        "33 alarm silence n0 since 30",
        "34 outcome 3 ok",
        "34.1 outcome 4 ok",
    )
    again = ("50 outcome 5 ok nodes n1", "51 ready n1", "51.3 outcome 6 ok", "53 progress 22 at 52.9")
    shown = shown_report(*lost, *again, now=60.0)
    legend, rows = legend_and_rows(shown)
    assert "0.3" in shown and legend["wait"] > 17 and legend == rows
    [record] = account(*START, *lost, *again, now=60.0).incidents
    assert "lost 0 steps and 23.0 s (detect 3.1, stop 1.0, wait 17.0, launch 0.3, first step 1.6)" in record.sentence
    assert "23.0 s (detect 3.1, stop 1.0, wait 17.0, launch 0.3, start-up 1.6)" in shown


def test_a_silence_that_is_heard_of_while_ranks_are_stopped_is_told_apart() -> None:
    """A peer's failure stops all ranks within a second, and the node that was lost counts as silent later."""
    lost = (
        "30 progress 21 at 29.9 from 1 since 5",
        "30.5 alarm crash n0 rank 0 said RuntimeError: Connection closed by peer",
        "33 alarm silence n0 since 30",
        "33.2 outcome 3 ok",
        "33.3 outcome 4 ok",
    )
    again = ("50 outcome 5 ok nodes n1", "51 ready n1", "51.3 outcome 6 ok", "53 progress 22 at 52.9")
    shown = shown_report(*lost, *again, now=60.0)
    [record] = account(*START, *lost, *again, now=60.0).incidents
    phases = "detect 0.6, silence 2.5, stop 0.2, wait 17.8, launch 0.3, first step 1.6"
    assert record.sentence.startswith("n0 has been silent for 3 s at step 21;") and f"({phases})" in record.sentence
    assert "(detect 0.6, stop 2.7 = silence 2.5 + stop 0.2, wait 17.8, launch 0.3, start-up 1.6)" in shown


def test_a_hold_is_no_update() -> None:
    held = ("30 progress 21 at 29.9 from 1 since 5", "30 order hold by ann", "30.2 outcome 3 ok")
    again = ("40 order resume by ann", "40.3 outcome 4 ok", "42 progress 22 at 41.9")
    shown = shown_report(*held, *again, now=50.0)
    legend, rows = legend_and_rows(shown)
    assert (legend["pause"], legend.pop("hold")) == (0.3, 9.8)
    assert "update" not in shown and legend == rows
    [change] = account(*START, *held, *again, now=50.0).changes
    assert f"held for {change.held_s:.1f} s" in change.sentence and f"held for {change.held_s:.1f} s" in shown
    assert change.sentence.endswith(", lost 2.2 s")
    assert draw_bill(report_of(account(*START, *held, *again, now=50.0))).causes[HOLDS] == 9.8
