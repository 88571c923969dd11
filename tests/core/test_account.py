"""Every second is accounted for once, under the right name; the numbers here were worked out by hand."""

import pytest

from holdfast.core.account import Account, Ledger, Use, fold
from holdfast.core.decider import Decider
from holdfast.model.event import Entry, Phase
from tests.core.transcript import parse


def entries(*lines: str) -> list[Entry]:
    """Lines of a transcript, as the journal of a decider that hears them."""
    decider, journal = Decider(), []
    for seq, line in enumerate(lines, 1):
        at, text = line.split(" ", 1)
        event = parse(text, float(at), decider.generation)
        journal.append(Entry(seq=seq, at=float(at), event=event, decision=decider.step(float(at), event)))
    return journal


START = ("0 begin nnodes 1", "1 outcome 1 ok nodes n0", "3 ready n0", "4 outcome 2 ok", "6 progress 1 at 5")
CRASH = (
    "30 progress 21 at 25 from 1 since 5",
    "30 alarm crash n0 rank 0 code -9",
    "31 outcome 3 ok",
    "33 outcome 4 ok",
)


def account(*lines: str, now: float | None = None) -> Account:
    return fold(entries(*lines), now)


def spans(found: Account) -> list[tuple[str, float, float, int]]:
    return [(span.use.value, span.start_at, span.end_at, span.incident) for span in found.spans]


def test_a_start() -> None:
    found = account(*START, now=15.0)
    assert spans(found) == [("wait", 0, 3, 0), ("launch", 3, 4, 0), ("restore", 4, 5, 0), ("train", 5, 15, 0)]
    assert found.ettr == pytest.approx(10 / 15)
    assert (found.wall_s, found.mttr_s) == (15.0, None)
    assert found.lost_s() == {"start and end": 5.0}


def test_training_ends_at_the_last_good_step_not_at_the_alarm() -> None:
    # Resumed from step 15; six steps are redone, and the sixth is reached halfway between two reports.
    found = account(*START, *CRASH, "36 progress 16 at 35", "46 progress 26 at 45 from 16 since 35", now=50.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("detect", 25, 30, 1),
        ("stop", 30, 31, 1),
        ("launch", 31, 33, 1),
        ("restore", 33, 35, 1),
        ("redo", 35, 40, 1),
        ("train", 40, 50, 0),
    ]
    assert found.ettr == pytest.approx((20 + 10) / 50)
    assert found.mttr_s == 10.0
    assert found.lost_s() == {"start and end": 5.0, "host_oom_kill": 15.0}
    assert (found.step, found.generation, found.phase) == (26, 2, Phase.TRAINING)


def test_nothing_is_redone_when_the_state_was_whole() -> None:
    found = account(*START, *CRASH, "36 progress 22 at 35", now=40.0)
    assert spans(found)[-2:] == [("restore", 33, 35, 1), ("train", 35, 40, 0)]


def test_a_first_report_that_comes_late_counts_only_what_was_done_before_as_redone() -> None:
    found = account(*START, *CRASH, "55 progress 36 at 55 from 16 since 35", now=60.0)
    assert spans(found)[-2:] == [("redo", 35, 40, 1), ("train", 40, 60, 0)]
    assert found.step == 36


def test_counted_steps_cannot_be_compared_so_nothing_is_called_redone() -> None:
    start = (*START[:4], "6 progress 1 at 5 counted")
    crash = ("30 progress 21 at 25 from 1 since 5 counted", *CRASH[1:])
    found = account(*start, *crash, "36 progress 1 at 35 counted", now=40.0)
    assert found.spent_s(Use.REDO) == 0.0
    assert spans(found)[3:5] == [("train", 5, 25, 0), ("detect", 25, 30, 1)]


def test_chained_failures_redo_the_same_work_twice() -> None:
    # Step 21 was reached first; the second failure comes at 18, so work up to 21 is redone again.
    second = ("40 progress 18 at 38 from 16 since 35", "40 alarm crash n0 rank 0 code -11", "41 outcome 5 ok")
    third = ("42 outcome 6 ok", "44 progress 16 at 43", "54 progress 26 at 53 from 16 since 43")
    found = account(*START, *CRASH, "36 progress 16 at 35", *second, *third, now=60.0)
    assert spans(found)[8:] == [
        ("redo", 35, 38, 1),
        ("detect", 38, 40, 2),
        ("stop", 40, 41, 2),
        ("launch", 41, 42, 2),
        ("restore", 42, 43, 2),
        ("redo", 43, 48, 2),
        ("train", 48, 60, 0),
    ]
    assert found.lost_s() == {"start and end": 5.0, "host_oom_kill": 13.0, "process_crash_signal": 10.0}
    assert found.mttr_s == pytest.approx((10 + 5) / 2)


def test_a_second_failure_before_the_first_step_belongs_to_the_same_incident() -> None:
    again = ("34 alarm crash n0 rank 1 code -11", "35 outcome 5 ok", "36 outcome 6 ok", "38 progress 22 at 37")
    found = account(*START, *CRASH, *again, now=40.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("detect", 25, 30, 1),
        ("stop", 30, 31, 1),
        ("launch", 31, 33, 1),
        ("restore", 33, 34, 1),
        ("stop", 34, 35, 1),
        ("launch", 35, 36, 1),
        ("restore", 36, 37, 1),
        ("train", 37, 40, 0),
    ]
    assert [record.failures for record in found.incidents] == [2]


def test_an_incident_that_is_still_open_is_called_so() -> None:
    found = account(*START, *CRASH[:3], now=40.0)
    assert found.lost_s() == {"start and end": 5.0, "open incident": 10.0}
    assert (found.step, found.incidents) == (21, ())


def test_waiting_for_a_node_belongs_to_the_incident() -> None:
    lost = ("30 progress 21 at 25 from 1 since 5", "30 alarm silence n0 since 26", "31 outcome 3 ok")
    back = ("32 outcome 5 ok nodes n1", "50 ready n1", "51 outcome 6 ok", "52 progress 22")
    found = account(*START, *lost, *back, now=53.0)
    assert ("wait", 31, 50, 1) in spans(found)
    assert found.lost_s()["silence"] == 27.0


def test_an_incident_that_ends_the_job_is_back_dated_and_not_counted_as_repaired() -> None:
    found = account(*START, *CRASH[:2], "31 order stop", "33 outcome 4 ok", "99 tick", now=120.0)
    assert spans(found)[3:] == [("train", 5, 25, 0), ("detect", 25, 30, 1), ("stop", 30, 31, 1), ("stop", 31, 33, 0)]
    assert (found.end_at, found.code, found.ending, found.mttr_s) == (33.0, 0, "stopped by somebody", None)
    assert len(found.incidents) == 1


def test_a_job_that_is_done_ends_where_it_ended() -> None:
    found = account(*START, "10 ended n0", "11 outcome 3 ok", now=99.0)
    assert (found.end_at, found.phase, found.code) == (11.0, Phase.DONE, 0)
    assert spans(found)[-2:] == [("train", 5, 10, 0), ("stop", 10, 11, 0)]


def test_a_stale_report_is_not_progress() -> None:
    found = account(*START, *CRASH, "34 progress 99 generation 1", "36 progress 22 at 35", now=40.0)
    assert spans(found)[-1] == ("train", 35, 40, 0)
    assert found.step == 22


def test_nothing_at_all() -> None:
    found = fold([])
    assert (found.wall_s, found.ettr, found.spans, found.step) == (0.0, 0.0, (), -1)


def test_it_may_be_asked_at_any_time() -> None:
    ledger = Ledger()
    for entry in entries(*START, *CRASH, "36 progress 16 at 35", "46 progress 26 at 45 from 16 since 35"):
        ledger.add(entry)
        for now in (None, entry.at, entry.at + 5):
            found = ledger.account(now)
            assert found.wall_s == pytest.approx(sum(span.seconds for span in found.spans))
