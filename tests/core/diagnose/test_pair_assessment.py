"""Which worlds of a pair test failed, by what was said and by what was measured."""

import random

import msgspec

from holdfast.core.diagnose.pair_assessment import Measured, assess_pairs
from holdfast.core.diagnose.pair_test import World
from holdfast.model.probe_findings import Finding


def end(
    bandwidth: float = 1000.0, *, lost: int = 0, latency: float = 0.2, ok: bool = True, seed: int = 0
) -> list[Finding]:
    chance = random.Random(seed)
    rates = tuple(bandwidth * chance.uniform(0.9, 1.1) for _ in range(10))
    pings = tuple(latency * chance.uniform(0.8, 1.5) for _ in range(20))
    return [
        Finding(probe="link", level=2, ok=True),
        Finding(probe="link_latency", level=2, ok=True, value=latency, samples=pings, lower=True, unit="ms"),
        Finding(probe="link_bandwidth", level=2, ok=True, value=bandwidth, samples=rates, unit="MB/s"),
        Finding(probe="link_loss", level=2, ok=True, value=lost / 5000, samples=(lost, 5000), lower=True),
        Finding(probe="link_integrity", level=2, ok=ok, detail="" if ok else "what rank 1 sent did not arrive"),
    ]


def worlds(*ends: list[Finding]) -> dict[World, dict[str, list[Finding]]]:
    return {(f"a{i}", f"b{i}"): {f"a{i}": found, f"b{i}": found} for i, found in enumerate(ends)}


def failed(now: Measured, before: Measured | None = None) -> dict[str, str]:
    return {met.world[0]: met.reason for met in assess_pairs(now, before) if not met.ok}


def test_a_network_without_tcp_has_no_loss_to_look_at() -> None:
    unknown = Finding(probe="link_loss", level=2, ok=None, detail="no connection of TCP to look at")
    assert failed(worlds(*[[f for f in end(seed=i) if f.probe != "link_loss"] + [unknown] for i in range(3)])) == {}


def test_sound_links_pass() -> None:
    for count in (1, 2, 3, 6):
        assert failed(worlds(*[end(seed=i, lost=i) for i in range(count)])) == {}


def test_who_says_nothing_has_failed() -> None:
    found = worlds(end(), end())
    found["a1", "b1"]["b1"] = []
    assert list(failed(found)) == ["a1"] and failed(found)["a1"].startswith("b1 ")


def test_one_wrong_bit_fails_its_world() -> None:
    assert failed(worlds(end(), end(ok=False), end())) == {"a1": "a1 says: what rank 1 sent did not arrive"}


def test_a_slow_link_is_found_beside_others() -> None:
    for count in (1, 2, 5):
        found = failed(worlds(*[end(seed=i) for i in range(count)], end(50.0, seed=9)))
        assert list(found) == [f"a{count}"] and "bandwidth" in found[f"a{count}"]


def test_the_worse_of_two_must_be_much_worse() -> None:
    assert failed(worlds(end(1000.0), end(700.0, seed=1))) == {}


def test_a_lossy_link_is_found_and_a_few_late_segments_are_not() -> None:
    assert list(failed(worlds(end(lost=3), end(lost=200), end(lost=12)))) == ["a1"]
    assert failed(worlds(end(lost=3), end(lost=20), end(lost=0))) == {}
    assert sorted(failed(worlds(end(), end(lost=200), end(lost=300), end(), end()))) == ["a1", "a2"]
    assert failed(worlds(*[end(lost=200)] * 4)) == {}, "what all lose is the network's"


def test_a_slow_answer_is_found() -> None:
    found = failed(worlds(*[end(seed=i) for i in range(5)], end(latency=40.0, seed=9)))
    assert list(found) == ["a5"] and "latency" in found["a5"]


def test_a_busy_machine_is_not_a_slow_link() -> None:
    busy = end(seed=9)
    pings = tuple(s * (100 if i % 3 == 0 else 1) for i, s in enumerate(busy[1].samples))
    rates = tuple(s / (20 if i % 3 == 0 else 1) for i, s in enumerate(busy[2].samples))
    busy[1:3] = [msgspec.structs.replace(busy[1], samples=pings), msgspec.structs.replace(busy[2], samples=rates)]
    assert failed(worlds(*[end(seed=i) for i in range(5)], busy)) == {}


def test_earlier_worlds_tell_what_is_usual() -> None:
    now: dict[World, dict[str, list[Finding]]] = {("c", "d"): {"c": end(40.0), "d": end(40.0)}}
    assert failed(now) == {}, "alone it cannot be known"
    assert list(failed(now, worlds(end(), end(seed=1)))) == ["c"]
