"""Launches of fewer or more ranks than saved the state in memory: the plan to cut it anew, and what nodes are told."""

import msgspec
import pytest

from holdfast.model.action import Launch
from holdfast.model.decider_events import Progress
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import Beat
from holdfast.model.state_copy import Copy
from tests.controller.fakes import MemoryNotes
from tests.controller.test_action_executor import LAUNCH, Bench


def launch(generation: int) -> Launch:
    return msgspec.structs.replace(LAUNCH, id=generation, generation=generation)


def held(node: str, ranks: tuple[int, ...], step: int, *, whole: bool = True, cuts: bool = True) -> tuple[Copy, ...]:
    """What a node of a job of six ranks holds after its first generation."""
    copies = [Copy(rank=rank, step=step, node=node, layout="l", world=6, whole=whole, generation=1) for rank in ranks]
    return tuple(msgspec.structs.replace(copy, cuts=(copy.rank, 1, 1) if cuts else None) for copy in copies)


# Node c is lost; a kept the copies of its ranks at step 8.
LEFT = {
    "a": (*held("a", (0, 1), 8), *held("a", (0, 1), 9), *held("a", (4, 5), 8, whole=False)),
    "b": held("b", (2, 3), 8),
}


def begun(notes: MemoryNotes) -> Bench:
    """A controller whose job has made steps in its first generation, with six ranks."""
    bench = Bench(notes=notes)
    bench.executor._recall_or_plan(launch(1))
    bench.executor.on_step()
    return bench


def stepped(restored: int) -> Progress:
    return Progress(generation=2, step=12, at=1.0, first_step=9, first_at=0.5, counted=False, restored=restored)


async def test_nodes_are_told_who_holds_what_of_the_old_ranks() -> None:
    bench = begun(MemoryNotes())
    bench.hold(LEFT)
    bench.registry.keepers.update({"a": ("/a", 0), "b": ("/b", 0)})
    await bench.carry_out(launch(2))
    assert bench.said == ["resuming from step 8 in memory, which 6 ranks have saved, cut anew"]
    told = [errand.restore for _, errand in bench.told if isinstance(errand, LaunchHere)]
    assert len(told) == 2 and told[0] == told[1]
    assert (told[0].step, told[0].cut_from, told[0].maker, told[0].sources) == (8, 6, 1, ())
    assert told[0].keepers == {"a": ("/a", 0), "b": ("/b", 0)}
    assert sorted((one.rank, one.node) for one in told[0].kept) == [(r, "b" if r in (2, 3) else "a") for r in range(6)]


async def test_why_a_state_cannot_be_cut_is_said() -> None:
    bench = begun(MemoryNotes())
    bench.hold(LEFT | {"b": held("b", (2, 3), 8, cuts=False)})
    await bench.carry_out(launch(2))
    assert bench.said == [
        "step 9 in memory was saved by 6 ranks and cannot be cut anew for 4: nothing is held of ranks 2-5"
    ]


def test_a_newer_checkpoint_comes_first_and_another_release_cuts_nothing() -> None:
    bench = begun(MemoryNotes())
    bench.hold(LEFT)
    release = msgspec.structs.replace(LAUNCH.release, number=LAUNCH.release.number + 1)
    assert not bench.executor._choose_restore(msgspec.structs.replace(launch(2), release=release), None).uncut
    kept = bench.executor.newest_plan()
    assert kept
    kept = msgspec.structs.replace(kept, release=release.number + 1)
    assert not bench.executor._choose_restore(launch(2), kept).is_held
    bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=7, at=0.0, stored=7))
    plan = bench.executor._recall_or_plan(launch(2))
    assert (plan.step, plan.cut_from, plan.stored) == (8, 6, 7)
    bench.registry.record_beat(0.0, Beat(node="a", generation=0, step=9, at=0.0, stored=9))
    plan = bench.executor._choose_restore(launch(3), bench.executor.newest_plan())
    assert (plan.is_held, plan.stored) == (False, 9)


@pytest.mark.parametrize(("restored", "step"), [(8, 8), (-1, 8), (5, -1)])
def test_what_ranks_really_resumed_from_is_noted(restored: int, step: int) -> None:
    """Ranks whose state could not be cut restore a checkpoint: states of the old ranks are not of their lineage."""
    bench = begun(MemoryNotes())
    bench.hold(LEFT)
    assert bench.executor._recall_or_plan(launch(2)).cut_from == 6
    bench.executor.on_step(stepped(restored))
    plan = bench.executor.newest_plan()
    assert plan and (plan.line[-1].generation, plan.line[-1].step, plan.line[-1].stepped) == (2, step, True)
    bench.hold(LEFT)
    assert bench.executor._recall_or_plan(launch(3)).is_held == (step == 8)
