"""Actions become errands, answers become outcomes; nobody is waited for in vain."""

import asyncio

import msgspec
import pytest

from holdfast.controller.actions.action_executor import EVICTED, ActionExecutor, LaunchPlan
from holdfast.model.action import Acquire, Dismiss, Finish, Launch, Say, Stop
from holdfast.model.errand import Done, Errand, FinalState, LaunchHere, Leave, StopHere
from holdfast.model.event import Limits, Outcome
from holdfast.model.job_seats import Job, Seat
from holdfast.model.release import Release
from holdfast.model.state_copy import Copy, Restore
from tests.controller.fakes import FakeFleet, FakeStore

LAUNCH = Launch(
    id=7,
    generation=3,
    seats=(Seat(node="a", group_rank=0, first_rank=0, nproc=2), Seat(node="b", group_rank=1, first_rank=2, nproc=2)),
)
STOP = Stop(id=8, generation=3, nodes=("a", "b"), grace_s=0.0)


class Bench:
    """Hands with everything around them faked."""

    def __init__(self, *nodes: str) -> None:
        self.outcomes: list[Outcome] = []
        self.fleet, self.store = FakeFleet(*nodes), FakeStore()
        self.hands = ActionExecutor(self.fleet, self.store, self.outcomes.append)
        self.hands.job = Job(run_id="r", min_nodes=1, max_nodes=2, max_restarts=4)
        self.hands.limits = Limits(stop_s=0.05, launch_s=0.05)
        self.told: list[tuple[str, Errand]] = []
        self.forgotten: list[str] = []
        self.said: list[str] = []
        self.hands.tell = self._tell
        self.hands.forget = self.forgotten.append
        self.hands.say = self.said.append
        self.hands.present = lambda: nodes

    def _tell(self, node: str, errand: Errand) -> bool:
        self.told.append((node, errand))
        return True

    def done(self, node: str, id: int, error: str = "") -> None:
        self.hands.on_done(Done(id=id, node=node, ok=not error, detail=error))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_launch_is_told_to_every_seat() -> None:
    bench = Bench()
    bench.hands.limits = Limits()
    carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
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


async def test_failures_are_named_by_node() -> None:
    bench = Bench()
    carried = asyncio.create_task(bench.hands.carry_out(STOP))
    await settle()
    assert bench.told == [(node, StopHere(id=8, generation=3, grace_s=0.0)) for node in ("a", "b")]
    bench.done("b", 8, "pid 5 does not die")
    await carried  # a says nothing
    assert bench.outcomes == [
        Outcome(action=8, ok=False, failed={"a": "no answer within 0.05 s", "b": "pid 5 does not die"})
    ]


async def test_a_silent_node_is_not_waited_for() -> None:
    bench = Bench()
    bench.hands.limits = Limits()
    bench.hands.on_silent("b")
    carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
    await settle()
    assert [node for node, _ in bench.told] == ["a"]
    bench.hands.on_silent("a")
    await carried
    assert bench.outcomes[0].failed == {"a": "it fell silent", "b": "it is silent"}


async def test_a_node_that_is_back_is_told_again() -> None:
    bench = Bench()
    bench.hands.limits = Limits()
    bench.hands.on_silent("b")
    bench.hands.on_relink("b")
    carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
    await settle()
    bench.done("a", 7)
    bench.hands.on_relink("a")  # it has answered
    bench.hands.on_relink("b")
    assert [node for node, _ in bench.told] == ["a", "b", "b"]
    assert bench.told[1] == bench.told[2]
    bench.done("b", 7)
    await carried
    assert bench.outcomes == [Outcome(action=7, ok=True)]
    bench.hands.on_relink("b")
    assert len(bench.told) == 3


async def test_a_launch_that_is_being_stopped_is_not_told_again() -> None:
    """A node that was started anew would launch what is over: it remembers that it was stopped, and not what."""
    bench = Bench()
    bench.hands.limits = Limits()
    launched = asyncio.create_task(bench.hands.carry_out(LAUNCH))
    await settle()
    stopped = asyncio.create_task(bench.hands.carry_out(STOP))
    await settle()
    bench.told.clear()
    bench.hands.on_relink("b")
    assert [type(errand) for _, errand in bench.told] == [StopHere]
    for id in (7, 8):
        bench.done("a", id)
        bench.done("b", id)
    await asyncio.gather(launched, stopped)


@pytest.mark.parametrize("error", [OSError("no store"), TimeoutError("no store"), ValueError("no store")])
async def test_a_store_that_fails_is_an_outcome(error: Exception) -> None:
    bench = Bench()
    bench.store.error = error
    await bench.hands.carry_out(LAUNCH)
    assert bench.outcomes == [Outcome(action=7, ok=False, detail="no store")]
    assert not bench.told


async def test_nodes_of_an_earlier_try_count_first() -> None:
    """A controller that died after its fleet had started nodes, and before it could write that down."""
    bench = Bench("a", "b")
    bench.hands.known = lambda: {"a"}
    await bench.hands.carry_out(Acquire(id=1, count=3))
    assert bench.outcomes == [Outcome(action=1, ok=True, nodes=("b", "new2", "new3"))]
    bench.hands.known = lambda: {"a", "b", "new2"}
    await bench.hands.carry_out(Acquire(id=2, count=1))
    assert bench.outcomes[1] == Outcome(action=2, ok=True, nodes=("new3",))


async def test_a_fleet_that_fails_is_an_outcome() -> None:
    bench = Bench()
    bench.fleet.error = OSError("no more machines")
    await bench.hands.carry_out(Acquire(id=1, count=1))
    assert bench.outcomes == [Outcome(action=1, ok=False, detail="no more machines")]


async def test_release() -> None:
    bench = Bench("a")
    await bench.hands.carry_out(Dismiss(id=4, node="a", reason="evicted"))
    assert bench.told == [("a", Leave(id=4, code=EVICTED, grace_s=0.0, reason="evicted"))]
    assert bench.forgotten == ["a"]
    assert bench.fleet.released == [("a", "evicted")]
    assert bench.outcomes == [Outcome(action=4, ok=True)]


FINISH = Finish(id=9, code=3, grace_s=0.0, reason="enough")


async def test_finish() -> None:
    bench = Bench("a", "b")
    carried = asyncio.create_task(bench.hands.carry_out(FINISH))
    await settle()
    assert bench.told == [(node, Leave(id=9, code=3, grace_s=0.0, reason="enough")) for node in ("a", "b")]
    assert not bench.store.over
    bench.done("a", 9)
    bench.done("b", 9)
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=True)]
    assert bench.fleet.here == [] and bench.store.over


async def test_the_end_puts_the_newest_common_step_on_storage() -> None:
    """Ranks are ended first, as only then all nodes hold what they hold for good; who has no ranks is not asked."""
    bench = Bench("a", "b", "standby")
    bench.hands.limits = Limits()
    planned = LaunchPlan(id=7, restore=Restore(), generation=3, nodes=("a", "b"))
    bench.hands.notes.put_note("plan.json", msgspec.json.encode(planned))
    carried = asyncio.create_task(bench.hands.carry_out(msgspec.structs.replace(FINISH, last_s=30.0)))
    await settle()
    assert [(node, type(errand)) for node, errand in bench.told] == [("a", StopHere), ("b", StopHere)]
    id = bench.told[0][1].id
    for rank, (node, steps) in enumerate((("a", (6, 5)), ("b", (5, 4)))):
        held = tuple(Copy(rank=rank, step=step, node=node, layout="l", world=2, whole=True) for step in steps)
        bench.hands.on_done(Done(id=id, node=node, ok=True, copies=held, stored=4))
    await settle()
    leaves = {node: errand for node, errand in bench.told[2:] if isinstance(errand, Leave)}
    wanted = {"a": (FinalState(step=5, ranks=(0,)),), "b": (FinalState(step=5, ranks=(1,)),), "standby": ()}
    assert {node: leave.last for node, leave in leaves.items()} == wanted
    assert 29 < leaves["a"].last_s <= 30
    for node in leaves:
        bench.done(node, 9)
    await carried
    assert bench.outcomes == [Outcome(action=9, ok=True)]


async def test_a_node_that_cannot_be_ended_does_not_keep_the_others() -> None:
    bench = Bench("a", "b")
    bench.fleet.error = OSError("pid 5 does not die")
    await bench.hands.carry_out(FINISH)  # and nobody answers
    [outcome] = bench.outcomes
    assert not outcome.ok and set(outcome.failed) == {"a", "b"}
    assert bench.said == [f"{node} could not be ended: pid 5 does not die" for node in ("a", "b")]
    assert bench.store.over


async def test_hurry() -> None:
    bench = Bench("a", "b")
    bench.hands.limits = Limits()
    carried = asyncio.create_task(bench.hands.carry_out(FINISH))
    await settle()
    await bench.hands.end_at_once()
    await carried
    assert {reason for _, reason in bench.fleet.released} == {"told to hurry"}
    assert bench.outcomes == [Outcome(action=9, ok=True)]


async def test_hurry_amid_the_stop_that_an_end_begins_with() -> None:
    bench = Bench("a", "b")
    bench.hands.limits = Limits()
    planned = LaunchPlan(id=7, restore=Restore(), generation=3, nodes=("a", "b"))
    bench.hands.notes.put_note("plan.json", msgspec.json.encode(planned))
    carried = asyncio.create_task(bench.hands.carry_out(msgspec.structs.replace(FINISH, grace_s=30.0, last_s=30.0)))
    await settle()
    await bench.hands.end_at_once()
    async with asyncio.timeout(5):
        await carried
    assert bench.outcomes == [Outcome(action=9, ok=True)]


async def test_say() -> None:
    bench = Bench()
    await bench.hands.carry_out(Say(text="a sentence"))
    assert bench.said == ["a sentence"] and not bench.outcomes


async def test_the_state_that_another_release_goes_on_with_is_stored() -> None:
    bench = Bench()
    bench.hands.copies = {
        seat.node: tuple(
            Copy(rank=rank, step=9, node=seat.node, layout="l", world=4, whole=True)
            for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
        )
        for seat in LAUNCH.seats
    }
    stored = []
    for id, release in ((7, 1), (8, 1), (9, 2)):
        launch = msgspec.structs.replace(LAUNCH, id=id, release=Release(number=release))
        bench.hands.on_step()
        stored.append(bench.hands._recall_or_plan(launch).store)
    assert stored == [False, False, True]
    bench.hands.stored = 9
    assert not bench.hands._recall_or_plan(msgspec.structs.replace(LAUNCH, id=10, release=Release(number=3))).store


async def test_a_launch_restores_what_the_nodes_hold() -> None:
    bench = Bench()
    bench.hands.limits = Limits()

    def held(node: str, ranks: tuple[int, ...]) -> tuple[Copy, ...]:
        return tuple(Copy(rank=r, step=9, node=node, layout="l", world=4, whole=True) for r in ranks)

    bench.hands.copies = {"a": held("a", (0, 1)), "b": held("b", (2, 3))}
    carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
    await settle()
    launch = dict(bench.told)["b"]
    assert isinstance(launch, LaunchHere) and launch.restore.step == 9
    assert [source.rank for source in launch.restore.sources] == [2, 3], "each node is told of its own ranks"
    for node in ("a", "b"):
        bench.hands.on_done(Done(id=7, node=node, ok=True))
    await carried
    assert bench.outcomes[-1].detail == "restoring step 9: 4 from own memory"


async def test_a_silent_node_holds_nothing_any_more() -> None:
    bench = Bench()
    bench.hands.copies = {"a": (Copy(rank=0, step=9, node="a", layout="l", world=1, whole=True),)}
    bench.hands.on_silent("a")
    assert bench.hands.copies == {}


def test_what_is_held_is_not_forgotten_amid_a_stop() -> None:
    """A controller that has just come back has launched nobody; a step told late must not cost the copies."""
    bench = Bench()
    held = (Copy(step=7, rank=0, node="a", layout="l", world=4, whole=True),)
    bench.hands.copies = {"a": held, "b": held}
    bench.hands.on_step()
    assert set(bench.hands.copies) == {"a", "b"}


async def test_what_those_hold_who_are_out_is_forgotten_at_the_next_step() -> None:
    bench = Bench()
    held = (Copy(step=7, rank=0, node="a", layout="l", world=4, whole=True),)
    bench.hands.copies = {"a": held, "gone": held}
    await bench.hands.carry_out(LAUNCH)
    bench.hands.on_step()
    assert set(bench.hands.copies) == {"a"}


async def test_what_came_after_the_step_that_the_job_goes_on_from_is_forgotten() -> None:
    """An evicted node that waits until its state is not needed any more held a step that the job then made anew."""
    bench = Bench()

    def held(node: str, *steps: int) -> tuple[Copy, ...]:
        return tuple(Copy(rank=r, step=s, node=node, layout="l", world=4, whole=True) for r in range(4) for s in steps)

    bench.hands.copies = {"a": held("a", 9)[:2], "b": held("b", 9)[2:], "gone": held("gone", 8, 9, 10)[:3]}
    carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
    await settle()
    carried.cancel()
    assert [copy.step for copy in bench.hands.copies["gone"]] == [8, 9]
    assert len(bench.hands.copies["a"]) == len(bench.hands.copies["b"]) == 2


async def test_a_launch_that_two_controllers_tell_goes_on_from_the_same_step() -> None:
    held = tuple(Copy(rank=r, step=5, node="ab"[r // 2], layout="x", world=4, whole=True) for r in range(4))
    first, second = Bench(), Bench()
    first.hands.copies = {"a": held[:2], "b": held[2:]}
    second.hands.notes = first.hands.notes  # which lie on disk; what nodes hold it has not heard yet
    for bench in (first, second):
        carried = asyncio.create_task(bench.hands.carry_out(LAUNCH))
        await settle()
        carried.cancel()
    told = [errand.restore for bench in (first, second) for _, errand in bench.told if isinstance(errand, LaunchHere)]
    assert [plan.step for plan in told] == [5] * 4
    carried = asyncio.create_task(second.hands.carry_out(msgspec.structs.replace(LAUNCH, id=9, generation=4)))
    await settle()
    carried.cancel()
    _, errand = second.told[-1]
    assert isinstance(errand, LaunchHere) and errand.restore.step == 0, "another launch has a plan of its own"
