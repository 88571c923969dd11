"""Learns where in a step a rank's collectives keep the network busy, and where it is idle, from samples of the last
steps.

A sample says how long after the begin of a step one looked, and whether a collective was open then. The usual step is
cut into equal parts. A part is quiet if it was looked at several times and next to no look found a collective there.
Steps of another length than usual do not count, and quiet parts only make a gap without their outer edges. So where
collectives begin earlier or later from step to step, gaps become smaller.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

PARTS = 32  # of a usual step
SAMPLES = 256  # looks that make a first profile: eight for each part
_KEPT = 512  # looks; older ones are forgotten
_LEAST_SEEN = 3  # looks at a part that may count as quiet
_BUSY_SHARE = 0.08  # of the looks at a quiet part may have found a collective: a step that was unlike the others
_LEAST_STEPS = 4  # whose length is known, before anything is said of the usual one
_ALIKE = 0.25  # so far from the usual length a step may be
_MOST_UNLIKE = 0.25  # of the steps may be further from it
_LEAST_GAP_S = 0.004  # a shorter one is over before a sender has woken up

Gap = tuple[float, float]  # seconds after the begin of a step


class NetworkSample(msgspec.Struct, frozen=True, array_like=True):
    """One look at a rank's network: after which step it was, when that step ended, when the look was, what it found."""

    step: int
    begun_at: float  # the end of that step is the begin of the next one
    at: float
    busy: bool  # a collective was open


class StepGaps(msgspec.Struct, frozen=True, kw_only=True):
    """The usual length of a step and the gaps in it, or why they are not known."""

    step_s: float = 0.0
    gaps: tuple[Gap, ...] = ()  # in their order, without overlap
    why: str = ""  # there are none

    @property
    def idle_s(self) -> float:
        return sum(end - start for start, end in self.gaps)


class StepNetworkProfile:
    """The profile of one rank in one generation."""

    def __init__(self) -> None:
        self._samples: deque[NetworkSample] = deque(maxlen=_KEPT)
        self._known: StepGaps | None = None

    @property
    def count(self) -> int:
        """The number of looks that the profile is made from."""
        return len(self._samples)

    def add_samples(self, samples: Iterable[NetworkSample]) -> None:
        """Add new looks, oldest first. Forget older ones if the newest steps all have another length than those."""
        before = len(self._samples)
        self._samples.extend(samples)
        self._known = None
        if len(self._samples) == before == 0:
            return
        lengths = _step_lengths(self._samples)
        newest = [lengths[step] for step in sorted(lengths)[-_LEAST_STEPS:]]
        if len(lengths) < 2 * _LEAST_STEPS or any(_is_alike(one, median(lengths.values())) for one in newest):
            return
        if all(_is_alike(one, median(newest)) for one in newest):
            first = sorted(lengths)[-_LEAST_STEPS]
            kept = [one for one in self._samples if one.step >= first]
            self._samples.clear()
            self._samples.extend(kept)

    def read(self) -> StepGaps:
        """Return the gaps of a usual step."""
        if self._known is None:
            self._known = self._find_gaps()
        return self._known

    def _find_gaps(self) -> StepGaps:
        lengths = _step_lengths(self._samples)
        if len(lengths) < _LEAST_STEPS:
            return StepGaps(why="too few steps have been watched")
        step_s = median(lengths.values())
        alike = {step for step, length_s in lengths.items() if _is_alike(length_s, step_s)}
        if len(alike) < (1 - _MOST_UNLIKE) * len(lengths):
            return StepGaps(step_s=step_s, why="steps vary too much")
        looks = [one for one in self._samples if one.step in alike or one.step not in lengths]
        if not any(one.busy for one in looks):
            return StepGaps(step_s=step_s, why="no collectives have been seen")
        gaps = tuple(_quiet_gaps(looks, step_s))
        return StepGaps(step_s=step_s, gaps=gaps, why="" if gaps else "collectives leave no gaps")


def shared_gaps(ranks: Sequence[StepGaps]) -> StepGaps:
    """Return the gaps that all ranks of a node have at once if they begin their steps together."""
    if not ranks:
        return StepGaps(why="no rank has been watched")
    for one in ranks:
        if one.why:
            return one
    found = list(ranks[0].gaps)
    for other in ranks[1:]:
        both = [(max(a, c), min(b, d)) for a, b in found for c, d in other.gaps]
        found = [(start, end) for start, end in both if end - start >= _LEAST_GAP_S]
    step_s = max(one.step_s for one in ranks)
    return StepGaps(step_s=step_s, gaps=tuple(found), why="" if found else "ranks have no gap in common")


def _is_alike(length_s: float, usual_s: float) -> bool:
    return abs(length_s - usual_s) <= _ALIKE * usual_s


def _step_lengths(samples: Iterable[NetworkSample]) -> dict[int, float]:
    """Return the length of each step that was looked at if the one after it was looked at, too."""
    begins = {one.step: one.begun_at for one in samples}
    ended = ((step, begins[step + 1] - at) for step, at in begins.items() if step + 1 in begins)
    return {step: length_s for step, length_s in ended if length_s > 0}


def _quiet_gaps(looks: Iterable[NetworkSample], step_s: float) -> Iterable[Gap]:
    part_s = step_s / PARTS
    seen, busy = [0] * PARTS, [0] * PARTS
    for one in looks:
        part = int((one.at - one.begun_at) / part_s)
        if 0 <= part < PARTS:
            seen[part] += 1
            busy[part] += one.busy
    quiet = [s >= _LEAST_SEEN and b <= _BUSY_SHARE * s for s, b in zip(seen, busy, strict=True)]
    start = 0
    for part, is_quiet in enumerate([*quiet, False]):
        if is_quiet:
            continue
        # A collective may begin anywhere in the part before or after. At the begin of a step there is none before.
        gap = (start * part_s + (part_s / 2 if start else 0.0), part * part_s - part_s / 2)
        if gap[1] - gap[0] >= _LEAST_GAP_S:
            yield gap
        start = part + 1
