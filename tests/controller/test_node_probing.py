"""Nodes are tried alone and then in pairs; whoever is found bad is named, and what is usual is kept."""

import asyncio
from collections.abc import Callable

import msgspec

from holdfast.controller.actions.node_probing import NO_ANSWER, NodeProbing
from holdfast.core.diagnose.fleet_baseline import MeasurementHistory
from holdfast.core.diagnose.probe_assessment import ProbeLimits
from holdfast.model.action import Probe
from holdfast.model.node_errands import Done, Errand, PairTestHere, ProbeHere
from holdfast.model.probe_findings import Finding
from tests.controller.fakes import FakeStore, MemoryNotes

NODES = ("a", "b", "c", "d")
PROBE = Probe(id=7, generation=3, nodes=NODES, level=2)


def bits(digest: str) -> Finding:
    return Finding(probe="gemm_bits", level=2, ok=True, place="cpu", device="some cpu", form="f32", digest=digest)


def speed(value: float) -> Finding:
    return Finding(
        probe="memory_speed", level=2, ok=True, device="some cpu", value=value, unit="GB/s", samples=(value,) * 5
    )


class Nodes:
    """They answer as they are told to; None: not at all."""

    def __init__(
        self, alone: Callable[[str], tuple[Finding, ...] | None], broken: frozenset[str] = frozenset()
    ) -> None:
        self.alone, self.broken = alone, broken
        self.waves: list[list[tuple[str, ...]]] = []
        self.ids: list[int] = []

    async def ask(self, id: int, errands: dict[str, Errand], within_s: float) -> dict[str, Done]:
        self.ids.append(id)
        worlds: dict[str, dict[int, str]] = {}
        found: dict[str, Done] = {}
        for node, errand in errands.items():
            assert errand.id == id
            if isinstance(errand, ProbeHere):
                told = self.alone(node)
                if told is not None:
                    found[node] = Done(id=id, node=node, ok=True, findings=told)
            elif isinstance(errand, PairTestHere):
                assert (errand.meeting.host, errand.meeting.port) == ("127.0.0.1", 7003)
                worlds.setdefault(errand.meeting.name, {})[errand.meeting.rank] = node
        for world in worlds.values():
            bad = not self.broken.isdisjoint(world.values())
            link = Finding(probe="link", level=2, ok=not bad, detail="bytes differ" if bad else "")
            found |= {node: Done(id=id, node=node, ok=True, findings=(link,)) for node in world.values()}
        if worlds:
            self.waves.append([tuple(world[rank] for rank in sorted(world)) for world in worlds.values()])
        return found


def tried(
    nodes: Nodes, hosts: dict[str, str] | None = None, kept: MemoryNotes | None = None
) -> tuple[dict[str, str], str]:
    probing = NodeProbing(nodes.ask, FakeStore(), hosts if hosts is not None else {}, ProbeLimits(), kept)
    outcome = asyncio.run(probing.probe_nodes(PROBE))
    assert outcome.action == 7 and outcome.ok
    return outcome.failed, outcome.detail


def test_the_node_whose_bits_differ() -> None:
    nodes = Nodes(lambda node: (bits("bad" if node == "c" else "good"),))
    failed, detail = tried(nodes)
    assert list(failed) == ["c"] and failed["c"].startswith("gemm_bits (f32) ")
    assert detail == f"c: {failed['c']}"
    assert nodes.waves == []  # one is found: the rest is not put to more tests


def test_a_node_that_does_not_answer() -> None:
    told: dict[str, tuple[Finding, ...]] = {"a": (bits("good"),), "c": (bits("bad"),), "d": (bits("good"),)}
    probing = NodeProbing(Nodes(told.get).ask, FakeStore(), {}, ProbeLimits(), None)
    outcome = asyncio.run(probing.probe_nodes(PROBE))
    assert sorted(outcome.failed) == ["b", "c"] and outcome.failed["b"] == NO_ANSWER
    assert outcome.untested == ("b",), "nothing was found out about its machine"


def test_pairs_when_nobody_fails_alone() -> None:
    nodes = Nodes(lambda node: (bits("good"),), broken=frozenset({"d"}))
    failed, detail = tried(nodes)
    assert list(failed) == ["d"] and "bytes differ" in failed["d"]
    assert len(nodes.waves) == 2 and len(set(nodes.ids)) == 3  # every wave has errands of its own
    assert detail.startswith("d ")


class RailedNodes(Nodes):
    """Their pair tests go over rails, of which one of one node is dead."""

    async def ask(self, id: int, errands: dict[str, Errand], within_s: float) -> dict[str, Done]:
        found = await super().ask(id, errands, within_s)
        for errand in errands.values():
            assert not isinstance(errand, PairTestHere) or errand.rails == ("eth0", "eth1")
        for node in [node for node in found if isinstance(errands[node], PairTestHere)]:
            link = found[node].findings[0]
            ends = (msgspec.structs.replace(link, place="eth0", ok=True), msgspec.structs.replace(link, place="eth1"))
            found[node] = msgspec.structs.replace(found[node], findings=ends)
        return found


def test_the_rail_that_is_dead() -> None:
    rails = Finding(probe="rails", level=1, ok=True, names=("eth0", "eth1"))
    nodes = RailedNodes(lambda node: (bits("good"), rails), broken=frozenset({"d"}))
    failed, detail = tried(nodes)
    assert list(failed) == ["d"] and len(nodes.waves) == 2
    assert detail.startswith("d rail eth1 failed with ") and "bytes differ" in detail


def test_nobody() -> None:
    failed, detail = tried(Nodes(lambda node: (bits("good"),)))
    assert failed == {} and detail.startswith("all 2 worlds ")


def test_nodes_of_one_host_are_not_paired() -> None:
    nodes = Nodes(lambda node: (bits("good"),), broken=frozenset({"d"}))
    failed, detail = tried(nodes, hosts=dict.fromkeys(NODES, "laptop"))
    assert failed == {} and nodes.waves == [] and detail


def test_what_is_usual_is_kept() -> None:
    kept = MemoryNotes()
    usual = [{node: (speed(value + at),) for at, node in enumerate(NODES)} for value in (10.0, 10.1, 9.9, 10.0)]
    for told in usual:
        assert tried(Nodes(told.get), kept=kept)[0] == {}
    past = msgspec.json.decode(kept.get_note("probed.json"), type=dict[str, MeasurementHistory])
    assert set(past) == set(NODES)
    assert [len(values) for values in past["a"].medians.values()] == [4]
    # As fast as another one always was, which no comparison among them would show.
    failed, _ = tried(Nodes((usual[-1] | {"d": (speed(10.5),)}).get), kept=kept)
    assert list(failed) == ["d"]


def test_what_cannot_be_read_is_learned_anew() -> None:
    """A measurement that is no number is null in JSON, and must not end the controller."""
    kept = MemoryNotes()
    for _ in range(3):
        assert tried(Nodes(lambda node: (speed(float("nan")),)), kept=kept)[0] == {}
    kept.put_note("probed.json", b"{")
    assert tried(Nodes(lambda node: (speed(10.0),)), kept=kept)[0] == {}
