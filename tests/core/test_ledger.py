"""Every second is accounted for once, under the right name; the numbers here were worked out by hand."""

from typing import Any

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_account import HOLDS, PLANNED, START_AND_END, UNSETTLED, Account, TimeUse
from holdfast.core.record.ledger import Ledger, fold_entries
from holdfast.model.action import Launch
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Event, Progress, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.incident_record import Change, Record, Remedy, Verdict
from holdfast.model.job_and_seats import Job, Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.core.transcript import parse


def entries(*lines: str) -> list[Entry]:
    """Lines of a transcript, as the journal of a decider that hears them."""
    decider, journal = Decider(), []
    for seq, line in enumerate(lines, 1):
        at, text = line.split(" ", 1)
        event = parse(text, float(at), decider.view.generation)
        journal.append(Entry(seq=seq, at=float(at), event=event, decision=decider.step(float(at), event)))
    return journal


START = ("0 begin nnodes 1", "1 outcome 1 ok nodes n0", "3 ready n0", "4 outcome 2 ok", "6 progress 1 at 5")
CRASH = (
    "30 progress 21 at 25 from 1 since 5",
    "30 alarm crash n0 rank 0 code -9 since 26",
    "31 outcome 3 ok",
    "33 outcome 4 ok",
)


def account(*lines: str, now: float | None = None) -> Account:
    return fold_entries(entries(*lines), now)


def spans(found: Account) -> list[tuple[str, float, float, int]]:
    return [(span.use.value, span.start_at, span.end_at, span.incident) for span in found.spans]


def test_a_start() -> None:
    found = account(*START, now=15.0)
    assert spans(found) == [("wait", 0, 3, 0), ("launch", 3, 4, 0), ("start-up", 4, 5, 0), ("train", 5, 15, 0)]
    assert found.ettr == pytest.approx(10 / 15)
    assert (found.wall_s, found.mttr_s) == (15.0, None)
    assert found.lost_s() == {START_AND_END: 5.0}


def test_training_ends_at_the_last_good_step_not_at_the_alarm() -> None:
    # Resumed from step 15; six steps are redone, and the sixth is reached halfway between two reports.
    found = account(*START, *CRASH, "36 progress 16 at 35", "46 progress 26 at 45 from 16 since 35", now=50.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("detect", 25, 30, 1),
        ("stop", 30, 31, 1),
        ("launch", 31, 33, 1),
        ("start-up", 33, 35, 1),
        ("redo", 35, 40, 1),
        ("train", 40, 50, 0),
    ]
    assert found.ettr == pytest.approx((20 + 10) / 50)
    assert found.mttr_s == 10.0
    assert found.lost_s() == {START_AND_END: 5.0, "SIGKILL of unknown sender": 15.0}
    assert (found.step, found.generation, found.phase) == (26, 2, Phase.TRAINING)


def test_the_last_hour_has_an_ettr_of_its_own() -> None:
    lines = (*START, *CRASH, "36 progress 22 at 35")
    assert account(*lines, now=3599.0).hour_ettr is None, "it is not that old"
    # Training stood still from 25 to 35.
    assert account(*lines, now=3600.0).hour_ettr == pytest.approx((20 + 3565) / 3600)
    assert account(*lines, now=3630.0).hour_ettr == pytest.approx(3595 / 3600), "the five seconds after 30"
    assert account(*lines, now=8000.0).hour_ettr == 1.0


def test_a_counter_takes_nothing_back() -> None:
    """A start is settled by its step, training up to the newest step: an alarm may take back what came after it."""
    ledger, shown = Ledger(), []
    lost = ("31 alarm silence n0 since 27", "31.5 outcome 3 ok", "33 progress 29 at 32 from 1 since 5")
    back = ("34 outcome 4 ok", "35 outcome 5 ok nodes n1", "36 ready n1", "37 outcome 6 ok", "39 progress 29 at 38")
    for entry in entries(*START, "30 progress 21 at 25 from 1 since 5", *lost, *back):
        ledger.add(entry)
        settled = ledger.settle_account(entry.at)
        shown.append([settled.spent_s(use) for use in (TimeUse.START_UP, TimeUse.RUN, TimeUse.TRAIN)])
    assert shown[:6] == [[0, 0, 0]] * 4 + [[1, 0, 0], [1, 0, 20]]
    assert shown[6:] == [[1, 0, 20]] * 7 + [[2, 0, 20]]


def test_nothing_is_redone_when_the_state_was_whole() -> None:
    found = account(*START, *CRASH, "36 progress 22 at 35", now=40.0)
    assert spans(found)[-2:] == [("start-up", 33, 35, 1), ("train", 35, 40, 0)]


def test_a_first_report_that_comes_late_counts_only_what_was_done_before_as_redone() -> None:
    found = account(*START, *CRASH, "55 progress 36 at 55 from 16 since 35", now=60.0)
    assert spans(found)[-2:] == [("redo", 35, 40, 1), ("train", 40, 60, 0)]
    assert found.step == 36


def test_a_stand_that_ends_by_itself_is_no_training() -> None:
    stood = ("20 progress 16 at 20", "33 alarm hang n1 since 20 stance notify said standing", "41 progress 17 at 40")
    found = account(*START, *stood, now=50.0)
    assert spans(found)[-3:] == [("train", 5, 20, 0), ("stall", 20, 40, 0), ("train", 40, 50, 0)]
    assert found.lost_s() == {START_AND_END: 5.0, "stall": 20.0}
    assert found.ettr == pytest.approx(25 / 50)


def test_counted_steps_cannot_be_compared_so_nothing_is_called_redone() -> None:
    start = (*START[:4], "6 progress 1 at 5 counted")
    crash = ("30 progress 21 at 25 from 1 since 5 counted", *CRASH[1:])
    found = account(*start, *crash, "36 progress 1 at 35 counted", now=40.0)
    assert found.spent_s(TimeUse.REDO) == 0.0
    assert spans(found)[3:5] == [("train", 5, 25, 0), ("detect", 25, 30, 1)]
    assert found.at_most == "at most ", "and the ETTR may be too good"


def test_counted_steps_are_redone_where_it_is_known_from_where_on() -> None:
    start = (*START[:4], "6 progress 1 at 5 numbered")
    crash = ("30 progress 21 at 25 from 1 since 5 numbered", *CRASH[1:])
    found = account(*start, *crash, "36 progress 1 at 35 numbered", "56 progress 21 at 55 from 1 since 35 numbered")
    assert spans(found)[-2:] == [("redo", 35, 55, 1), ("train", 55, 56, 0)]
    assert not found.at_most
    assert found.ettr == pytest.approx(21 / 56)


def test_a_script_that_tells_its_epochs_late_is_not_taken_for_one_that_redoes_its_work() -> None:
    late = ("30 progress 21 at 25 from 1 since 5 numbered", "40 progress 1 at 38 from 1 since 30")
    found = account(*START[:4], "6 progress 1 at 5 numbered", *late, "50 progress 2 at 48 from 1 since 30", now=50.0)
    assert found.ran[0].steps == 21 + 1


def test_chained_failures_redo_the_same_work_twice() -> None:
    # Step 21 was reached first; the second failure comes at 18 and lost what was made since; the first lost the rest.
    second = ("40 progress 18 at 38 from 16 since 35", "40 alarm crash n0 rank 0 code -11", "41 outcome 5 ok")
    third = ("42 outcome 6 ok", "44 progress 16 at 43", "54 progress 26 at 53 from 16 since 43")
    found = account(*START, *CRASH, "36 progress 16 at 35", *second, *third, now=60.0)
    assert spans(found)[8:] == [
        ("redo", 35, 38, 1),
        ("detect", 38, 40, 2),
        ("stop", 40, 41, 2),
        ("launch", 41, 42, 2),
        ("start-up", 42, 43, 2),
        ("redo", 43, 45, 2),
        ("redo", 45, 48, 1),
        ("train", 48, 60, 0),
    ]
    assert found.lost_s() == {
        START_AND_END: 5.0,
        "SIGKILL of unknown sender": 16.0,
        "a native crash ended the process": 7.0,
    }
    assert found.mttr_s == pytest.approx((10 + 5) / 2)


def test_a_second_failure_before_the_first_step_belongs_to_the_same_incident() -> None:
    again = ("34 alarm crash n0 rank 1 code -11", "35 outcome 5 ok", "36 outcome 6 ok", "38 progress 22 at 37")
    found = account(*START, *CRASH, *again, now=40.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("detect", 25, 30, 1),
        ("stop", 30, 31, 1),
        ("launch", 31, 33, 1),
        ("start-up", 33, 34, 1),
        ("stop", 34, 35, 1),
        ("launch", 35, 36, 1),
        ("start-up", 36, 37, 1),
        ("train", 37, 40, 0),
    ]
    assert [record.failures for record in found.incidents] == [2]


def test_an_incident_that_is_still_open_is_called_so() -> None:
    found = account(*START, *CRASH[:3], now=40.0)
    assert found.lost_s() == {START_AND_END: 5.0, UNSETTLED: 10.0}
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
    assert spans(found)[-2:] == [("end", 5, 10, 0), ("stop", 10, 11, 0)]


def test_a_jump_that_nobody_can_have_made_is_not_counted() -> None:
    """A slip of the script must not spoil the figures for good."""
    slip = "20 progress 4503599627370496 at 20 from 1 since 5"
    then = ("30 progress 20 at 30 from 1 since 5", "40 progress 30 at 40 from 1 since 5")
    found = account(*START, "10 progress 10 at 10 from 1 since 5", slip, *then)
    assert found.step == 30 and [(run.steps, run.redone) for run in found.ran] == [(20, 0)]


def test_a_stale_report_is_not_progress() -> None:
    found = account(*START, *CRASH, "34 progress 99 generation 1", "36 progress 22 at 35", now=40.0)
    assert spans(found)[-1] == ("train", 35, 40, 0)
    assert found.step == 22


def test_nothing_at_all() -> None:
    found = fold_entries([])
    assert (found.wall_s, found.ettr, found.spans, found.step) == (0.0, None, (), -1)


def test_without_a_step_nobody_knows_what_was_productive() -> None:
    """Ranks run, and no step is seen: that is neither training nor the restore of anything."""
    ran = account(*START[:4], now=40.0)
    assert spans(ran) == [("wait", 0, 3, 0), ("launch", 3, 4, 0), ("run", 4, 40, 0)]
    assert (ran.ettr, ran.lost_s()) == (None, {START_AND_END: 4.0})
    again = account(*START[:4], "30 alarm crash n0 rank 0 code -9", "31 outcome 3 ok", "33 outcome 4 ok", now=40.0)
    assert spans(again)[2:] == [("run", 4, 30, 0), ("stop", 30, 31, 1), ("launch", 31, 33, 1), ("run", 33, 40, 1)]
    assert (again.ettr, again.lost_s()) == (None, {START_AND_END: 4.0, UNSETTLED: 3.0})
    assert spans(account(*START, now=40.0))[2] == ("start-up", 4, 5, 0), "with the first step it is known"


def test_an_incident_of_a_script_without_steps_is_over_when_its_ranks_run() -> None:
    hang = ("30 alarm hang n0 rank 0 since 20", "31 outcome 3 ok", "33 outcome 4 ok", "90 ended n0", "91 outcome 5 ok")
    found = account(*START[:4], *hang)
    assert spans(found)[2:6] == [("run", 4, 20, 0), ("detect", 20, 30, 1), ("stop", 30, 31, 1), ("launch", 31, 33, 1)]
    assert spans(found)[6:] == [("run", 33, 90, 1), ("stop", 90, 91, 0)]
    [record] = found.incidents
    assert record.sentence.endswith("lost 13.0 s (detect 10.0, stop 1.0, launch 2.0)")
    assert found.lost_s() == {START_AND_END: 5.0, "hang": 13.0} and found.mttr_s == 13.0


def test_it_may_be_asked_at_any_time() -> None:
    ledger = Ledger()
    for entry in entries(*START, *CRASH, "36 progress 16 at 35", "46 progress 26 at 45 from 16 since 35"):
        ledger.add(entry)
        for now in (None, entry.at, entry.at + 5):
            found = ledger.make_account(now)
            assert found.wall_s == pytest.approx(sum(span.seconds for span in found.spans))


# --- planned restarts, from entries as a decider writes them ----------------------------------------------------------

NEW = Release(number=2, source="git 1a2b3c4")
CHANGE = Change(
    why="release 2", generation=1, release=2, good_step=21, good_at=25.0, asked_at=26.0, stopped_at=27.0,
    launched_at=33.0, resumed_at=35.0, resumed_from=21, held_s=4.0,
)  # fmt: skip


class Book:
    """A journal written by hand."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1), limits=Limits())
        self.add(0, Phase.WAITING, self.begin)

    def add(self, at: float, phase: Phase, event: Event | None = None, **decided: Any) -> "Book":
        decision = Decision(phase=phase, **decided)
        self.entries.append(Entry(seq=len(self.entries) + 1, at=at, event=event or Tick(), decision=decision))
        return self

    def launch(self, at: float, generation: int, release: Release, *nodes: str) -> "Book":
        seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(nodes or ("n0",)))
        action = Launch(id=generation, generation=generation, seats=seats, release=release)
        return self.add(at, Phase.LAUNCHING, actions=(action,))

    def step(self, at: float, step: int, generation: int = 1, first: int = 1, since: float = 5.0) -> Progress:
        return Progress(generation=generation, step=step, at=at, first_step=first, first_at=since, counted=False)

    def trains(self) -> "Book":
        """Steps 1 to 21 from 5 to 25, under release 1."""
        self.launch(3, 1, self.begin.release).add(4, Phase.STARTING).add(6, Phase.TRAINING, self.step(5, 1))
        return self.add(26, Phase.TRAINING, self.step(25, 21))


def test_a_planned_restart_with_a_hold_in_it() -> None:
    book = Book().trains().add(26, Phase.PAUSING).add(27, Phase.HELD).launch(31, 2, NEW).add(33, Phase.STARTING)
    book.add(36, Phase.TRAINING, book.step(35, 22, 2, 22, 35.0), changed=CHANGE)
    book.add(46, Phase.TRAINING, book.step(45, 32, 2, 22, 35.0))
    found = fold_entries(book.entries, 50.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("pause", 25, 26, 0),
        ("pause", 26, 27, 0),
        ("hold", 27, 31, 0),
        ("launch", 31, 33, 0),
        ("start-up", 33, 35, 0),
        ("train", 35, 50, 0),
    ]
    assert [span.change for span in found.spans] == [0, 0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert found.lost_s() == {START_AND_END: 5.0, PLANNED: 6.0, HOLDS: 4.0}
    assert found.changes == (CHANGE,) and found.mttr_s is None
    assert [(ran.release, ran.source, ran.generations, ran.steps) for ran in found.ran] == [
        (1, "", 1, 21),
        (2, "git 1a2b3c4", 1, 11),
    ]


def test_work_redone_after_a_planned_restart_is_its_cost() -> None:
    book = Book().trains().add(26, Phase.PAUSING).launch(27, 2, NEW).add(33, Phase.STARTING)
    changed = msgspec.structs.replace(CHANGE, resumed_from=15, held_s=0.0)
    book.add(36, Phase.TRAINING, book.step(35, 16, 2, 16, 35.0), changed=changed)
    book.add(46, Phase.TRAINING, book.step(45, 26, 2, 16, 35.0))
    found = fold_entries(book.entries, 50.0)
    assert spans(found)[-2:] == [("redo", 35, 40, 0), ("train", 40, 50, 0)]
    assert found.lost_s()[PLANNED] == 15.0
    assert [(ran.steps, ran.redone) for ran in found.ran] == [(21, 0), (5, 6)]
    assert found.redone_steps(change=1) == 6


def test_a_release_that_fails_at_once_costs_an_incident_from_its_failure_on() -> None:
    book = Book().trains().add(26, Phase.PAUSING).launch(27, 2, NEW).add(28, Phase.STARTING).add(30, Phase.STOPPING)
    book.launch(31, 3, book.begin.release).add(32, Phase.STARTING)
    record = Record(
        number=1, generation=2, cause="x", kind="crash", klass="", verdict=Verdict(remedy=Remedy.ROLLBACK, reason="x"),
        good_step=-1, good_at=29.5, alarm_at=30.0, stopped_at=31.0, launched_at=32.0, resumed_at=34.0, resumed_from=21,
    )  # fmt: skip
    both = msgspec.structs.replace(CHANGE, resumed_at=34.0)
    book.add(35, Phase.TRAINING, book.step(34, 22, 3, 22, 34.0), closed=record, changed=both)
    found = fold_entries(book.entries, 40.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("pause", 25, 26, 0),
        ("pause", 26, 27, 0),
        ("launch", 27, 28, 0),
        ("start-up", 28, 30, 0),
        ("stop", 30, 31, 1),
        ("launch", 31, 32, 1),
        ("start-up", 32, 34, 1),
        ("train", 34, 40, 0),
    ]
    assert found.lost_s() == {START_AND_END: 5.0, PLANNED: 5.0, "crash": 4.0}


def test_a_hold_amid_an_incident_belongs_to_who_holds() -> None:
    book = Book().trains().add(26, Phase.STOPPING).add(27, Phase.HELD).add(40, Phase.ENDING).add(41, Phase.DONE)
    found = fold_entries(book.entries, 99.0)
    assert ("hold", 27, 40, 0) in spans(found)
    assert found.end_at == 41.0


def test_an_incident_goes_on_through_a_pause_that_a_person_wants_before_its_next_step() -> None:
    book = Book().trains().add(26, Phase.STOPPING).launch(27, 2, book_release()).add(28, Phase.STARTING)
    book.add(29, Phase.PAUSING).add(30, Phase.HELD).launch(31, 3, book_release()).add(32, Phase.STARTING)
    record = Record(
        number=1, generation=1, cause="x", kind="crash", klass="", verdict=Verdict(remedy=Remedy.RESTART, reason="x"),
        good_step=21, good_at=25.0, alarm_at=26.0, stopped_at=27.0, launched_at=32.0, resumed_at=34.0, resumed_from=21,
    )  # fmt: skip
    book.add(35, Phase.TRAINING, book.step(34, 22, 3, 22, 34.0), closed=record)
    found = fold_entries(book.entries, 40.0)
    assert spans(found)[3:] == [
        ("train", 5, 25, 0),
        ("detect", 25, 26, 1),
        ("stop", 26, 27, 1),
        ("launch", 27, 28, 1),
        ("start-up", 28, 29, 1),
        ("pause", 29, 30, 1),
        ("hold", 30, 31, 0),
        ("launch", 31, 32, 1),
        ("start-up", 32, 34, 1),
        ("train", 34, 40, 0),
    ]
    assert found.lost_s() == {START_AND_END: 5.0, "crash": 8.0, HOLDS: 1.0}


def test_a_pause_amid_redone_work_is_not_the_incidents() -> None:
    book = Book().trains().add(26, Phase.STOPPING).launch(27, 2, book_release()).add(28, Phase.STARTING)
    record = Record(
        number=1, generation=1, cause="x", kind="crash", klass="", verdict=Verdict(remedy=Remedy.RESTART, reason="x"),
        good_step=21, good_at=25.0, alarm_at=26.0, stopped_at=27.0, launched_at=28.0, resumed_at=30.0, resumed_from=1,
    )  # fmt: skip
    book.add(30, Phase.TRAINING, book.step(30, 2, 2, 2, 30.0), closed=record)
    book.add(35, Phase.TRAINING, book.step(35, 7, 2, 2, 30.0)).add(36, Phase.PAUSING).add(37, Phase.HELD)
    found = fold_entries(book.entries, 40.0)
    assert spans(found)[-3:] == [("redo", 30, 36, 1), ("pause", 36, 37, 0), ("hold", 37, 40, 0)]


def book_release() -> Release:
    return Release(number=1)


def test_nodes_that_are_new_are_being_admitted_until_there_is_a_step() -> None:
    ledger = Ledger()
    book = Book().trains().add(26, Phase.PAUSING).launch(27, 2, NEW, "n1", "n0")
    for entry in book.entries:
        ledger.add(entry)
    assert ledger.admitting == {"n1"}
    book.add(36, Phase.TRAINING, book.step(35, 22, 2, 22, 35.0), changed=CHANGE)
    ledger.add(book.entries[-1])
    assert ledger.admitting == frozenset()


def test_time_begins_with_the_command_and_not_with_its_controller() -> None:
    journal = entries(*START)
    begin = msgspec.structs.replace(journal[0].event, started_at=-7.0)
    journal[0] = msgspec.structs.replace(journal[0], event=begin)
    found = fold_entries(journal, 15.0)
    assert spans(found)[0] == ("wait", -7, 3, 0) and found.wall_s == 22.0
    assert found.ettr == pytest.approx(10 / 22)
