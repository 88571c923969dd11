"""The report of a part of a job adds up like that of the whole."""

import pytest

from holdfast.core.record.job_account import START_AND_END, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.lost_time_bill import draw_bill
from holdfast.core.record.report_comparison import compare_jobs
from holdfast.core.record.report_window import fold_since
from tests.core.test_ledger import CRASH, START, entries, spans

LINES = (*START, *CRASH, "36 progress 16 at 35", "60 progress 41 at 60 from 16 since 35")


@pytest.mark.parametrize("since", [0.0, 3.0, 20.0, 27.0, 30.5, 36.0, 50.0, 59.0])
def test_every_second_of_the_part_is_in_it_once(since: float) -> None:
    whole, part = fold_entries(entries(*LINES), 70.0), fold_since(entries(*LINES), since, 70.0)
    assert sum(span.seconds for span in part.spans) == pytest.approx(70.0 - since) == pytest.approx(part.wall_s)
    before = [span.clip_end(since) for span in whole.spans if span.start_at < since]
    for use in TimeUse:
        earlier = sum(span.seconds for span in before if span.use is use)
        assert part.spent_s(use) + earlier == pytest.approx(whole.spent_s(use))
    assert sum(ran.steps for ran in part.ran) <= sum(ran.steps for ran in whole.ran)


def test_an_incident_that_began_before_costs_what_it_has_cost_since() -> None:
    part = fold_since(entries(*LINES), 34.0, 70.0)
    assert [record.number for record in part.incidents] == [1]
    assert spans(part)[0] == ("start-up", 34.0, 35.0, 1)
    redoing = fold_since(entries(*LINES), 37.0, 70.0)
    assert [record.number for record in redoing.incidents] == [1], "its steps are made again in this part"
    assert set(draw_bill(report_of(redoing)).causes) == set(redoing.lost_s()) != {START_AND_END}
    after = fold_since(entries(*LINES), 60.0, 70.0)
    assert (after.incidents, after.ettr, after.mttr_s) == ((), 1.0, None)


def test_planned_restarts_are_counted_anew() -> None:
    held = [
        (f"{at}0 progress {at}1 at {at}0 from 1 since {at - 1}5", f"{at}1 order hold by ann", f"{at}2 outcome {n} ok",
         f"{at}3 order resume by ann", f"{at}4 outcome {n + 1} ok", f"{at}6 progress {at}2 at {at}5")
        for at, n in ((3, 3), (6, 5))
    ]  # fmt: skip
    lines = (*START, *held[0], *held[1])
    whole = fold_entries(entries(*lines), 80.0)
    assert {span.change for span in whole.spans} == {0, 1, 2}
    part = fold_since(entries(*lines), 50.0, 80.0)
    assert part.changes == whole.changes[1:] and {span.change for span in part.spans} == {0, 1}
    assert len(report_of(part).restarts) == 1 and draw_bill(report_of(part)).changes.keys() == {1}
    assert fold_since(entries(*lines), 70.0, 80.0).changes == ()
    standing = fold_since(entries(*lines[:14]), 50.0, 64.0)  # the second is not over
    assert (standing.changes, {span.change for span in standing.spans}) == ((), {0, 1})


def test_releases_have_the_steps_of_the_part() -> None:
    [ran] = fold_since(entries(*LINES), 36.5, 70.0).ran
    [whole] = fold_entries(entries(*LINES), 70.0).ran
    assert 0 < ran.steps + ran.redone < whole.steps + whole.redone


def test_two_jobs_are_compared() -> None:
    crashed, plain = (report_of(fold_entries(entries(*lines), 70.0)) for lines in (LINES, START))
    found = compare_jobs(crashed, plain)
    assert (found.incidents, found.classes) == ((1, 0), {"SIGKILL of unknown sender": (1, 0)})
    assert found.lost_s[START_AND_END] == (5.0, 5.0)
    for cause, (one, other) in found.lost_s.items():
        assert found.lost_share[cause] == pytest.approx((one / 70.0, other / 70.0))
    assert found.notes == (
        "a run that has not ended is compared as it is now",
        "incidents are few: a difference in their number may be chance",
    )


def test_what_is_not_known_and_lengths_that_differ_are_said() -> None:
    long, silent = (report_of(fold_entries(entries(*lines), now)) for lines, now in ((START, 700.0), (START[:4], 60.0)))
    found = compare_jobs(long, silent)
    assert found.ettr == (long.ettr, None) and found.steps_s == (None, None) and found.mttr_s == (None, None)
    assert found.notes == (  # and nothing of their pace, which is known of neither
        "the runs differ in length: compare shares and not seconds, and the start weighs more in the shorter",
        "of one run no step was seen, so its ETTR is not known, and the two cannot be compared by it",
        "a run that has not ended is compared as it is now",
    )
