"""Replica detector: finds data-parallel replicas whose state hashes differ.

The detector acts only once all replicas have been equal. State that never was equal, because kernels or machines
differ, proves nothing. Without a known good step there is also nothing to go back to.

The detector names a rank only with a majority of all replicas, including replicas that have not reported. If only two
replicas differ, either may be wrong. Errors that all replicas share go undetected: a gradient that is wrong before the
sum makes all of them equally wrong.
"""

import msgspec

from holdfast.core.incident.alarm_rate_limit import cap_stance
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Mark

_STEPS = 64  # of a stream that are waited for at once
_STRIDES = 20  # doublings at most
_NAMED = 8  # ranks in a sentence


class ReplicaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How often replicas are compared, and how much time that may take."""

    stance: Stance = Stance.ACT
    every: int = 10  # steps; 0: never. Where that costs more than its share, twice as many, and so on
    share: float = 0.003  # of the time


def hash_stride(limits: ReplicaLimits, cost_s: float, step_s: float) -> int:
    """Return the interval, in steps, at which hashing takes at most `limits.share` of the time. It is `limits.every`
    times a power of two, so ranks with different intervals still have common steps."""
    steps = limits.every
    for _ in range(_STRIDES):
        if cost_s <= limits.share * steps * step_s:
            break
        steps *= 2
    return steps


class ReplicaStream:
    """The hashes of one part of the state that some ranks share, by step and rank."""

    def __init__(self, part: str, count: int) -> None:
        self.part = part
        self.count = count  # replicas
        self.equal = -1  # the newest step at which all were
        self.unlike = False  # they differed before they were ever found equal
        self.steps: dict[int, dict[int, int]] = {}  # step -> rank -> hash

    def add_mark(self, mark: Mark) -> dict[int, int]:
        """Record the hash of one rank. Return all hashes known for the same step, by rank."""
        told = self.steps.setdefault(mark.step, {})
        told[mark.rank] = mark.value
        if len(told) == self.count:
            del self.steps[mark.step]
            if len(set(told.values())) == 1:
                self.equal, self.unlike = max(self.equal, mark.step), False
            elif self.equal < 0:
                self.unlike = True
        elif len(self.steps) > _STEPS:
            del self.steps[min(self.steps)]
        return told


class ReplicaDetector:
    """Compares the state hashes of one generation's replicas, separately for each group and part of the state."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self.limits = limits
        self.generation = 0
        self._streams: dict[tuple[str, str], ReplicaStream] = {}
        self._nodes: dict[int, str] = {}
        self._said: set[tuple[int, ...]] = set()

    def on_launch(self, generation: int) -> None:
        self.generation = generation
        self._streams.clear()
        self._nodes.clear()
        self._said.clear()

    def newest_equal_step(self) -> int | None:
        """Return the newest step at which all replicas were equal; -1 if unknown yet, None if they never were."""
        if not self._streams:
            return -1
        return min((stream.equal for stream in self._streams.values() if not stream.unlike), default=None)

    def on_marks(self, now: float, node: str, generation: int, marks: tuple[Mark, ...]) -> list[Alarm]:
        if generation != self.generation:
            return []
        touched = {}
        for mark in marks:
            key = (mark.group, mark.part)
            stream = self._streams.setdefault(key, ReplicaStream(mark.part, mark.count))
            self._nodes[mark.rank] = node
            touched[key, mark.step] = (stream, stream.add_mark(mark))
        alarms = (self._judge_step(now, stream, step, told) for (_, step), (stream, told) in touched.items())
        return [alarm for alarm in alarms if alarm]

    def _judge_step(self, now: float, stream: ReplicaStream, step: int, told: dict[int, int]) -> Alarm | None:
        counts: dict[int, int] = {}
        for value in told.values():
            counts[value] = counts.get(value, 0) + 1
        usual = max(counts, key=lambda value: counts[value])
        majority = 2 * counts[usual] > stream.count
        if len(counts) == 1 or not (majority or len(told) == stream.count):
            return None
        ranks = tuple(sorted(rank for rank, value in told.items() if not majority or value != usual))
        if ranks in self._said:
            return None
        self._said.add(ranks)
        if majority:
            why = f"has other {stream.part} than {counts[usual]} of its {stream.count} replicas at step {step}"
        else:
            why = f"differ in their {stream.part} at step {step}, and nobody can say which of them is right"
        return self._make_alarm(now, stream, ranks, why, majority)

    def _make_alarm(self, now: float, stream: ReplicaStream, ranks: tuple[int, ...], why: str, majority: bool) -> Alarm:
        stance = self.limits.stance
        known = stream.equal >= 0
        good = [one.equal for one in self._streams.values() if one.equal >= 0]
        since = f"; they were equal at step {stream.equal}" if known else "; they were never found equal: not acted on"
        return Alarm(
            kind=Kind.REPLICA,
            at=now,
            suspects=tuple(sorted({self._nodes[rank] for rank in ranks})),
            ranks=ranks[:_NAMED],
            generation=self.generation,
            reason=why + since,
            signature=f"replica {stream.part}",
            stance=stance if known else cap_stance(Stance.NOTIFY, stance),
            hard=majority and known,
            not_after=min(good) if known else None,
        )
