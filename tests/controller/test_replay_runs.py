"""Groups of nodes do the work again: whoever fails in both groupings is accused, and nobody without leave."""

import asyncio

import pytest

from holdfast.controller.actions.replay_runs import NOT_ALLOWED, ReplayRuns
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.replay.regrouped_replay import ReplayLimits
from holdfast.model.action import Replay
from holdfast.model.decider_events import Outcome
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import Done, Errand, ReplayHere
from holdfast.model.replay_task import ReplayResult
from tests.controller.fakes import FakeStore

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(6))
REPLAY = Replay(id=9, generation=3, seats=SEATS, not_after=40)


class Nodes:
    """All do the same work, but for those that do it wrong, say nothing, or crash."""

    def __init__(self, *, wrong: str = "", mute: str = "", crashes: bool = False) -> None:
        self.wrong, self.mute, self.crashes = wrong, mute, crashes
        self.groups: dict[int, set[str]] = {}
        self.folders: set[str] = set()
        self.ports: set[int] = set()

    async def ask(self, id: int, errands: dict[str, Errand], within_s: float) -> dict[str, Done]:
        self.groups[id] = set(errands)
        found = {}
        for node, errand in errands.items():
            assert isinstance(errand, ReplayHere) and errand.launch.world_size == len(errands)
            assert 1 <= errand.replay.steps <= 8 and errand.replay.not_after == 40
            self.folders.add(errand.replay.name)
            self.ports.add(errand.launch.store_port)
            if node != self.mute:
                found[node] = Done(id=id, node=node, ok=True, played=(self._played(node, errand),))
        return found

    def _played(self, node: str, errand: ReplayHere) -> ReplayResult:
        rank, bad = errand.launch.seat.first_rank, node == self.wrong
        if bad and self.crashes:
            return ReplayResult(rank=rank, ended=False, failed=True, detail="ended with code 1")
        steps = range(1, errand.replay.steps + 1)
        told = {step: step + 100 * rank + 7 * bad for step in steps}
        return ReplayResult(rank=rank, ended=True, marks=told, signed=told)


def runs(nodes: Nodes, limits: ReplayLimits) -> tuple[ReplayRuns, NodeRegistry]:
    view = Decider().view
    registry = NodeRegistry(SilenceLimits(), view, NodeLinks(lambda: 1))
    replaying = ReplayRuns(nodes.ask, FakeStore(), limits, view=view, registry=registry, say=list[str]().append)
    return replaying, registry


def tried(nodes: Nodes, allowed: str | None = "seeded", *, halves: bool = False) -> Outcome:
    replaying, registry = runs(nodes, ReplayLimits(steps=4, most=2, halves=halves))
    if allowed is not None:
        registry.record_replayable(allowed)
    outcome = asyncio.run(replaying.replay_nodes(REPLAY))
    assert outcome.action == 9 and outcome.ok
    return outcome


@pytest.mark.parametrize("node", [seat.node for seat in SEATS])
@pytest.mark.parametrize("crashes", [True, False])
def test_the_node_that_does_it_wrong(node: str, crashes: bool) -> None:
    nodes = Nodes(wrong=node, crashes=crashes)
    assert list(tried(nodes).failed) == [node]
    assert sum(node in group for group in nodes.groups.values()) >= 2
    assert len(nodes.folders) == len(nodes.ports) == len(nodes.groups)  # nothing is shared between groups
    assert all(name.startswith("9-") for name in nodes.folders)


@pytest.mark.parametrize("node", [seat.node for seat in SEATS])
def test_two_halves_and_a_referee(node: str) -> None:
    nodes = Nodes(wrong=node)
    assert list(tried(nodes, halves=True).failed) == [node]
    assert [len(group) for group in nodes.groups.values()] == [3, 3, 3]
    assert sum(node in group for group in nodes.groups.values()) == 1, "it had to show itself once"


@pytest.mark.parametrize("node", [seat.node for seat in SEATS])
def test_what_halves_leave_open_groups_find(node: str) -> None:
    nodes = Nodes(wrong=node, crashes=True)
    outcome = tried(nodes, halves=True)
    assert list(outcome.failed) == [node]
    assert outcome.failed[node].startswith("two halves: ")
    assert len(nodes.folders) == len(nodes.ports) == len(nodes.groups)


def test_halves_find_nobody() -> None:
    nodes = Nodes()
    outcome = tried(nodes, halves=True)
    assert outcome.failed == {} and " 8 steps" in outcome.detail
    assert len(nodes.groups) == 4


def test_nobody() -> None:
    outcome = tried(Nodes())
    assert outcome.failed == {} and outcome.nodes == () and outcome.detail


def test_without_leave_nobody_is_asked() -> None:
    nodes = Nodes(wrong="n1")
    assert tried(nodes, allowed="").detail == NOT_ALLOWED
    assert nodes.groups == {}


def test_without_a_seed_only_what_fails_counts() -> None:
    assert tried(Nodes(wrong="n1"), allowed="unseeded").failed == {}
    assert list(tried(Nodes(wrong="n1", crashes=True), allowed="unseeded").failed) == ["n1"]


def test_a_node_that_is_gone_ends_it() -> None:
    nodes = Nodes(mute="n4")
    outcome = tried(nodes)
    assert list(outcome.failed) == ["n4"] and outcome.untested == ("n4",)
    assert len(nodes.groups) <= 3  # not a wave more


def test_who_may_be_asked_is_waited_for() -> None:
    """A controller that has just come back knows when the first node has told it."""
    replaying, registry = runs(Nodes(wrong="n2"), ReplayLimits(steps=4, most=2))

    async def both() -> Outcome:
        asked = asyncio.create_task(replaying.replay_nodes(REPLAY))
        await asyncio.sleep(0.1)
        registry.record_replayable("seeded")
        return await asked

    assert list(asyncio.run(both()).failed) == ["n2"]
