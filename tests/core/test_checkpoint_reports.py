"""What was last written to storage, and what a job's end makes of it."""

import pytest

from holdfast.cli.terminal.quantity_text import storage_said
from holdfast.core.record.job_ending import UNSTORED
from holdfast.core.record.ledger import fold_entries
from holdfast.core.snapshots.checkpoint_reports import StorageWatch
from holdfast.model.action import Finish
from holdfast.model.decider_events import Begin, Ended, Event, Outcome
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.stored_checkpoint_report import MissedCheckpoint, StorageReport

MISSED = MissedCheckpoint(step=30, why="step 30 was not written: it is full")


def test_the_journal_gets_trouble_at_once_and_the_rest_every_ten_seconds() -> None:
    watch = StorageWatch()
    assert watch.take_news(0.5) is None
    watch.on_told(1.0, 1, 10, None)
    assert watch.take_news(1.0) == StorageReport(step=10, at=1.0)
    watch.on_told(2.0, 1, 10, None)  # another beat
    watch.on_told(3.0, 1, 20, None)
    assert watch.take_news(3.0) is None and watch.newest == StorageReport(step=20, at=3.0)
    watch.on_told(4.0, 1, 20, MISSED)
    assert watch.take_news(4.0) == StorageReport(step=20, at=3.0, missed=MISSED)
    watch.on_told(5.0, 1, 40, None)
    assert watch.take_news(5.0) == StorageReport(step=40, at=5.0)
    watch.on_told(6.0, 1, 50, None)
    assert watch.take_news(14.0) is None
    assert watch.take_news(15.0) == StorageReport(step=50, at=6.0), "though nothing was written since"
    assert watch.take_news(99.0) is None


def test_what_was_written_last_may_be_an_older_step_of_a_later_launch() -> None:
    watch = StorageWatch()
    watch.on_told(1.0, 1, 20, MISSED)
    watch.on_told(2.0, 2, -1, None)  # nothing yet
    assert watch.newest == StorageReport(step=20, at=1.0, missed=MISSED)
    watch.on_told(3.0, 2, 10, None)
    assert watch.newest == StorageReport(step=10, at=3.0)


def test_the_newest_checkpoint_may_be_one_that_no_run_resumes_from() -> None:
    watch = StorageWatch()
    watch.on_told(1.0, 3, 20, None)
    assert watch.close(-1, not_after=20) == watch.close(-1) == StorageReport(step=20, at=1.0)
    said = storage_said(watch.close(-1, not_after=9))
    assert said.startswith("step 20 was last written to storage, at ")
    assert said.endswith(", and is in doubt: no run resumes from it (holdfast ckpt ls)")


def test_a_final_step_that_nobody_tells_of_is_missed() -> None:
    watch = StorageWatch()
    assert watch.close(60) is None, "no node has told of any storage"
    watch.on_told(1.0, 1, 50, None)
    assert watch.close(-1) == StorageReport(step=50, at=1.0)
    last = watch.close(60)
    assert last and last.missed and last.missed.step == 60
    watch.on_told(2.0, 1, 60, None)
    assert watch.close(60) == StorageReport(step=60, at=2.0)


def test_a_job_that_is_ended_at_once_tells_which_step_is_on_storage() -> None:
    watch = StorageWatch()
    assert watch.cut_short(-1) == "" and watch.close(-1) is None, "no step with a number"
    assert watch.cut_short(106) == "the job is at step 106, and holdfast has written no checkpoint in this run"
    why = "the job was ended at once, at step 106, without a last checkpoint"
    assert storage_said(watch.close(-1)) == f"holdfast has written no checkpoint: {why}"
    watch.on_told(1.0, 1, 100, None)
    assert watch.cut_short(106) == "the job is at step 106, and step 100 was last written to storage in this run"
    last = watch.close(-1)
    assert last and last.step == 100 and last.missed == MissedCheckpoint(step=106, why=why)
    watch.on_told(2.0, 1, 106, None)  # its write was under way
    assert watch.cut_short(106) == "" and watch.close(-1) == StorageReport(step=106, at=2.0)


@pytest.mark.parametrize(
    ("code", "missed", "ends"), [(0, None, 0), (0, MISSED, UNSTORED), (93, MISSED, 93), (143, MISSED, 143)]
)
def test_only_a_script_that_ended_well_ends_with_another_code(
    code: int, missed: MissedCheckpoint | None, ends: int
) -> None:
    finish = Finish(id=1, code=code, grace_s=0.0, reason="enough")
    begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1), limits=Limits())
    told = StorageReport(step=20, at=2.0, missed=MISSED)
    events: list[tuple[Event, Decision]] = [
        (begin, Decision(phase=Phase.WAITING)),
        (told, Decision(phase=Phase.TRAINING)),
        (Ended(node="a", generation=1), Decision(phase=Phase.ENDING, actions=(finish,))),
        (
            Outcome(action=1, ok=True, storage=StorageReport(step=20, at=2.0, missed=missed)),
            Decision(phase=Phase.DONE),
        ),
    ]
    entries = [Entry(seq=n, at=float(n), event=event, decision=made) for n, (event, made) in enumerate(events, 1)]
    assert fold_entries(entries[:2]).storage == told
    assert fold_entries(entries[:3]).code == code, "the final state is still being written"
    account = fold_entries(entries)
    assert account.code == ends and (MISSED.why in account.ending) is (ends == UNSTORED)


def test_a_job_without_storage_owes_it_nothing() -> None:
    """A Checkpointer without a path: the final state is on the disks alone, and the job has ended well."""
    watch = StorageWatch()
    assert watch.close(8) is None
    assert watch.close(8, disk=8) == StorageReport(disk=8)
    watch.on_told(1.0, 1, 5, None)
    owed = watch.close(8, disk=8)
    assert owed is not None and owed.missed is not None and (owed.step, owed.disk) == (5, 8)


def test_what_is_older_than_the_newest_checkpoint_is_not_missed() -> None:
    watch = StorageWatch()
    watch.on_told(1.0, 1, 40, None)
    watch.on_told(2.0, 1, -1, MISSED)  # of another node, on which rank 0 was before
    assert watch.newest == StorageReport(step=40, at=1.0)
    watch.on_told(3.0, 2, -1, MISSED)  # that launch went back to an older step, and cannot write
    assert watch.newest == StorageReport(step=40, at=1.0, missed=MISSED)


def test_what_was_not_written_is_not_missed_once_the_job_goes_on_from_what_was() -> None:
    watch = StorageWatch()
    watch.on_told(1.0, 1, 20, MISSED)
    watch.on_restored(2, 25)  # from memory: storage is behind the job as before
    assert watch.newest == StorageReport(step=20, at=1.0, missed=MISSED)
    assert watch.take_news(2.0) is not None
    watch.on_restored(2, 20)
    assert watch.newest == watch.take_news(3.0) == StorageReport(step=20, at=1.0), "told at once"
    watch.on_told(4.0, 2, -1, MISSED)  # it failed again, after the restore
    watch.on_restored(2, 20)  # another beat of the same generation
    assert watch.newest == StorageReport(step=20, at=1.0, missed=MISSED)


def test_what_was_not_written_stays_missed_if_the_state_came_from_elsewhere() -> None:
    watch = StorageWatch()
    watch.on_told(1.0, 1, -1, MISSED)
    watch.on_restored(2, 10)  # a checkpoint of another run
    watch.on_restored(2, -1)  # nobody knows
    assert watch.newest == StorageReport(missed=MISSED)


def test_a_new_controller_does_not_date_the_old_checkpoint_anew() -> None:
    watch = StorageWatch()
    watch.continue_from(StorageReport(step=40, at=1.0, missed=MISSED))
    watch.on_told(90.0, 2, 40, None)
    assert watch.newest == StorageReport(step=40, at=1.0, missed=MISSED) and watch.take_news(90.0) is None
    watch.on_told(91.0, 3, 40, None)
    assert watch.newest == StorageReport(step=40, at=91.0), "a later launch has written it again"
