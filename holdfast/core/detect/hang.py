"""hang: nodes answer, and the job's step stands still for longer than this job ever has.

Naming is cheap: after a few of the job's own steps all processes are looked at, twice, and whoever the others wait for
both times is named. Acting is not: at once only on a rank that is stopped or gone. Otherwise the suspects and their
children must have shown no processor time, no bytes read or written and no frame that moved for `act_s` and longer than
any pause this run has come back from.

Refuses to judge before the first step of a generation, where compilation and data may take any time (`start_s`): only a
rank that is stopped is acted on then. A script that makes no steps is judged by the collectives that its ranks come to.
Nor does it judge while its own clock stood still; nor does it name ranks that still come to collectives, as in an
evaluation. A pause that ends by itself teaches it: the next one of its phase, if that has a name, or at its place in
the code, may last as long. What stands elsewhere is named as soon as ever.
"""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.detect.pace import agreed_origin
from holdfast.core.diagnose.blocking_ranks import BlockingRanks, RankMotion, find_motion, training_processes
from holdfast.core.diagnose.stack_folding import main_frames
from holdfast.core.incident.incident_text import count_steps
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.signal import Beat
from holdfast.model.stacks import Frame, Trace

_STEPS = 64  # durations that are remembered
_STILL_CPU = 0.02  # of a core: what threads that only wait use up
STILL_BYTES = 4096
_SOON = 4  # looks that follow one another closely
_PLACES = 64  # at which pauses are remembered
_EARLY_S = 10.0  # from look to look for stopped ranks, before the first step

Place = tuple[Frame, ...]  # outermost first; line 0 of the last stands for any


class HangLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: str = "act"
    steps: float = 8.0  # so many of the job's own steps without one is suspect
    least_s: float = 3.0  # but not before this
    pause: float = 1.5  # nor before so many times the longest pause of the same phase or place that ended by itself
    again_s: float = 1.0  # between the first looks
    act_s: float = 180.0  # a suspect that shows no life for so long is acted on
    last_s: float = 1800.0  # a suspect is acted on after so long, whatever it shows: it may be spinning
    start_s: float = 900.0  # before the first step


class Stillness:
    """Since when ranks show no life, as looks at them tell."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._last: tuple[float, tuple[Trace, ...]] = (0.0, ())

    def on_traces(self, now: float, traces: Sequence[Trace]) -> dict[int, RankMotion]:
        """Who has shown life since the last look."""
        (last_at, last), self._last = self._last, (now, tuple(traces))
        motions = find_motion(last, traces)
        for rank, motion in motions.items():
            used = motion.cpu_s > _STILL_CPU * max(now - last_at, 0.1)
            if used or motion.frames or motion.collectives or motion.io_bytes > STILL_BYTES:
                self._since.pop(rank, None)
            else:
                self._since.setdefault(rank, last_at)
        return motions

    def begin(self) -> None:
        """What was still so far does not count."""
        self._since.clear()

    def still_s(self, now: float, ranks: Iterable[int]) -> float:
        """For how long none of these has shown any."""
        return min(now - self._since.get(rank, now) for rank in ranks)


class HangDetector:
    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits
        self.generation = 0
        self._nodes: frozenset[str] = frozenset()
        self._beats: dict[str, Beat] = {}
        self._order: dict[str, int] = {}  # in which they came first
        self._slowest = ""
        self._step = -1
        self._moved_at = 0.0  # when the job's step last rose
        self._took: list[float] = []  # seconds per step
        self._phases: dict[str, float] = {}  # phase with a name -> longest pause that ended by itself
        self._places: dict[Place, float] = {}  # place in the code -> the same
        self._phase = ""
        self._look_at = 0.0  # not before this
        self._looks = 0  # since the step last rose
        self._stillness = Stillness()
        self._seen: tuple[int, ...] = ()  # whom the last look named
        self._named: tuple[int, ...] = ()  # whom an alarm did
        self._place: Place = ()  # where those stand that the others wait for, as far as all looks agree
        self._asked_at = 0.0

    def on_launch(self, now: float, generation: int, nodes: tuple[str, ...]) -> None:
        self.generation, self._nodes = generation, frozenset(nodes)
        self._beats.clear()
        self._order.clear()
        self._slowest = ""
        self._step, self._phase = -1, ""
        self._reset_looks(now)

    def on_beat(self, now: float, beat: Beat) -> None:
        if beat.generation != self.generation or beat.node not in self._nodes:
            return
        before = self._beats.get(beat.node)
        self._beats[beat.node] = beat
        self._order.setdefault(beat.node, len(self._order))
        if len(self._beats) < len(self._nodes):
            return
        slowest = self._find_slowest(before, beat)
        if slowest.step > self._step:
            self._on_step(now, slowest)
        self._phase = slowest.phase or self._phase

    def _find_slowest(self, before: Beat | None, beat: Beat) -> Beat:
        """The first of those at the least step. All are looked at only when the slowest itself has gone on: many nodes
        beat, each once a second."""
        known = self._beats.get(self._slowest)
        if known is None or (beat.node == self._slowest and before and beat.step > before.step):
            known = min(self._beats.values(), key=lambda b: b.step)
        elif (beat.step, self._order[beat.node]) < (known.step, self._order[known.node]):
            known = beat
        self._slowest = known.node
        return known

    def _on_step(self, now: float, beat: Beat) -> None:
        pause_s = now - self._moved_at
        if self._step >= 0:
            self._took = [*self._took, pause_s / (beat.step - self._step)][-_STEPS:]
            if self._looks:  # it was suspect, and came back: its like will be waited for
                self._remember_pause(pause_s)
        self._step, self._phase = beat.step, beat.phase
        self._reset_looks(now)

    def _remember_pause(self, pause_s: float) -> None:
        if self._phase:
            self._phases[self._phase] = max(self._phases.get(self._phase, 0.0), pause_s)
        if self._place and self._named:
            self._places[self._place] = max(self._places.pop(self._place, 0.0), pause_s)
            while len(self._places) > _PLACES:
                del self._places[next(iter(self._places))]

    def _reset_looks(self, now: float) -> None:
        self._moved_at, self._looks, self._look_at = now, 0, 0.0
        self._stillness = Stillness()
        self._seen = self._named = ()
        self._place = ()

    @property
    def patience_s(self) -> float:
        """How long this job may stand still before anybody is looked at."""
        if self._step < 0:
            return self.limits.start_s
        typical_s = sorted(self._took)[len(self._took) // 2] if self._took else 0.0
        learned_s = self.limits.pause * self._phases.get(self._phase, 0.0)
        return max(self.limits.least_s, self.limits.steps * typical_s, learned_s)

    def should_look(self, now: float) -> bool:
        """Whether all processes are to be looked at now. To be asked several times a second."""
        asked_at, self._asked_at = self._asked_at, now
        if asked_at and now - asked_at > self.limits.least_s / 2:
            self._moved_at += now - asked_at  # we stood still, not they
        patience_s = min(self.patience_s, _EARLY_S) if self._step < 0 else self.patience_s
        return bool(self._nodes) and now >= max(self._moved_at + patience_s, self._look_at)

    def on_traces(self, now: float, traces: Sequence[Trace], named: BlockingRanks) -> Alarm | None:
        """What one look found. The first ones come close together, later ones further and further apart."""
        motions = self._stillness.on_traces(now, traces)
        goes_on = any(motions[rank].collectives for rank in named.ranks or motions if rank in motions)
        if self._step < 0 and goes_on:  # no step is counted, as in an evaluation: collectives tell that it moves
            self._moved_at, self._looks, self._named = now, 0, ()
        if self._step < 0 and now < self._moved_at + self.limits.start_s:
            self._look_at = now + _EARLY_S
            self._stillness.begin()
            return self._make_alarm(now, named, Stance.ACT, named.reason) if named.how == "stopped" else None
        self._looks += 1
        soon = self._looks < _SOON and not self._named
        self._look_at = now + self.limits.again_s * (1 if soon else min(30.0, 2 ** (self._looks // 2)))
        before, self._seen = self._seen, named.ranks
        if not named.ranks:
            self._named = ()
            return None
        if named.how in ("stopped", "gone"):
            return self._make_alarm(now, named, Stance.ACT, named.reason)
        self._place = self._find_place(named, traces)
        still_s = self._stillness.still_s(now, named.ranks)
        longest_s = self.limits.pause * max([*self._phases.values(), *self._places.values()], default=0.0)
        if still_s >= max(self.limits.act_s, longest_s):
            return self._make_alarm(
                now, named, Stance.ACT, f"{named.reason}, without a sign of life for {still_s:.0f} s"
            )
        if now - self._moved_at >= max(self.limits.last_s, longest_s):
            return self._make_alarm(now, named, Stance.ACT, named.reason)
        if named.ranks == self._named or named.ranks != before or goes_on or now < self._usual_until:
            return None
        self._named = named.ranks
        return self._make_alarm(now, named, Stance.NOTIFY, named.reason)

    def _find_place(self, named: BlockingRanks, traces: Sequence[Trace]) -> Place:
        """Where the first of them stands; if it has been looked at before, as far as that is the same.

        But not where the others are, too: at the last look of a pause it may be on its way again.
        """
        mains = {rank: main_frames(p) for rank, p in training_processes(traces).items()}
        own = mains.get(named.ranks[0], ())
        if not self._place:
            return own
        common = shared_place(self._place, own)
        others = [frames for rank, frames in mains.items() if rank not in named.ranks]
        return self._place if any(shared_place(common, frames) == common for frames in others) else common

    @property
    def _usual_until(self) -> float:
        """Until when it may stand there, as it has done before."""
        usual_s = max(
            (s for place, s in self._places.items() if shared_place(place, self._place) == place), default=0.0
        )
        return self._moved_at + self.limits.pause * usual_s

    def _where(self) -> str:
        """How far the job is, by the numbers of its steps as far as these are known."""
        if self._step < 0:
            return ", no step seen yet,"
        counted = self._beats[self._slowest].counted
        origin = agreed_origin(beat.origin if beat.counted else -1 for beat in self._beats.values()) if counted else 0
        return f" at step {self._step + origin}" if origin >= 0 else f" {count_steps(self._step)} after its launch"

    def _make_alarm(self, now: float, named: BlockingRanks, stance: Stance, reason: str) -> Alarm:
        order = [Stance.OBSERVE, Stance.NOTIFY, Stance.ACT]
        hard = named.how in ("stopped", "gone")  # by the kernel's word, whether or not anybody waits for it
        what = "has stood" if hard else "keeps the others waiting"
        return Alarm(
            kind=Kind.HANG,
            at=self._moved_at,
            suspects=named.wide or named.nodes,
            ranks=named.ranks,
            generation=self.generation,
            reason=f"{what}{self._where()} for {now - self._moved_at:.0f} s: {reason}",
            signature=f"hang {named.ranks}",
            stance=min(stance, Stance(self.limits.stance), key=order.index),
            hard=hard,
        )


def shared_place(one: Place, other: Place) -> Place:
    """The way that two stacks have in common; on its last frame they may be on different lines."""
    common: list[Frame] = []
    for a, b in zip(one, other, strict=False):
        if (a.function, a.file) != (b.function, b.file):
            break
        common.append(a if a.line == b.line else Frame(a.function, a.file))
        if a.line != b.line:
            break
    return tuple(common)
