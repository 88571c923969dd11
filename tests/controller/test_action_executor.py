"""Actions become errands, answers become outcomes; nobody is waited for in vain."""

import asyncio

import msgspec
import pytest

from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.actions.action_executor import EVICTED, ActionExecutor
from holdfast.controller.actions.errand_dispatch import FELL_SILENT, SILENT, ErrandDispatch
from holdfast.controller.actions.node_probing import NodeProbing
from holdfast.controller.actions.release_staging import ReleaseStaging
from holdfast.controller.actions.replay_runs import ReplayRuns
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.peer_copies_and_aims import SnapshotAims
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.diagnose.probe_assessment import ProbeLimits
from holdfast.core.membership.host_blocking import BlockLimits
from holdfast.core.record.ledger import Ledger
from holdfast.core.replay.regrouped_replay import ReplayLimits
from holdfast.core.snapshots import restore_choice
from holdfast.core.snapshots.disk_floor_coordination import DiskFloor, DiskLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits, RecoveryFloor
from holdfast.linux.local_time import clock_text
from holdfast.model.action import Acquire, Action, Dismiss, Launch, Say, Stop
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, MeshReport, Outcome, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job, Seat
from holdfast.model.node_errands import Done, Errand, LaunchHere, Leave, StopHere
from holdfast.model.observation import Beat
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.model.state_copy import Copy
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import ErrandMessage
from tests.controller.fakes import FakeFleet, FakeStore, MemoryBlockList, MemoryNotes

LAUNCH = Launch(
    id=7,
    generation=3,
    seats=(Seat(node="a", group_rank=0, first_rank=0, nproc=2), Seat(node="b", group_rank=1, first_rank=2, nproc=2)),
)
STOP = Stop(id=8, generation=3, nodes=("a", "b"), grace_s=0.0)


QUICK = Limits(stop_s=0.05, launch_s=0.05)


class NotedOutbox(asyncio.Queue[bytes]):
    """The outbox of one node; the errands put into it join those of all nodes, in their order."""

    def __init__(self, node: str, told: list[tuple[str, Errand]]) -> None:
        super().__init__()
        self.node, self.told = node, told

    def put_nowait(self, item: bytes) -> None:
        message = agent_messages.decode_from_controller(item).message
        assert isinstance(message, ErrandMessage)
        self.told.append((self.node, message.errand))


class Bench:
    """An executor whose nodes, a and b if no others are given, are linked and do nothing by themselves."""

    def __init__(self, *nodes: str, limits: Limits = QUICK, notes: MemoryNotes | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self.told: list[tuple[str, Errand]] = []
        self.said: list[str] = []
        self.fleet, self.store, self.notes = FakeFleet(*nodes), FakeStore(), notes or MemoryNotes()
        self.decider, self.links = Decider(), NodeLinks(lambda: 1)
        job = Job(run_id="r", min_nodes=1, max_nodes=2, max_restarts=4)
        self.decider.step(0.0, Begin(job=job, limits=limits))
        self.registry = NodeRegistry(SilenceLimits(), self.decider.view, self.links)
        certificates = NodeCertificates(self.decider.view, self.registry.holds_copies, self.said.append)
        floor = RecoveryFloor(BackupLimits(), lambda: None, DiskFloor(DiskLimits(path="/disk")))
        self.dispatch = ErrandDispatch(self.links, self.registry)
        ask, say = self.dispatch.ask_nodes, self.said.append
        self.executor = ActionExecutor(
            fleet=self.fleet,
            store=self.store,
            notes=self.notes,
            say=say,
            view=self.decider.view,
            ledger=Ledger(),
            links=self.links,
            registry=self.registry,
            aims=SnapshotAims(floor, self.registry, self.links, certificates, say),
            dispatch=self.dispatch,
            probing=NodeProbing(ask, self.store, self.registry.hosts, ProbeLimits(), None),
            replaying=ReplayRuns(
                ask, self.store, ReplayLimits(), view=self.decider.view, registry=self.registry, say=say
            ),
            staging=ReleaseStaging(ask),
            admission=HostAdmission(MemoryBlockList(), BlockLimits(), self.decider.view, now=lambda: 0.0, say=say),
        )
        for node in nodes or ("a", "b"):
            self.links.open_link(node, NotedOutbox(node, self.told))

    async def carry_out(self, action: Action) -> None:
        if outcome := await self.executor.carry_out(action):
            self.outcomes.append(outcome)

    def hold(self, copies: dict[str, tuple[Copy, ...]]) -> None:
        """The nodes tell what they hold."""
        for node, held in copies.items():
            self.registry.record_copies(node, held)

    def done(self, node: str, id: int, error: str = "") -> None:
        self.dispatch.on_done(Done(id=id, node=node, ok=not error, detail=error))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_launch_is_told_to_every_seat() -> None:
    bench = Bench(limits=Limits())
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    errands = dict(bench.told)
    assert bench.store.opened == [3]
    assert errands["b"] == LaunchHere(
        id=7,
        generation=3,
        seat=LAUNCH.seats[1],
        world_size=4,
        group_world_size=2,
        store_host="127.0.0.1",
        store_port=7003,
        run_id="r",
        max_restarts=4,
        restore=Restore(reason="nothing to restore from memory: no snapshots are held"),
        line=(LaunchOrigin(generation=3),),
    )
    bench.done("a", 7)
    bench.done("a", 7)  # told twice: nobody minds
    bench.done("b", 99)  # of another action
    await settle()
    assert not bench.outcomes
    bench.done("b", 7)
    await carried
    assert bench.outcomes == [Outcome(action=7, ok=True)]
    bench.done("b", 7)  # late


async def test_ranks_without_a_step_in_common_are_told_of_with_what_mends_it() -> None:
    bench = Bench(limits=Limits())
    steps = {"a": ((0, 60), (1, 60)), "b": ((2, 20), (3, 20))}
    copy = Copy(rank=0, step=0, node="", layout="l", world=4, whole=True)
    for node, held in steps.items():
        bench.hold({node: tuple(msgspec.structs.replace(copy, node=node, rank=r, step=s) for r, s in held)})
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    for node in "ab":
        bench.done(node, 7)
    await carried
    assert bench.outcomes[0].apart == "ranks 0-1: step 60, ranks 2-3: step 20"
    assert bench.said == [restore_choice.advise_apart(bench.outcomes[0].apart)]


@pytest.mark.parametrize("news", ["back", "silent", "stopped"])
async def test_a_launch_is_planned_when_its_nodes_have_told_what_they_hold_or_are_silent(news: str) -> None:
    """And never once it is to be stopped."""
    bench = Bench("a", limits=Limits())
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    assert not bench.told and not bench.notes.get_note("plan.json")
    if news == "back":
        bench.links.open_link("b", NotedOutbox("b", bench.told))
        bench.dispatch.on_relink("b")
    elif news == "silent":
        bench.dispatch.on_silent("b")
    else:
        bench.dispatch.on_stop(LAUNCH.generation)
    await settle()
    assert [node for node, _ in bench.told] == {"back": ["a", "b"], "silent": ["a"], "stopped": []}[news]
    assert [outcome.ok for outcome in bench.outcomes] == ([False] if news == "stopped" else [])
    carried.cancel()


async def test_failures_are_named_by_node() -> None:
    bench = Bench()
    carried = asyncio.create_task(bench.carry_out(STOP))
    await settle()
    assert bench.told == [(node, StopHere(id=8, generation=3, grace_s=0.0)) for node in ("a", "b")]
    bench.done("b", 8, "pid 5 does not die")
    await carried  # a says nothing
    assert bench.outcomes == [
        Outcome(action=8, ok=False, failed={"a": "no answer within 0.05 s", "b": "pid 5 does not die"})
    ]


async def test_a_silent_node_is_not_waited_for() -> None:
    bench = Bench(limits=Limits())
    bench.dispatch.on_silent("b")
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    assert [node for node, _ in bench.told] == ["a"]
    bench.dispatch.on_silent("a")
    await carried
    assert bench.outcomes[0].failed == {"a": FELL_SILENT, "b": SILENT}


async def test_a_node_that_is_back_is_told_again() -> None:
    bench = Bench(limits=Limits())
    bench.dispatch.on_silent("b")
    bench.dispatch.on_relink("b")
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    bench.done("a", 7)
    bench.dispatch.on_relink("a")  # it has answered
    bench.dispatch.on_relink("b")
    assert [node for node, _ in bench.told] == ["a", "b", "b"]
    assert bench.told[1] == bench.told[2]
    bench.done("b", 7)
    await carried
    assert bench.outcomes == [Outcome(action=7, ok=True)]
    bench.dispatch.on_relink("b")
    assert len(bench.told) == 3


async def test_a_launch_that_is_being_stopped_is_not_told_again() -> None:
    """A node that was started anew would launch what is over: it remembers that it was stopped, and not what."""
    bench = Bench(limits=Limits())
    launched = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    stopped = asyncio.create_task(bench.carry_out(STOP))
    await settle()
    bench.told.clear()
    bench.dispatch.on_relink("b")
    assert [type(errand) for _, errand in bench.told] == [StopHere]
    for id in (7, 8):
        bench.done("a", id)
        bench.done("b", id)
    await asyncio.gather(launched, stopped)


@pytest.mark.parametrize("error", [OSError("no store"), TimeoutError("no store"), ValueError("no store")])
async def test_a_store_that_fails_is_an_outcome(error: Exception) -> None:
    bench = Bench()
    bench.store.error = error
    await bench.carry_out(LAUNCH)
    assert bench.outcomes == [Outcome(action=7, ok=False, detail="no store")]
    assert not bench.told


async def test_nodes_of_an_earlier_try_count_first() -> None:
    """A controller that died after its fleet had started nodes, and before it could write that down."""
    bench = Bench("a", "b")
    bench.decider.step(1.0, Ready(node="a", host="h", nproc=1))
    await bench.carry_out(Acquire(id=1, count=3))
    assert bench.outcomes == [Outcome(action=1, ok=True, nodes=("b", "new2", "new3"))]
    for node in ("b", "new2"):
        bench.decider.step(2.0, Ready(node=node, host="h", nproc=1))
    await bench.carry_out(Acquire(id=2, count=1))
    assert bench.outcomes[1] == Outcome(action=2, ok=True, nodes=("new3",))


async def test_a_fleet_that_fails_is_an_outcome() -> None:
    bench = Bench()
    bench.fleet.error = OSError("no more machines")
    await bench.carry_out(Acquire(id=1, count=1))
    assert bench.outcomes == [Outcome(action=1, ok=False, detail="no more machines")]


async def test_release() -> None:
    bench = Bench("a")
    bench.registry.record_alive(0.0, "a")
    await bench.carry_out(Dismiss(id=4, node="a", reason="evicted"))
    assert bench.told == [("a", Leave(id=4, code=EVICTED, grace_s=0.0, reason="evicted"))]
    assert bench.registry.overdue_alarms(1000.0) == (), "its silence is no news"
    assert bench.fleet.released == [("a", "evicted")]
    assert bench.outcomes == [Outcome(action=4, ok=True)]


async def test_say() -> None:
    bench = Bench()
    await bench.carry_out(Say(text="a sentence"))
    assert bench.said == ["a sentence"] and not bench.outcomes
    await bench.carry_out(Say(text="waiting up to 15 min", until=1.8e9))
    assert bench.said[1] == f"waiting up to 15 min (until {clock_text(1.8e9)})"


async def test_storage_that_gave_nothing_is_not_tried_again_where_memory_holds_an_older_state() -> None:
    bench = Bench()
    held = {
        seat.node: tuple(
            Copy(rank=rank, step=9, node=seat.node, layout="l", world=4, whole=True)
            for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
        )
        for seat in LAUNCH.seats
    }
    bench.hold(held)
    beat = Beat(node="a", generation=bench.decider.view.generation, step=15, at=0.0, stored=15)
    bench.registry.record_beat(0.0, beat)
    plans = []
    for _ in range(2):
        plans.append(bench.executor._choose_restore(LAUNCH))
        bench.executor._count_try(plans[-1])
    assert [(bool(plan.sources), plan.step, plan.stored) for plan in plans] == [(False, 0, 15), (True, 9, -1)]
    bench = Bench()
    bench.registry.record_beat(0.0, beat)
    assert {bench.executor._choose_restore(LAUNCH).stored for _ in range(5)} == {15}, "there is nothing else"


async def test_storage_has_its_turn_before_the_job_gives_up() -> None:
    """Four launches are what `recovery.attempts` allows."""
    bench = Bench()
    held = {
        seat.node: tuple(
            Copy(rank=rank, step=step, node=seat.node, layout="l", world=4, whole=True)
            for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
            for step in (9, 8)
        )
        for seat in LAUNCH.seats
    }
    bench.hold(held)
    beat = Beat(node="a", generation=bench.decider.view.generation, step=9, at=0.0, stored=5)
    bench.registry.record_beat(0.0, beat)
    tried = []
    for _ in range(4):
        plan = bench.executor._choose_restore(LAUNCH)
        bench.executor._count_try(plan)
        tried.append((plan.step if plan.sources else -1, plan.stored))
    assert tried == [(9, -1), (9, -1), (8, -1), (-1, 5)]


async def test_the_state_that_another_release_goes_on_with_is_stored() -> None:
    bench = Bench()
    bench.hold(
        {
            seat.node: tuple(
                Copy(rank=rank, step=9, node=seat.node, layout="l", world=4, whole=True)
                for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
            )
            for seat in LAUNCH.seats
        }
    )
    stored = []
    for id, release in ((7, 1), (8, 1), (9, 2)):
        launch = msgspec.structs.replace(LAUNCH, id=id, release=Release(number=release))
        bench.executor.on_step()
        stored.append(bench.executor._recall_or_plan(launch).store)
    assert stored == [False, False, True]
    bench.registry.record_beat(0.0, Beat(node="a", generation=bench.decider.view.generation, step=9, at=0.0, stored=9))
    assert not bench.executor._recall_or_plan(msgspec.structs.replace(LAUNCH, id=10, release=Release(number=3))).store


async def test_a_launch_tells_nodes_the_parallel_groups_that_the_script_reported() -> None:
    bench, mesh = Bench(), (("pp", 2), ("dp", 2))
    bench.decider.step(1.0, MeshReport(mesh=mesh))
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    assert [errand.mesh for _, errand in bench.told if isinstance(errand, LaunchHere)] == [mesh, mesh]
    for node in ("a", "b"):
        bench.dispatch.on_done(Done(id=LAUNCH.id, node=node, ok=True))
    await carried


async def test_a_launch_restores_what_the_nodes_hold() -> None:
    bench = Bench(limits=Limits())

    def held(node: str, ranks: tuple[int, ...]) -> tuple[Copy, ...]:
        return tuple(Copy(rank=r, step=9, node=node, layout="l", world=4, whole=True) for r in ranks)

    bench.hold({"a": held("a", (0, 1)), "b": held("b", (2, 3))})
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    launch = dict(bench.told)["b"]
    assert isinstance(launch, LaunchHere) and launch.restore.step == 9
    assert [source.rank for source in launch.restore.sources] == [2, 3], "each node is told of its own ranks"
    for node in ("a", "b"):
        bench.dispatch.on_done(Done(id=7, node=node, ok=True))
    await carried
    assert bench.outcomes[-1].detail == "restoring step 9: 4 from own memory"


def test_what_is_held_is_not_forgotten_amid_a_stop() -> None:
    """A controller that has just come back has launched nobody; a step told late must not cost the copies."""
    bench = Bench()
    held = (Copy(step=7, rank=0, node="a", layout="l", world=4, whole=True),)
    bench.hold({"a": held, "b": held})
    bench.executor.on_step()
    assert set(bench.registry.copies) == {"a", "b"}


async def test_what_those_hold_who_are_out_is_forgotten_at_the_next_step() -> None:
    bench = Bench()
    held = (Copy(step=7, rank=0, node="a", layout="l", world=4, whole=True),)
    bench.hold({"a": held, "gone": held})
    await bench.carry_out(LAUNCH)
    bench.executor.on_step()
    assert set(bench.registry.copies) == {"a"}


async def test_what_came_after_the_step_that_the_job_goes_on_from_is_forgotten() -> None:
    """An evicted node that waits until its state is not needed any more held a step that the job then made anew."""
    bench = Bench()

    def held(node: str, *steps: int) -> tuple[Copy, ...]:
        return tuple(Copy(rank=r, step=s, node=node, layout="l", world=4, whole=True) for r in range(4) for s in steps)

    bench.hold({"a": held("a", 9)[:2], "b": held("b", 9)[2:], "gone": held("gone", 8, 9, 10)[:3]})
    carried = asyncio.create_task(bench.carry_out(LAUNCH))
    await settle()
    carried.cancel()
    assert [copy.step for copy in bench.registry.copies["gone"]] == [8, 9]
    assert len(bench.registry.copies["a"]) == len(bench.registry.copies["b"]) == 2


async def test_a_launch_that_two_controllers_tell_goes_on_from_the_same_step() -> None:
    held = tuple(Copy(rank=r, step=5, node="ab"[r // 2], layout="x", world=4, whole=True) for r in range(4))
    first = Bench()
    second = Bench(notes=first.notes)  # which lie on disk; what nodes hold it has not heard yet
    first.hold({"a": held[:2], "b": held[2:]})
    for bench in (first, second):
        carried = asyncio.create_task(bench.carry_out(LAUNCH))
        await settle()
        carried.cancel()
    told = [errand.restore for bench in (first, second) for _, errand in bench.told if isinstance(errand, LaunchHere)]
    assert [plan.step for plan in told] == [5] * 4
    carried = asyncio.create_task(second.carry_out(msgspec.structs.replace(LAUNCH, id=9, generation=4)))
    await settle()
    carried.cancel()
    _, errand = second.told[-1]
    assert isinstance(errand, LaunchHere) and errand.restore.step == 0, "another launch has a plan of its own"
