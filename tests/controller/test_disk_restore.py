"""Restores from local disks: which states are believed, after whatever loss, and when storage comes before them."""

import asyncio

import msgspec
import pytest

from holdfast.controller.actions.action_executor import EVICTED
from holdfast.model.action import Acquire, Dismiss, Dismissal, Finish, Launch
from holdfast.model.decider_events import Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.node_errands import LaunchHere, Leave
from holdfast.model.observation import Beat
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import Copy
from holdfast.model.state_doubt import Doubt
from holdfast.wire.agent_messages import Hello
from tests.controller.fakes import MemoryNotes
from tests.controller.test_action_executor import LAUNCH, Bench, settle


def on_disks(*states: tuple[int, int]) -> dict[str, tuple[Copy, ...]]:
    """What both nodes tell of their disks, by generation and step."""
    return {
        seat.node: tuple(
            Copy(
                rank=rank, step=step, node=seat.node, layout="l", world=4, whole=True, disk=True, generation=generation
            )
            for rank in range(seat.first_rank, seat.first_rank + seat.nproc)
            for generation, step in states
        )
        for seat in LAUNCH.seats
    }


def launch(generation: int, *, astray: tuple[str, ...] = (), doubts: tuple[Doubt, ...] = ()) -> Launch:
    return msgspec.structs.replace(LAUNCH, id=generation, generation=generation, astray=astray, doubts=doubts)


class Lives:
    """One run whose controllers come and go, and whose nodes tell each of them anew what their disks hold."""

    def __init__(self) -> None:
        self.notes = MemoryNotes()

    def plan(self, launch: Launch, *states: tuple[int, int], stored: int = -1, steps: bool = True) -> Restore:
        bench = Bench(notes=self.notes)
        bench.hold(on_disks(*states))
        plan = bench.executor._recall_or_plan(launch)
        if stored >= 0:
            bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=stored, at=0.0, stored=stored))
        if steps:
            bench.executor.on_step()
        return plan


def test_nodes_that_are_all_new_go_on_from_their_disks() -> None:
    job = Lives()
    job.plan(launch(1))
    plan = job.plan(launch(2, astray=("a", "b")), (1, 40), (1, 45))
    assert plan.step == 45 and all(source.disk for source in plan.sources)


def test_memory_of_nodes_that_were_away_is_not_believed_though_their_disks_are() -> None:
    job = Lives()
    job.plan(launch(1))
    bench = Bench(notes=job.notes)
    memory = {n: tuple(msgspec.structs.replace(c, disk=False) for c in held) for n, held in on_disks((1, 48)).items()}
    bench.hold({node: (*memory[node], *held) for node, held in on_disks((1, 45)).items()})
    assert bench.executor._recall_or_plan(launch(2, astray=("a", "b"))).step == 45


def test_a_line_that_was_left_is_never_taken_up_again() -> None:
    job = Lives()
    job.plan(launch(1))
    assert job.plan(launch(2), (1, 40)).step == 40
    # A host that was away comes back with a state that its generation made after step 40.
    assert job.plan(launch(3), (1, 45), (1, 40)).step == 40
    assert job.plan(launch(4), (2, 44), (3, 43)).step == 43, "generation 3 went on from step 40, so 44 is another's"
    assert not job.plan(launch(5), (3, 44)).sources


def test_after_a_start_from_storage_or_from_nothing_no_older_disk_counts() -> None:
    job = Lives()
    job.plan(launch(1))
    assert not job.plan(launch(2)).sources
    assert not job.plan(launch(3), (1, 40)).sources


def test_states_in_doubt_are_left_out() -> None:
    job = Lives()
    job.plan(launch(1))
    assert job.plan(launch(2, doubts=(Doubt(generation=1, not_after=42),)), (1, 40), (1, 45)).step == 40


@pytest.mark.parametrize("note", [b"", b"{"])
def test_without_the_last_plan_no_disk_is_believed(note: bytes) -> None:
    job = Lives()
    job.plan(launch(1))
    job.notes.put_note("plan.json", note)
    assert not job.plan(launch(2), (1, 40)).sources


def test_a_plan_that_is_not_of_the_last_launch_tells_too_little() -> None:
    job = Lives()
    job.plan(launch(1))
    assert not job.plan(launch(3), (1, 40)).sources


def test_a_newer_checkpoint_comes_before_the_disks_even_if_only_a_note_knows_of_it() -> None:
    job = Lives()
    job.plan(launch(1), stored=50)
    before = job.notes.get_note("plan.json")
    plan = job.plan(launch(2), (1, 45))
    assert not plan.sources and plan.stored == 50
    job.notes.put_note("plan.json", before)
    assert job.plan(launch(2), (1, 55)).step == 55


def test_a_launch_that_makes_no_step_leaves_no_line() -> None:
    """After a loss of power one host comes up without its disk, or storage that should be newer cannot be read."""
    job = Lives()
    job.plan(launch(1), stored=50)
    assert job.plan(launch(2), (1, 45), steps=False).stored == 50
    assert not job.plan(launch(3), steps=False).sources
    assert job.plan(launch(4), (1, 55), steps=False).step == 55
    assert job.plan(launch(5), (1, 55)).step == 55
    assert not job.plan(launch(6), (1, 56)).sources, "the line of generation 1 was left at step 55"


def in_memory(copies: tuple[Copy, ...], generation: int, step: int = 45) -> tuple[Copy, ...]:
    return tuple(msgspec.structs.replace(copy, disk=False, generation=generation, step=step) for copy in copies)


def test_a_step_that_was_not_told_for_every_rank_is_not_mixed_with_that_of_another_line() -> None:
    """Generation 2 starts from storage and makes step 45; b is lost before it tells and has its old disk."""
    job = Lives()
    job.plan(launch(1), stored=40)
    assert job.plan(launch(2), (1, 39), steps=False).stored == 40
    bench, disks = Bench(notes=job.notes), on_disks((1, 45))
    bench.hold({"a": (*in_memory(disks["a"], 2), *disks["a"]), "b": disks["b"]})
    plan = bench.executor._recall_or_plan(launch(3))
    assert (plan.step, plan.maker) == (45, 1) and all(source.disk for source in plan.sources), "all of generation 1"
    bench.hold({"a": in_memory(disks["a"], 2), "b": disks["b"]})
    assert not bench.executor._recall_or_plan(launch(4)).sources, "nobody has the other half of either"


def test_states_of_several_launches_that_told_of_no_step_are_not_mixed() -> None:
    """Generation 2 starts from storage, makes step 45, and a falls silent before it tells. Without a, 3 resumes from
    that step on disks, which 1 made, and makes none. Then a is back, and still holds what it made."""
    job = Lives()
    job.plan(launch(1), stored=40)
    assert job.plan(launch(2), (1, 39), steps=False).stored == 40
    assert job.plan(launch(3), (1, 45), steps=False).maker == 1
    bench, disks = Bench(notes=job.notes), on_disks((1, 45))
    bench.hold({"a": in_memory(disks["a"], 2), "b": in_memory(disks["b"], 1)})
    assert not bench.executor._recall_or_plan(launch(4)).sources, "b has read step 45 of generation 1 from its disk"
    bench.hold({"a": in_memory(disks["a"], 2), "b": in_memory(disks["b"], 2)})
    plan = bench.executor._recall_or_plan(launch(5))
    assert (plan.step, plan.maker) == (45, 2), "a line of which nobody has told may be gone on with if it is whole"
    bench.executor.on_step()
    assert not job.plan(launch(6), (1, 45)).sources, "from then on it is the job's, and the other was left"
    kept = bench.executor.newest_plan()
    assert kept and [(one.generation, one.step, one.maker, one.stepped) for one in kept.line] == [
        (1, -1, 0, True),
        (2, -1, 0, False),
        (3, 45, 1, False),
        (4, -1, 0, False),
        (5, 45, 2, True),
        (6, -1, 0, True),
    ]


def test_of_two_states_of_a_step_on_one_disk_the_right_one_is_named() -> None:
    job = Lives()
    job.plan(launch(1), stored=40)
    assert job.plan(launch(2), (1, 39), steps=False).stored == 40
    bench, disks = Bench(notes=job.notes), on_disks((1, 45), (2, 45))
    bench.hold({"a": disks["a"], "b": on_disks((1, 45))["b"]})
    plan = bench.executor._recall_or_plan(launch(3))
    assert plan.maker == 1 and {kept.generation for kept in plan.kept} == {1}


def test_a_plan_of_an_older_version_is_believed_about_disks() -> None:
    old = (
        b'{"id":1,"generation":2,"nodes":["a","b"],"restore":{},"left":[{"generation":1,"not_after":40}],"begun":true}'
    )
    for states, step in (((1, 40),), 40), (((1, 41),), 0), (((2, 44), (1, 40)), 44):
        job = Lives()
        job.notes.put_note("plan.json", old)
        assert job.plan(launch(3), *states).step == step
        assert job.plan(launch(4), *states).step == step, "nor is that forgotten when the line is known"


def test_a_controller_that_comes_back_amid_a_launch_tells_its_line() -> None:
    job = Lives()
    job.plan(launch(1))
    job.plan(launch(2), (1, 40), steps=False)
    bench = Bench(notes=job.notes)
    bench.hold(on_disks((1, 40)))
    asyncio.run(bench.carry_out(launch(2)))
    told = [errand for _, errand in bench.told if isinstance(errand, LaunchHere)]
    kept = bench.executor.newest_plan()
    assert kept and len(kept.line) == 2 and [one.line for one in told] == [kept.line] * 2


async def test_a_launch_that_finds_no_store_costs_no_disk_its_belief() -> None:
    job = Lives()
    job.plan(launch(1))
    bench = Bench(notes=job.notes)
    bench.hold(on_disks((1, 40)))
    bench.store.error = OSError("no store")
    for generation in (2, 3, 4):
        await bench.carry_out(launch(generation))
    assert [outcome.ok for outcome in bench.outcomes] == [False] * 3
    bench.store.error = None
    await bench.carry_out(launch(5))
    assert bench.said == ["resuming from step 40 from the disks of 2 nodes"]
    assert job.plan(launch(6), (1, 40)).step == 40


async def test_a_launch_counts_the_steps_that_the_disks_of_its_nodes_hold() -> None:
    job = Lives()
    job.plan(launch(1))
    bench = Bench(notes=job.notes)
    bench.hold(on_disks((1, 40), (1, 45), (1, 50)))
    moved = tuple(msgspec.structs.replace(copy, node="c") for copy in on_disks((1, 50))["b"])
    bench.hold({"b": on_disks((1, 40), (1, 45))["b"], "c": moved})
    await bench.carry_out(launch(2))
    floor = bench.executor.aims.floor.disk
    assert (floor.oldest_kept, floor.newest_kept) == (40, 45)
    bench.hold({"b": (), "c": moved})  # another node in its place
    await bench.carry_out(launch(3))
    assert floor.newest_kept == -1


def test_checkpoints_are_noted_again_after_a_return_to_an_older_step() -> None:
    job = Lives()
    job.plan(launch(1), stored=50)
    bench = Bench(notes=job.notes)
    bench.hold(on_disks((1, 60)))
    bench.executor._recall_or_plan(launch(2))
    bench.executor.on_step()
    bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=70, at=0.0, stored=70))
    bench.executor.on_step()
    bench.hold(on_disks((1, 40)))
    assert bench.executor._recall_or_plan(msgspec.structs.replace(launch(3), not_after=45)).step == 40
    bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=42, at=0.0, stored=42))
    bench.executor.on_step()
    kept = bench.executor.newest_plan()
    assert kept and kept.stored == 42


async def test_a_restore_from_disks_is_said() -> None:
    job = Lives()
    job.plan(launch(1))
    bench = Bench(notes=job.notes)
    bench.hold(on_disks((1, 40)))
    await bench.carry_out(launch(2))
    assert bench.said == ["resuming from step 40 from the disks of 2 nodes"] and bench.outcomes[-1].disks == 2


@pytest.mark.parametrize("ends", [False, True])
async def test_an_evicted_node_keeps_its_disk_until_the_others_have_made_a_step(ends: bool) -> None:
    """The job may end before, and then that is the only state of its ranks."""
    bench = Bench("a", "b", limits=Limits(wait_s=60.0 if ends else 0.01, stop_s=0.05))
    for node in "ab":
        hello = Hello(node=node, host=f"host of {node}", nproc=1, order=0, generation=0, ready=True)
        bench.registry.record_hello(0.0, hello)
    bench.hold(on_disks((1, 40)))
    carried = asyncio.create_task(bench.carry_out(Dismiss(id=4, node="a", reason="evicted")))
    await settle()
    if ends:
        await bench.carry_out(Finish(id=9, code=93, grace_s=0.0, reason="no node is left"))
    await carried
    [leave] = [errand for _, errand in bench.told if errand.id == 4]
    assert isinstance(leave, Leave) and not leave.disk_over
    assert bench.said == ["what lies on the disk of a stays there: no later generation has made a step yet"]


async def test_nodes_that_come_meanwhile_come_from_other_hosts_than_an_evicted_one() -> None:
    bench = Bench("a", limits=Limits(wait_s=60.0))
    bench.decider.step(1.0, Ready(node="a", host="h", nproc=1))
    bench.hold(on_disks((1, 40)))
    evicted = Dismiss(id=4, node="a", reason="evicted", cause=Dismissal.EVICTED)
    carried = asyncio.create_task(bench.carry_out(evicted))
    await settle()
    await bench.carry_out(Acquire(id=5, count=1))
    assert [*bench.fleet.avoided] == ["a"]
    bench.executor.on_step()
    await carried
    await bench.carry_out(Acquire(id=6, count=2))  # one is there already
    assert not bench.fleet.avoided, "it has been given back, and the fleet knows why"


@pytest.mark.parametrize(("not_after", "stored"), [(None, 50), (50, 50), (49, -1)])
async def test_nodes_that_leave_are_told_what_storage_has_even_if_only_a_note_knows(
    not_after: int | None, stored: int
) -> None:
    job = Lives()
    job.plan(launch(1), stored=50)
    bench = Bench(notes=job.notes)
    await bench.carry_out(Finish(id=9, code=93, grace_s=0.0, reason="no node is left", not_after=not_after))
    leaves = [errand for _, errand in bench.told if isinstance(errand, Leave)]
    assert [leave.stored for leave in leaves] == [stored] * 2


@pytest.mark.parametrize(("other", "over"), [("h", False), ("elsewhere", True)])
async def test_the_last_node_of_a_host_leaves_nothing_on_its_disk(other: str, over: bool) -> None:
    bench = Bench("a", "b")
    for node, host in (("a", "h"), ("b", other)):
        hello = Hello(node=node, host=host, nproc=1, order=0, generation=0, ready=True)
        bench.registry.record_hello(0.0, hello)
    seats = LAUNCH.seats
    for id, launched in ((1, seats), (2, seats[1:])):  # another would take its place
        await bench.carry_out(msgspec.structs.replace(LAUNCH, id=id, generation=id, seats=launched))
        await bench.carry_out(Dismiss(id=3, node="a", reason="evicted"))
        bench.executor.on_step()
    await bench.carry_out(Dismiss(id=4, node="a", reason="evicted"))
    leaves = [errand for node, errand in bench.told if isinstance(errand, Leave)]
    assert [leave.disk_over for leave in leaves] == [False, False, over]
    assert leaves[-1] == Leave(id=4, code=EVICTED, grace_s=0.0, reason="evicted", disk_over=over)


def test_states_that_are_all_in_doubt_are_told_of_until_a_person_wants_none() -> None:
    job = Lives()
    assert job.plan(launch(1)).doubted == -1, "there were none"
    doubts = (Doubt(generation=1, not_after=30),)
    plan = job.plan(launch(2, doubts=doubts), (1, 40), (1, 45), steps=False)
    assert (plan.is_held, plan.doubted) == (False, 45)
    assert job.plan(launch(3, doubts=doubts), steps=False).doubted == 45, "a launch makes keepers drop them"
    allowed = msgspec.structs.replace(launch(4, doubts=doubts), from_zero=True)
    assert job.plan(allowed).doubted == -1
    assert job.plan(launch(5, doubts=doubts)).doubted == -1, "the job has begun anew"


def test_where_a_sound_state_is_left_those_in_doubt_do_not_count() -> None:
    job = Lives()
    job.plan(launch(1))
    plan = job.plan(launch(2, doubts=(Doubt(generation=1, not_after=30),)), (1, 30), (1, 45))
    assert (plan.step, plan.is_held, plan.doubted) == (30, True, -1)


def test_a_checkpoint_in_doubt_counts_as_well() -> None:
    job = Lives()
    bench = Bench(notes=job.notes)
    bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=50, at=0.0, stored=50))
    doubtful = msgspec.structs.replace(launch(1, doubts=(Doubt(generation=0, not_after=49),)), not_after=49)
    assert bench.executor._recall_or_plan(doubtful).doubted == 50
