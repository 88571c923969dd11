"""Which rail failed, of which node."""

from msgspec.structs import replace

from holdfast.core.diagnose.pair_test import PairResult, PairTestResult, PairWave, World, next_wave
from holdfast.core.diagnose.rail_assessment import assess_rails, shared_rails
from holdfast.model.probe_findings import Finding
from tests.core.diagnose.test_pair_assessment import end

NODES = ("n0", "n1", "n2", "n3")
RAILS: dict[str, tuple[str, ...]] = dict.fromkeys(NODES, ("eth0", "eth1"))
DEAD = [Finding(probe="link", level=2, ok=False, detail="the other nodes did not join")]


def run_pair_test(bad: dict[tuple[str, str], list[Finding]], rails: dict[str, tuple[str, ...]]) -> PairTestResult:
    """Run a pair test in which these rails of these nodes have these findings, and all others are sound."""
    met: list[PairResult] = []
    passed: dict[World, dict[str, list[Finding]]] = {}
    while isinstance(step := next_wave(tuple(rails), met), PairWave):
        now: dict[World, dict[str, list[Finding]]] = {}
        for world in step.worlds:
            numbers = range(len(rails[world[0]]))
            broken = [[bad[key] for node in world if (key := (node, rails[node][n])) in bad] for n in numbers]
            told = [found[0] if found else end(seed=n) for n, found in enumerate(broken)]
            now[world] = {node: [replace(f, place=rails[node][n]) for n in numbers for f in told[n]] for node in world}
        judged = assess_rails(now, passed, rails)
        passed |= {one.world: now[one.world] for one in judged if one.ok}
        met += judged
    return step


def test_sound_rails_accuse_nobody() -> None:
    assert not run_pair_test({}, RAILS).bad


def test_a_dead_rail_is_named() -> None:
    found = run_pair_test({("n2", "eth1"): DEAD}, RAILS)
    assert list(found.bad) == ["n2"] and found.reason.startswith("n2 rail eth1 failed with n")
    assert DEAD[0].detail in found.reason


def test_a_slow_rail_is_named() -> None:
    found = run_pair_test({("n3", "eth0"): end(50.0)}, RAILS)
    assert list(found.bad) == ["n3"] and found.reason.startswith("n3 rail eth0 failed with n")
    assert "bandwidth of " in found.reason


def test_two_nodes_cannot_tell_whose_rail_it_is_but_which_one() -> None:
    found = run_pair_test({("n1", "eth1"): DEAD}, {node: RAILS[node] for node in ("n0", "n1")})
    assert not found.bad and found.unsure == ("n0", "n1") and "n0 rail eth1 and n1 rail eth1: " in found.reason


def test_what_is_no_way_between_nodes_is_left_out() -> None:
    rails: dict[str, tuple[str, ...]] = dict.fromkeys(NODES, ("eth0", "eth1", "usb0"))
    nowhere = {(node, "usb0"): DEAD for node in NODES}
    assert not run_pair_test(nowhere, rails).bad
    assert list(run_pair_test({**nowhere, ("n2", "eth1"): DEAD}, rails).bad) == ["n2"]


def test_all_rails_of_a_node() -> None:
    found = run_pair_test({("n2", "eth0"): DEAD, ("n2", "eth1"): DEAD}, RAILS)
    assert found.reason.startswith("n2 rail eth0, eth1 failed with ")


def test_rails_that_all_have() -> None:
    found = {"a": ("eth0", "eth1", "usb0"), "b": ("eth1", "eth0")}
    assert shared_rails(found, by_name=True) == {"a": ("eth0", "eth1"), "b": ("eth0", "eth1")}
    assert shared_rails(found, by_name=False) == {"a": ("eth0", "eth1"), "b": ("eth1", "eth0")}
    assert shared_rails({**found, "c": ("eth0",)}, by_name=True) == {"a": (), "b": (), "c": ()}
    assert shared_rails({}, by_name=True) == {}
