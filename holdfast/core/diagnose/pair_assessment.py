"""Decides which worlds (pairs of nodes) of a pair test failed, from the nodes' reports and by comparing worlds."""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median

from holdfast.core.diagnose import fleet_baseline
from holdfast.core.diagnose.pair_test import PairResult, World
from holdfast.model.probe_findings import Finding

# Ways between nodes are of different lengths and shared with others, so only much counts: of bandwidth, of latency.
_MATTERS = {"link_bandwidth": log(4 / 3), "link_latency": log(10)}  # three quarters; ten times
_LOSS_MATTERS = 0.01  # of all segments; on a busy machine the kernel sends again what was late, not lost
_HALF = 0.5  # of the better one, where there are but two
_RARE = 1e-6  # loss less likely than this, by what the other worlds lose, is no chance
_TIMES = 3.0  # what the others lose
_LOSES = 1e-4  # of all segments, at least, on a sound network

Measured = Mapping[World, Mapping[str, Sequence[Finding]]]  # by world and node


def assess_pairs(now: Measured, before: Measured | None = None) -> tuple[PairResult, ...]:
    """Return the result of every world (pair of nodes) in `now`, compared with worlds that passed `before`."""
    everything = {**(before or {}), **now}
    reasons: dict[World, str] = {}
    for world in now:
        if why := stated_failure(world, now[world]):
            reasons[world] = why
    sound = {world: told for world, told in everything.items() if world not in reasons}
    for found in (_lossy_worlds(sound), *(_slow_worlds(sound, probe) for probe in _MATTERS)):
        for world, why in found.items():
            reasons.setdefault(world, why)
    return tuple(PairResult(world=world, ok=world not in reasons, reason=reasons.get(world, "")) for world in now)


def stated_failure(world: World, told: Mapping[str, Sequence[Finding]]) -> str:
    silent = [node for node in world if not told.get(node)]
    if silent:
        return f"{', '.join(silent)} did not answer"
    failed = [f"{node} says: {f.detail}" for node in world for f in told[node] if f.ok is False]
    return failed[0] if failed else ""


def _lossy_worlds(sound: Measured) -> dict[World, str]:
    counts = {}
    for world, told in sound.items():
        pairs = [f.samples for findings in told.values() for f in findings if f.probe == "link_loss" and f.samples]
        counts[world] = (sum(lost for lost, _ in pairs), sum(sent for _, sent in pairs))
    found = {}
    for world, (lost, sent) in counts.items():
        others = [count for other, count in counts.items() if other != world]
        # Of the others the median, not the sum: a second lossy one must not hide the first.
        usual = max(_LOSES, median([a / b for a, b in others if b] or [0.0]))
        if lost > max(_LOSS_MATTERS, _TIMES * usual) * sent and _poisson_tail(int(lost), usual * sent) < _RARE:
            found[world] = f"{lost:.0f} of {sent:.0f} segments had to be sent again"
    return found


def _poisson_tail(count: int, expected: float) -> float:
    """Return the Poisson probability of `count` or more events when `expected` are expected."""
    term, below = exp(-min(expected, 700.0)), 0.0
    for number in range(count):
        below += term
        term *= expected / (number + 1)
    return max(0.0, 1.0 - below)


def _slow_worlds(sound: Measured, probe: str) -> dict[World, str]:
    rows = {
        world: [f for findings in told.values() for f in findings if f.probe == probe and f.samples]
        for world, told in sound.items()
    }
    units = {world: found[0] for world, found in rows.items() if found}
    if not units:
        return {}
    lower = next(iter(units.values())).lower
    samples = {
        world: _better_half([s for f in found for s in f.samples], lower) for world, found in rows.items() if found
    }
    names = {"|".join(world): world for world in samples}
    measured = {name: samples[world] for name, world in names.items()}
    short = fleet_baseline.below_fleet(measured, lower=lower, matters=_MATTERS[probe])
    by = {names[name]: one.by for name, one in short.items()}
    if len(samples) == 2 and not lower:
        by = _worse_of_two(samples)
    what, unit = probe.removeprefix("link_"), next(iter(units.values())).unit
    told = "longer than" if lower else "less than"
    return {w: f"{what} of {median(samples[w]):.3g} {unit}, {part:.0%} {told} others" for w, part in by.items()}


def _better_half(samples: Sequence[float], lower: bool) -> tuple[float, ...]:
    """Return the better half of the samples, because it shows what the link can do, while the worse half shows how busy
    machines were. `lower` says that lower values are better."""
    return tuple(sorted(samples, reverse=not lower)[: (len(samples) + 1) // 2])


def _worse_of_two(samples: Mapping[World, Sequence[float]]) -> dict[World, float]:
    """Return the worse of two worlds (pairs of nodes) with the share by which it falls short. Return nothing unless its
    median is below half the other's median, and the ranges of the two do not overlap."""
    better, worse = sorted(samples, key=lambda world: -median(samples[world]))
    part = median(samples[worse]) / median(samples[better])
    apart = fleet_baseline.inner_range(samples[worse])[1] < fleet_baseline.inner_range(samples[better])[0]
    return {worse: 1.0 - part} if part < _HALF and apart else {}
