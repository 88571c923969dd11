"""A controller after one that was killed, whose journal has lost what nodes were told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.config import Settings
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.api import ApiEntrance, make_api
from holdfast.controller.composition import build_controller
from holdfast.core.decide.action_ids import EPOCH_IDS
from holdfast.core.detect import vanished_ranks
from holdfast.core.snapshots.node_eviction_bonds import copy_bonds
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Ended, MeshReport, Order, Successor
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Done, LaunchHere, StopHere
from holdfast.model.observation import Beat, Departure
from holdfast.model.state_copy import Copy
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import ErrandMessage, Hello, Welcome
from tests.controller.conftest import HEADERS, JOB, RELEASE, Agent, Desk, Open, admit, make_ports
from tests.controller.fakes import FakeFleet


class Lived(Desk):
    """One life of a controller, and what it said."""

    said: list[str]


@contextlib.asynccontextmanager
async def life(folder: Path, *departed: Departure, job: Job = JOB) -> AsyncIterator[Lived]:
    """Killed at its end. Its fleet knows of nodes that have departed."""
    journal = SqliteJournal(folder / "journal.db", mark_path=folder / "journal.mark")
    fleet, notes = FakeFleet(can_acquire=False), NotesFolder(folder)
    fleet.departed = departed
    said: list[str] = []
    ports = make_ports(folder, journal=journal, fleet=fleet, notes=notes, say=said.append)
    built = build_controller(Settings(), ports)
    async with TestClient(TestServer(make_api(built, ApiEntrance(admit, AuditLog(folder))))) as client:
        running = asyncio.create_task(built.controller.run(job, RELEASE))
        await asyncio.sleep(0.01)
        desk = Lived(built, client)
        desk.said = said
        yield desk
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await running
    journal._db.close()


def drop(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


DB = ("journal.db", "journal.db-wal", "journal.db-shm")


async def back(desk: Desk, generation: int, epoch: int) -> Agent:
    """The agent of node a finds the next controller."""
    agent = await desk.link("a")
    hello = Hello(node="a", host="h", nproc=1, order=0, generation=generation, ready=True, epoch=epoch)
    await agent.ws.send_bytes(agent_messages.encode(hello))
    return agent


async def test_an_old_answer_is_not_believed_and_no_generation_comes_twice(tmp_path: Path) -> None:
    """All of the journal is gone: ranks are ended with a sentence, and what is launched has a number of its own."""
    async with life(tmp_path) as first:
        await first.train()
        assert (first.controller.epoch, first.said) == (1, [])
    drop(tmp_path, *DB)
    async with life(tmp_path) as second:
        assert second.controller.epoch == 2
        told, waits = second.said
        assert " 130 s " in waits and " on a" in waits and second.controller.view.fenced == {"a"}
        [taken] = [event for event in second.events() if isinstance(event, Successor)]
        assert taken.lost is not None and (taken.lost.kept, taken.lost.generation, taken.lost.damaged) == (0, 1, False)
        assert "generation 1 " in told
        agent = await back(second, 1, 1)
        stop = await agent.hear()
        assert isinstance(stop, ErrandMessage) and isinstance(stop.errand, StopHere), "before it is welcome"
        assert (stop.errand.generation, agent.epoch) == (1, 2)
        copy = Copy(rank=0, step=9, node="a", layout="x", world=1, whole=True)
        await agent.post(Done(id=stop.errand.id, node="a", ok=True, copies=(copy,)))
        launch = await agent.errand()
        assert isinstance(launch, LaunchHere)
        assert (launch.generation, launch.id > 2 * EPOCH_IDS) == (2, True)
        assert launch.restore.step == 9, "memory that nodes still hold is gone on from"


async def test_ranks_that_the_journal_knows_are_not_touched(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
        first.controller.journal.flush()
        kept = {name: (tmp_path / name).read_bytes() for name in DB[:2]}
        first.controller.process_event(Ended(node="a", generation=9))
        first.controller.journal.flush()
    drop(tmp_path, *DB)
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    async with life(tmp_path) as second:
        assert len(second.said) == 1
        assert second.controller.view.phase is Phase.TRAINING
        agent = await back(second, 1, 1)
        welcome = await agent.hear()
        assert isinstance(welcome, Welcome) and agent.epoch == 2
        await agent.beat(101)
        await second.until(lambda: "a" in second.controller.registry.beats, "a beat")
        assert second.controller.view.phase is Phase.TRAINING


async def test_nodes_that_know_of_more_than_both_files_are_believed(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
    drop(tmp_path, *DB, "journal.mark", "plan.json")
    async with life(tmp_path) as second:
        assert (second.controller.epoch, second.said) == (1, [])
        agent = await back(second, 6, 4)
        stop = await agent.hear()
        assert isinstance(stop, ErrandMessage) and isinstance(stop.errand, StopHere) and stop.errand.generation == 6
        assert (second.controller.epoch, agent.epoch, second.controller.links.epoch) == (5, 5, 5)
        told, waits = second.said
        [taken] = [event for event in second.events() if isinstance(event, Successor)]
        assert taken.lost is not None and (taken.lost.kept, taken.lost.of, taken.lost.nodes) == (1, 0, ())
        assert "generation 6 " in told and waits
    async with life(tmp_path) as third:
        assert third.controller.epoch == 6


HELD = Copy(rank=0, step=9, node="a", layout="x", world=1, whole=True)


async def returned(desk: Desk) -> LaunchHere:
    """Node a comes back with a state in its memory; the launch that it is told."""
    agent = await desk.link("a")
    hello = Hello(node="a", host="h", nproc=1, order=0, generation=1, ready=True, epoch=1, copies=(HELD,))
    await agent.ws.send_bytes(agent_messages.encode(hello))
    launch = await agent.errand()
    assert isinstance(launch, LaunchHere) and launch.generation == 2
    return launch


async def test_a_launch_that_was_written_down_and_not_planned_goes_on_from_what_its_nodes_hold(tmp_path: Path) -> None:
    """The controller died between the journal's entry and the plan; the next one acts before any node is back."""
    async with life(tmp_path) as first:
        agent = await first.train()
        plan = (tmp_path / "plan.json").read_bytes()
        await agent.post(Alarm(kind=Kind.CRASH, at=2.0, suspects=("a",), reason="killed", generation=1))
        stop = await agent.errand()
        assert isinstance(stop, StopHere)
        await agent.post(Done(id=stop.id, node="a", ok=True, copies=(HELD,)))
        launch = await agent.errand()
        assert isinstance(launch, LaunchHere) and launch.restore.step == 9
    (tmp_path / "plan.json").write_bytes(plan)
    async with life(tmp_path) as second:
        assert second.controller.view.phase is Phase.LAUNCHING
        assert (await returned(second)).restore.step == 9


async def test_a_resume_before_any_node_is_back_goes_on_from_what_nodes_hold(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        agent = await first.train()
        first.controller.process_event(Order(verb="hold", who="Ada"))
        await agent.answer(await agent.errand())
        await first.phase(Phase.HELD)
        first.controller.journal.flush()
    async with life(tmp_path) as second:
        second.controller.process_event(Order(verb="resume", who="Ada"))
        await asyncio.sleep(0.05)
        assert (await returned(second)).restore.step == 9


async def test_a_mark_that_is_gone_is_told(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
        first.controller.journal.flush()
    drop(tmp_path, "journal.mark")
    async with life(tmp_path) as second:
        [told] = second.said
        assert "journal.mark " in told
        assert second.controller.view.phase is Phase.TRAINING
        assert isinstance(second.events()[-1], Successor)


async def test_a_generation_without_ranks_is_an_alarm(desk_of: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the books say."""
    monkeypatch.setattr(vanished_ranks, "_NEWS_S", 0.3)
    async with desk_of() as desk:
        agent = await desk.train()
        beat = Beat(node="a", generation=1, step=2, at=2.0, first_step=1, first_at=1.0, counted=False, running=0)
        for _ in range(200):
            await agent.ws.send_bytes(agent_messages.encode(beat))
            if desk.controller.view.phase is Phase.STOPPING:
                break
            await asyncio.sleep(0.01)
        assert desk.controller.view.phase is Phase.STOPPING
        [alarm] = [event for event in desk.events() if isinstance(event, Alarm)]
        assert alarm.signature == "deserted a"


async def test_a_plan_of_which_the_journal_knows_nothing_is_a_loss(tmp_path: Path) -> None:
    """Also where the mark is gone with the end of the journal."""
    async with life(tmp_path) as first:
        await first.train()
    drop(tmp_path, *DB, "journal.mark")
    async with life(tmp_path) as second:
        [taken] = [event for event in second.events() if isinstance(event, Successor)]
        assert taken.lost is not None and (taken.lost.kept, taken.lost.generation) == (1, 1)
        assert second.controller.view.generation == 1


def departed(*, ended: bool, generation: int = 1) -> Departure:
    beat = Beat(
        node="a", generation=generation, step=40, at=5.0, first_step=1, first_at=1.0, counted=False, parted=ended
    )
    return Departure(node="a", generation=generation, at=9.0, reason="no controller for 60 s", ended=ended, beat=beat)


async def test_what_a_node_stored_without_a_controller_is_what_was_last_written(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
        first.controller.journal.flush()
    left = departed(ended=True)
    assert left.beat is not None
    left = replace(left, beat=replace(left.beat, stored=40, stored_at=8.0))
    async with life(tmp_path, left) as second:
        await second.until(lambda: second.controller.view.phase is Phase.DONE, "the end of the job")
        stored = second.controller.ledger.make_account().storage
        assert stored and (stored.step, stored.at) == (40, 8.0)


@pytest.mark.parametrize("flushed", [True, False])
async def test_ranks_that_ended_well_without_a_controller_are_neither_silent_nor_evicted(
    tmp_path: Path, flushed: bool
) -> None:
    """Whether or not the first step was on disk when the controller was killed."""
    async with life(tmp_path) as first:
        await first.train()
        if flushed:
            first.controller.journal.flush()
    async with life(tmp_path, departed(ended=True)) as second:
        await second.until(lambda: second.controller.view.phase is Phase.DONE, "the end of the job")
        account = second.controller.ledger.make_account()
        assert (account.code, account.step, account.incidents) == (0, 40, ())
        [unwatched] = account.unwatched
        assert 0 < unwatched.since <= unwatched.until


async def test_a_node_that_left_without_a_controller_tells_how_far_its_ranks_came(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
        first.controller.journal.flush()
    async with life(tmp_path, departed(ended=False)) as second:
        cause = second.controller.view.cause
        assert cause is not None and cause.reason == "left by itself: no controller for 60 s"
        assert second.controller.ledger.step == 40


async def test_what_a_node_wrote_of_an_older_generation_is_not_heard(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.train()
        first.controller.journal.flush()
    async with life(tmp_path, departed(ended=True, generation=7)) as second:
        assert second.controller.view.phase is Phase.TRAINING and second.controller.ledger.step == 1


MESH = (("pp", 2), ("dp", 2))


def peers(desk: Desk) -> dict[str, str]:
    """Who keeps whose copies; held against the bonds by which nodes are spared."""
    view, placed = desk.controller.view, desk.controller.aims.floor.peers
    bonds = copy_bonds(view.seats, view.mesh, parity=False)
    assert all(frozenset({keeper}) in bonds[owner] for owner, keeper in placed.items())
    return placed


async def test_the_groups_that_the_script_reported_are_in_the_journal_for_the_next_controller(tmp_path: Path) -> None:
    """Copies are placed by them and nodes are spared by them, before and after, and one node speaks for all."""
    four = Job(run_id="r", min_nodes=4, max_nodes=4, can_acquire=False)
    async with life(tmp_path, job=four) as first:
        agents = [await first.link(node) for node in "abcd"]
        for agent in agents:
            await agent.hello()
        for agent in agents:
            await agent.answer(await agent.errand())
        await first.phase(Phase.STARTING)
        assert peers(first) == {"a": "c", "b": "d", "c": "a", "d": "b"}, "half the job away"
        await agents[1].beat(1, mesh=(("dp", 4),))
        for _ in range(2):
            for agent in (agents[0], *agents[2:]):
                await agent.beat(1, mesh=MESH)
        await first.phase(Phase.TRAINING)
        assert peers(first) == {"a": "d", "b": "c", "c": "b", "d": "a"}, "of another pipeline, and another replica"
        assert [event.mesh for event in first.events() if isinstance(event, MeshReport)] == [MESH]
        assert first.said.count("parallel groups of the script: pp=2,dp=2") == 1
    async with life(tmp_path, job=four) as second:
        assert second.controller.view.mesh == MESH
        assert peers(second) == {"a": "d", "b": "c", "c": "b", "d": "a"}
        assert not any("parallel groups" in said for said in second.said)
        answer = await second.client.get("/api/v1/status", headers=HEADERS)
        assert (await answer.json())["mesh"] == "pp=2,dp=2"
