"""The loop: write down, then act; a successor goes on where the journal ends; a step that fails is the end."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.cli.launch import controller_main
from holdfast.config import Settings
from holdfast.controller import control_loop
from holdfast.controller.control_loop import Controller
from holdfast.controller.job_clock import SteadyClock
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Acquire, Action, Finish, Launch, Say
from holdfast.model.decider_events import Ended, Order, Outcome, Progress, Ready, Successor, Tick
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.wire.agent_messages import Ack
from tests.controller.conftest import HEADERS, RELEASE, Open, make
from tests.controller.fakes import FakeFleet

JOB = Job(run_id="r", min_nodes=1, max_nodes=1)


class Recorder:
    """Notes the actions that are to be carried out, and whether each stood in the journal by then."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.seen: list[Action] = []
        self.written: list[bool] = []
        controller.executor.carry_out = self.carry  # type: ignore[method-assign]

    async def carry(self, action: Action) -> None:
        self.seen.append(action)
        journal = self.controller.journal
        assert isinstance(journal, SqliteJournal)
        other = SqliteJournal(journal._path, read_only=True)
        self.written.append(any(action in entry.decision.actions for entry in other.read()))
        other.close()


@contextlib.asynccontextmanager
async def running(controller: Controller):  # type: ignore[no-untyped-def]
    task = asyncio.create_task(controller.run(JOB, RELEASE))
    await asyncio.sleep(0.01)
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
        await task


async def test_an_action_is_on_disk_before_it_is_carried_out(tmp_path: Path) -> None:
    controller = make(tmp_path, Settings(), FakeFleet()).controller
    recorder = Recorder(controller)
    async with running(controller):
        controller.process_event(Ready(node="a", host="h", nproc=1))
        await asyncio.sleep(0.01)
    assert [type(action).__name__ for action in recorder.seen] == ["Acquire", "Launch"]
    assert all(recorder.written)


async def test_a_successor_repeats_what_has_no_outcome(tmp_path: Path) -> None:
    first = make(tmp_path, Settings(), FakeFleet()).controller
    Recorder(first)
    async with running(first):
        first.process_event(Outcome(action=1, ok=True, nodes=("a",)))
        first.process_event(Ready(node="a", host="h", nproc=1))
    before = first.view
    first.journal.close()
    second = make(tmp_path, Settings(), FakeFleet()).controller
    recorder = Recorder(second)
    async with running(second):
        assert second.view.phase is before.phase is Phase.LAUNCHING
        assert (second.seq, second.epoch, first.epoch) == (first.seq + 1, 2, 1)
        assert [entry.event for entry in second.journal.read(after=first.seq)] == [Successor(epoch=2)]
        assert [type(action) for action in recorder.seen] == [Launch]
        assert second.detectors.pace.generation == 1
        assert second.clock() >= second.ledger.make_account().end_at
    second.journal.close()


async def test_a_controller_that_may_have_lost_its_lease_ends_before_it_surveys_decides_or_acts(tmp_path: Path) -> None:
    """As one that slept: whatever it does first, it asks first."""
    lost = False

    def check() -> None:
        if lost:
            raise LeaseLostError("another controller has it")

    journal = SqliteJournal(tmp_path / "journal.db", check_lease=check)
    fleet = FakeFleet()
    fleet.survey_s = 0.01
    controller = make(tmp_path, Settings(), fleet, journal=journal).controller
    async with running(controller) as task:
        await asyncio.sleep(0.2)
        assert fleet.surveys > 2
        lost, before = True, (controller.seq, fleet.surveys, tuple(fleet.here))
        with pytest.raises(LeaseLostError):
            controller.process_event(Ready(node="a", host="h", nproc=1))
        with pytest.raises(LeaseLostError):
            await controller.executor.carry_out(Acquire(id=99, count=1))
        with pytest.raises(LeaseLostError):
            controller.links.send_message("a", Ack(seq=1))
        await asyncio.wait({task}, timeout=10)
        assert task.done() and isinstance(task.exception(), ExceptionGroup)
        assert (controller.seq, fleet.surveys, tuple(fleet.here)) == before
    journal._db.close()


@pytest.mark.parametrize(("code", "phase"), [(OUT_OF_TIME, Phase.WAITING), (0, Phase.DONE)])
async def test_only_a_job_that_ran_out_of_time_goes_on(tmp_path: Path, code: int, phase: Phase) -> None:
    first = make(tmp_path, Settings(), FakeFleet()).controller
    Recorder(first)
    async with running(first) as task:
        first.process_event(Order(verb="stop", who="SIGTERM", code=code))
        first.process_event(Outcome(action=first.view.awaited, ok=True))
        assert await task == code
    again = make(tmp_path, Settings(), FakeFleet()).controller
    assert await again.run(JOB, RELEASE) == code, "a controller that only died has nothing left to do"
    resumed = make(tmp_path, Settings(), FakeFleet()).controller
    recorder = Recorder(resumed)
    task = asyncio.create_task(resumed.run(JOB, RELEASE, resumed_at=time.time() + 1))
    await asyncio.sleep(0.05)
    assert resumed.view.phase is phase and task.done() is (phase is Phase.DONE)
    assert [type(action) for action in recorder.seen] == ([Acquire] if phase is Phase.WAITING else [])
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
        await task


async def test_ranks_that_cannot_meet_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "MEET_S", 0.0)
    controller = make(tmp_path, Settings(), FakeFleet()).controller
    recorder = Recorder(controller)

    def phase() -> Phase:
        return controller.view.phase

    async with running(controller):
        controller.on_store_lost()  # nobody needs it yet
        controller.process_event(Ready(node="a", host="h", nproc=1))
        controller.process_event(Outcome(action=controller.view.awaited, ok=True))
        assert phase() is Phase.STARTING
        controller.on_store_lost()
        await asyncio.sleep(0.05)
        assert phase() is Phase.STOPPING and "store" in controller.reason
        controller.process_event(Outcome(action=controller.view.awaited, ok=True))
        controller.process_event(Outcome(action=controller.view.awaited, ok=True))
        controller.on_store_lost()
        controller.process_event(Progress(generation=2, step=1, at=1.0, first_step=1, first_at=1.0, counted=False))
        await asyncio.sleep(0.05)
        assert phase() is Phase.TRAINING, "those that had met need it no more"
    assert [type(action).__name__ for action in recorder.seen if not isinstance(action, Acquire | Say)] == [
        "Launch",
        "Stop",
        "Launch",
    ]


async def test_a_successor_watches_from_now_on(tmp_path: Path) -> None:
    """Or it would take a job whose nodes have not spoken to it yet for one that has stood since 1970."""
    first = make(tmp_path, Settings(), FakeFleet()).controller
    Recorder(first)
    async with running(first):
        first.process_event(Outcome(action=1, ok=True, nodes=("a",)))
        first.process_event(Ready(node="a", host="h", nproc=1))
    first.journal.close()
    second = make(tmp_path, Settings(), FakeFleet()).controller
    Recorder(second)
    async with running(second):
        hang = second.detectors.stalls.hang
        assert hang.generation == 1
        assert not hang.should_look(second.clock())
    second.journal.close()


async def test_a_successor_of_one_that_was_done_ends_at_once(tmp_path: Path) -> None:
    first = make(tmp_path, Settings(), FakeFleet()).controller
    recorder = Recorder(first)
    async with running(first):
        first.process_event(Order(verb="stop", who="me", code=5))
        await asyncio.sleep(0.01)
        [finish] = [action for action in recorder.seen if isinstance(action, Finish)]
        first.process_event(Outcome(action=finish.id, ok=True))
        first.journal.close()
    second = make(tmp_path, Settings(), FakeFleet()).controller
    async with asyncio.timeout(120):
        assert await second.run(JOB, RELEASE) == 5


async def test_a_job_that_is_done_waits_for_nobody(tmp_path: Path) -> None:
    """A launch whose nodes never answer must not keep the controller once the job has ended."""
    controller = make(tmp_path, Settings(), FakeFleet()).controller
    task = asyncio.create_task(controller.run(JOB, RELEASE))
    await asyncio.sleep(0.01)
    controller.process_event(Ready(node="a", host="h", nproc=1))
    await asyncio.sleep(0.01)
    controller.process_event(Order(verb="stop", who="me", code=7, now=True))
    await asyncio.sleep(0.01)
    controller.end_at_once()
    async with asyncio.timeout(120):
        assert await task == 7


async def test_whoever_calls_after_the_end_gets_a_sentence(desk_of: Open) -> None:
    """The port stays open while hooks hear of the end, and a person may press Ctrl-C once more."""
    async with desk_of() as desk:
        desk.controller.process_event(Order(verb="stop", who="me", code=7, now=True))
        await desk.until(lambda: desk.controller.is_over, "the end")
        seq = desk.controller.seq
        desk.controller.process_event(Order(verb="stop", who="me"))
        desk.controller.end_at_once()
        assert desk.controller.seq == seq
        answer = await desk.client.get("/api/v1/entries", headers=HEADERS)
        assert (answer.status, list(await answer.json())) == (503, ["error"])
        assert (await desk.client.get("/api/v1/status", headers=HEADERS)).status == 200


@pytest.mark.parametrize("in_allocation", [True, False])
async def test_slurms_sigterm_counts_once_though_it_comes_twice(desk_of: Open, in_allocation: bool) -> None:
    """To this process itself, where Slurm tracks processes, and by the supervisor; else the second hurries the end."""
    async with desk_of() as desk:
        await desk.train()
        controller_main._on_signals(desk.controller, in_allocation=in_allocation, come=[])
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await desk.phase(Phase.ENDING)
            await asyncio.sleep(0.05)
        assert desk.controller.dispatch._hurried is not in_allocation


async def test_a_step_that_fails_is_the_end(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever brought the news survives it, as the server does; the controller must not."""
    async with desk_of() as desk:
        agent = await desk.train()
        monkeypatch.setattr(desk.controller.ledger, "add", broken)
        await agent.post(Ended(node="a", generation=1))
        with pytest.raises(BaseExceptionGroup) as failed:
            await _ended(desk.controller)
        assert failed.group_contains(AssertionError, match="a step failed")


async def test_an_entry_that_cannot_be_written_is_the_last_of_its_controller(desk_of: Open) -> None:
    """Else the next event would be written after a gap, and nobody could read the journal beyond that."""
    async with desk_of() as desk:
        agent = await desk.train()
        with pytest.raises(OverflowError):
            desk.controller.process_event(Order(verb="hold", who="Ada", number=1 << 70))
        with pytest.raises(AssertionError, match="a step failed"):
            desk.controller.process_event(Order(verb="hold", who="Ada"))
        await agent.beat(9)
        with pytest.raises(BaseExceptionGroup):
            await _ended(desk.controller)
        entries = list(desk.controller.journal.read())
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        assert not any(isinstance(entry.event, Order) for entry in entries)


def broken(entry: Entry) -> None:
    raise KeyError("a bug")


async def _ended(controller: Controller) -> None:
    [task] = [t for t in asyncio.all_tasks() if t.get_coro().__qualname__ == "Controller.run"]  # type: ignore[union-attr]
    async with asyncio.timeout(120):
        await task


def test_the_clock_never_runs_backwards() -> None:
    ahead = time.time() + 1000
    clock = SteadyClock(not_before=ahead)
    assert clock() >= ahead
    assert clock() <= clock()
    assert abs(SteadyClock()() - time.time()) < 5


async def test_the_decider_is_woken(tmp_path: Path) -> None:
    controller = make(tmp_path, Settings(), FakeFleet()).controller
    Recorder(controller)
    async with running(controller):
        controller.last = Decision(wake_at=controller.clock() + 0.05)
        for _ in range(500):
            controller.journal.flush()
            if any(isinstance(entry.event, Tick) for entry in controller.journal.read()):
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("no tick")
    controller.journal.close()
