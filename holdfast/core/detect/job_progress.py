"""The job's progress, computed from the beats of its nodes; the slowest node determines the job's step."""

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from holdfast.core.membership.seating import REPLICAS
from holdfast.model.decider_events import WARM_STEPS, Progress
from holdfast.model.job_and_seats import Dims, Seat
from holdfast.model.observation import Beat

_APART_S = 1.0  # a node that is behind where another was so long before does not step together with it
_FRONT, _FRONT_S = 16, 0.25  # of the furthest steps so many are known, so far apart
LEAD = 5  # steps that others have made when who has made none is taken for one that tells of none
_UNSPLIT = REPLICAS | {"cp"}  # parallel dimensions in which every rank knows the size of the whole model


class PaceLimits(msgspec.Struct, frozen=True, kw_only=True):
    progress_s: float = 10.0  # how often progress goes into the journal while nothing happens
    peak_flops: float = 0.0  # FLOP/s of one rank's GPU, for MFU; 0: as the table of GPUs says


def made_steps(step: int, first_step: int) -> int:
    """Return how many steps a rank or node that is now at `step` has made in this generation."""
    return step - first_step + 1 if step >= 0 else 0


class StepTellers:
    """Finds nodes whose ranks run but report no step while other nodes have made several, such as the first stage of a
    pipeline without an optimizer. The job's step does not depend on such a node until it reports the job's step. A node
    that hangs before its first step still counts, because other nodes wait for it and make no steps either."""

    def __init__(self) -> None:
        self._waited_for: set[str] = set()  # nodes that have told of no step
        self._mute: set[str] = set()  # those of them whose ranks run
        self.excused: frozenset[str] = frozenset()  # those of them that the job's step does not wait for

    def on_launch(self, nodes: Iterable[str]) -> None:
        self._waited_for, self._mute, self.excused = set(nodes), set(), frozenset()

    def on_beat(self, beat: Beat, reached: int) -> bool:
        """Record a beat. Return whether the job's step, `reached` so far, depends on this beat's node."""
        if beat.step < 0:
            if beat.running > 0 and beat.node in self._waited_for:
                self._mute.add(beat.node)
            return beat.node not in self.excused
        self._waited_for.discard(beat.node)
        if beat.node in self.excused and beat.step >= reached:
            self.excused -= {beat.node}
        if self._waited_for and self._waited_for <= self._mute and made_steps(beat.step, beat.first_step) >= LEAD:
            self.excused |= self._waited_for
            self._waited_for = set()
        return beat.node not in self.excused


def agreed_origin(origins: Iterable[int]) -> int:
    """Return how many steps came before this generation, if all ranks or nodes report the same number; else -1."""
    first, *others = set(origins)
    return -1 if others else first


def agreed_count(counts: Iterable[int]) -> int:
    """Return the number of parameters if all ranks or nodes report the same number. Otherwise return 0, because none of
    them has counted the whole model."""
    first, *others = set(counts)
    return 0 if others else first


def splits_model(mesh: Dims) -> bool:
    """Return whether ranks of this mesh may hold different parts of the model, so that no rank can count it all."""
    return any(size > 1 and name not in _UNSPLIT for name, size in mesh)


class JobPace:
    """Turns the beats of nodes into a few Progress events. There is one at the first step, after the first steps, when
    redone work is complete, when every rank has left its process groups, and from time to time in between."""

    def __init__(self, limits: PaceLimits) -> None:
        self.limits = limits
        self.generation = 0
        self.best = -1  # furthest step of any generation, as far as steps have numbers
        self._beats: dict[str, Beat] = {}
        self._missing: set[str] = set()  # nodes with a rank that has made no step yet
        self._behind: set[str] = set()  # nodes that redo what was done before
        self._warming: set[str] = set()  # nodes in their first steps; pace is measured from their end on
        self._silent: set[str] = set()  # nodes whose last word may be older than their last step
        self._front: deque[tuple[float, int]] = deque(maxlen=_FRONT)  # when nodes first made which furthest steps
        self._apart: set[str] = set()  # nodes that were behind others at their last beat: not all step together
        self._tellers = StepTellers()
        self._said_at = 0.0
        self._said_step = -1
        self._said_parted, self._said_last_at = False, 0.0

    def continue_from(self, best: int) -> None:
        """Take over the furthest step that an earlier controller saw."""
        self.best = best

    def on_launch(self, generation: int, nodes: tuple[str, ...]) -> None:
        self.generation = generation
        self._beats, self._missing, self._behind, self._warming = {}, set(nodes), set(nodes), set(nodes)
        self._silent, self._apart = set(), set()
        self._front.clear()
        self._tellers.on_launch(nodes)
        self._said_at, self._said_step, self._said_parted, self._said_last_at = 0.0, -1, False, 0.0

    def on_silence(self, nodes: Iterable[str]) -> None:
        """Ignore the steps of these silent nodes until they send a beat. Ranks step together, so the steps of other
        nodes suffice. A silent node that lagged behind still counts. If all nodes are silent, all count."""
        self._silent |= (self._beats.keys() & set(nodes)) - self._apart

    def on_beat(self, now: float, beat: Beat) -> Progress | None:
        if beat.generation != self.generation or not self._tellers.on_beat(beat, self._said_step) or beat.step < 0:
            return None
        first, redoing, warming = bool(self._missing), bool(self._behind), bool(self._warming)
        self._beats[beat.node] = beat
        self._compare_with_front(beat)
        self._silent.discard(beat.node)
        self._missing.discard(beat.node)
        if beat.step + max(0, beat.origin) >= self.best:
            self._behind.discard(beat.node)
        if beat.step >= beat.first_step + WARM_STEPS:
            self._warming.discard(beat.node)
        for waited_for in (self._missing, self._behind, self._warming):
            waited_for -= self._tellers.excused
        if self._missing:
            return None
        caught_up, steady = redoing and not self._behind, warming and not self._warming
        turned = self._have_parted is not self._said_parted
        if first or caught_up or steady or turned or now >= self._said_at + self.limits.progress_s:
            return self.flush_progress(now)
        return None

    def _compare_with_front(self, beat: Beat) -> None:
        """Record whether this node is more than a step behind where the furthest node was a second ago."""
        front = self._front
        if not front or (beat.step > front[-1][1] and beat.at >= front[-1][0] + _FRONT_S):
            front.append((beat.at, beat.step))
        before = max((step for at, step in front if at <= beat.at - _APART_S), default=-1)
        (self._apart.add if before > beat.step + 1 else self._apart.discard)(beat.node)

    @property
    def step(self) -> int:
        """The newest step of this generation that all ranks have made; -1 while a rank has made no step."""
        if self._missing or not self._beats:
            return -1
        return self.number_step(self._slowest_beat)

    def find_mute(self, seats: Iterable[Seat]) -> tuple[int, ...]:
        """Return the ranks of this generation that report no steps. The job's step is taken from the other ranks."""
        silent = {rank for seat in seats if seat.node in self._tellers.excused for rank in seat.ranks}
        return tuple(sorted(silent.union(*(beat.mute for beat in self._beats.values()))))

    def number_step(self, beat: Beat) -> int:
        """Return a beat's step in the job's own numbering; -1 if the beat has none."""
        return beat.step + max(0, self._step_origin(beat)) if beat.step >= 0 else -1

    @property
    def _slowest_beat(self) -> Beat:
        heard = [beat for node, beat in self._beats.items() if node not in self._silent]
        return min(heard or self._beats.values(), key=lambda b: (b.step, -b.at))

    @property
    def _have_parted(self) -> bool:
        return all(beat.parted for beat in self._beats.values())

    def _step_origin(self, beat: Beat) -> int:
        """Return what to add to the step of a beat to get the job's step. It is 0 if the step already is a number of
        its own. It is -1 if nodes do not agree how many steps came before this launch."""
        if not beat.counted:
            return 0
        return agreed_origin(one.origin if one.counted else -1 for one in (beat, *self._beats.values()))

    def flush_progress(self, now: float) -> Progress | None:
        """Return the job's newest step. Return None if it was reported before, or if some node has made no step. Call
        this before an alarm is processed, so that the newest step is known."""
        if self._missing or not self._beats:
            return None
        slowest, parted = self._slowest_beat, self._have_parted
        last_at = max(beat.last_at or beat.at for beat in self._beats.values())
        last_at = last_at if last_at > slowest.at + _APART_S else 0.0
        if (slowest.step, parted) == (self._said_step, self._said_parted) and last_at <= self._said_last_at:
            return None
        self._said_at, self._said_step, self._said_parted, self._said_last_at = now, slowest.step, parted, last_at
        origin = self._step_origin(slowest)
        counted, before = origin < 0, max(0, origin)
        if not counted:
            self.best = max(self.best, slowest.step + before)
        beats = self._beats.values()
        return Progress(
            generation=self.generation,
            step=slowest.step + before,
            at=slowest.at,
            first_step=min(b.first_step for b in beats) + before,
            first_at=max(b.first_at for b in beats),
            counted=counted,
            numbered=slowest.counted and not counted,
            grouped_at=max(b.grouped_at for b in beats),
            restoring_at=max(b.restoring_at for b in beats),
            restored_at=max(b.restored_at for b in beats),
            restored=agreed_origin(b.restored for b in beats),
            set_up_at=max(b.set_up_at for b in beats),
            skippable=all(b.skippable for b in beats),
            skipped=max(b.skipped for b in beats),
            skipped_samples=sum(b.skipped_samples for b in beats),
            backed=all(b.backed >= 0 for b in beats),
            lone=any(b.absent for b in beats),
            parted=parted,
            tokens=min(b.tokens for b in beats),
            flops=min(b.flops for b in beats),
            parameters=0 if any(splits_model(b.mesh) for b in beats) else agreed_count(b.parameters for b in beats),
            peak_flops=sum(b.peak_flops for b in beats) if all(b.peak_flops > 0 for b in beats) else 0.0,
            loss=_mean_loss(tuple(b.loss for b in beats)),
            last_at=last_at,
            survives=all(b.survives for b in beats),
            resizes=all(b.resizes for b in beats),
            carries=all(b.carries for b in beats),
            replicated=all(b.replicated for b in beats),
        )


def _mean_loss(losses: tuple[float | None, ...]) -> float | None:
    """Return the mean of the losses that nodes report; None if there are none, or if one is not finite."""
    told = [loss for loss in losses if loss is not None]
    mean = sum(told) / len(told) if told else math.nan
    return mean if math.isfinite(mean) else None
