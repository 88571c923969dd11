"""Hang detector: raises an alarm when nodes answer but the job makes no step for longer than ever before.

Naming a rank is cheap. If no step is made for the time of a few steps, all processes are inspected twice. A rank that
other ranks wait for in both inspections is named.

Acting on a rank is expensive. The job acts at once only on a rank that is stopped or gone. If two inspections find a
rank's GPU surely stuck, the job acts once it has waited as long as a restart takes. For other named ranks
`suspect_hang_timeout.py` sets the wait. If no rank is named, `suspectless_hang_timeout.py` sets it. A pause that may
end by itself may last at least as long as the longest pause of its kind that this run has recovered from.

Before the first step of a generation the job acts only on stopped ranks, since compilation and data may take any time
(`start_s`). A script that makes no steps is judged by its collectives. Ranks that still enter collectives, as in an
evaluation, are not named. The detector learns from pauses that end by themselves: the next pause in the same named
phase, or at the same place in the code, may last as long. Time in which the detector's clock stood still is left out.
"""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from holdfast.core.detect.job_progress import StepTellers, agreed_origin
from holdfast.core.diagnose.blocking_ranks import BlockingRanks, training_processes
from holdfast.core.diagnose.rank_stillness import Stillness
from holdfast.core.diagnose.stack_folding import main_frames
from holdfast.core.diagnose.suspect_hang_timeout import (
    ENDLESS,
    NamedStandstill,
    find_outside_waits,
    hang_terms,
    is_certain_deadlock,
    is_other_phase,
)
from holdfast.core.diagnose.suspectless_hang_timeout import (
    SETTLED_S,
    Standstill,
    affordable_wait_s,
    do_most_wait,
    find_reason,
    first_expiry,
    next_look_at,
)
from holdfast.core.incident.incident_case import CODE
from holdfast.core.incident.incident_text import count_steps
from holdfast.model.detector_alarm import GPU_HANG, UNNAMED, Alarm, Kind, Stance
from holdfast.model.observation import Beat
from holdfast.model.rank_traces import Frame, Trace

_STEPS = 64  # durations that are remembered
_SOON = 4  # looks that follow one another closely
_PLACES = 64  # at which pauses are remembered
_RECORD_S = 1.0  # a rank writes its collectives down so often
_ASKED_S = 1.0  # whoever is to ask several times a second and comes later than this has stood still
_EARLY_S = 10.0  # from look to look for stopped ranks, before the first step

Place = tuple[Frame, ...]  # outermost first; line 0 of the last stands for any


class HangLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: str = "act"
    steps: float = 8.0  # so many of the job's own steps without one is suspect
    least_s: float = 3.0  # but not before this
    pause: float = 1.5  # nor before so many times the longest pause of the same phase or place that ended by itself
    again_s: float = 1.0  # between the first looks
    act_s: float = 180.0  # a suspect that shows no life for so long is acted on; sooner if a restart costs less
    last_s: float = 1800.0  # a suspect is acted on after so long, whatever it shows: it may be spinning
    quiet_s: float = 600.0  # the links of all hosts are quiet for so long, and no step: look; 0: never
    start_s: float = 900.0  # before the first step


class HangDetector:
    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits
        self.generation = 0
        self._nodes: frozenset[str] = frozenset()
        self._beats: dict[str, Beat] = {}
        self._order: dict[str, int] = {}  # in which they came first
        self._slowest = ""
        self._tellers = StepTellers()
        self.step = -1
        self.moved_at = 0.0  # when the job's step last rose
        self._launched_at = 0.0
        self._trained_at = 0.0  # since when steps are made that were not saved: the first step, or the newest saved one
        self.resumed = False  # the newest beat has ended a pause that was looked at
        self.paused_s = 0.0  # the newest pause that was looked at and ended by itself
        self._start_s = 0.0  # from launch to first step
        self._quiet_s = 0.0  # for how long most ranks had not moved at the last look, with nobody named
        self._usual_s = 0.0  # the most of it after which the job went on by itself
        self._took: list[float] = []  # seconds per step
        self._phases: dict[str, float] = {}  # phase with a name -> longest pause that ended by itself
        self._places: dict[Place, float] = {}  # place in the code -> the same
        self._slept_s = 0.0  # the longest that ranks were asleep before they came back
        self._tried: dict[Place, float] = {}  # place in the code -> after how long a restart was tried there
        self._phase = ""
        self._look_at = 0.0  # not before this
        self._looks = 0  # since the step last rose
        self._stillness = Stillness()
        self._seen = BlockingRanks()  # whom the last look named
        self._named: tuple[int, ...] = ()  # whom an alarm did
        self._stuck: tuple[float, tuple[int, ...]] = (inf, ())  # since when all looks say that these GPUs stand
        self._told = False  # an alarm without a name
        self._place: Place = ()  # where those stand that the others wait for, as far as all looks agree
        self._asked_at = 0.0

    def on_launch(self, now: float, generation: int, nodes: tuple[str, ...]) -> None:
        self.generation, self._nodes = generation, frozenset(nodes)
        self._beats, self._order, self._slowest = {}, {}, ""
        self._tellers.on_launch(nodes)
        self.step, self._phase = -1, ""
        self._launched_at = self._trained_at = now
        self._start_s = 0.0
        self._reset_looks(now)

    def on_beat(self, now: float, beat: Beat) -> None:
        self.resumed = False
        if beat.generation != self.generation or beat.node not in self._nodes:
            return
        if not self._tellers.on_beat(beat, self.step):
            return
        for mute in self._tellers.excused & self._beats.keys():
            del self._beats[mute]
            self._slowest = ""
        before = self._beats.get(beat.node)
        self._beats[beat.node] = beat
        self._order.setdefault(beat.node, len(self._order))
        if before and (beat.sealed > before.sealed or beat.stored > before.stored):
            self._trained_at = now
        if len(self._beats) + len(self._tellers.excused) < len(self._nodes):
            return
        slowest = self._find_slowest(before, beat)
        if slowest.step > self.step:
            self._on_step(now, slowest)
        self._phase = slowest.phase or self._phase

    def _find_slowest(self, before: Beat | None, beat: Beat) -> Beat:
        """Return the beat with the lowest step; among equals, the beat of the node heard first. Not every call searches
        all beats, because that would cost too much."""
        known = self._beats.get(self._slowest)
        if known is None or (beat.node == self._slowest and before and beat.step > before.step):
            known = min(self._beats.values(), key=lambda b: b.step)
        elif (beat.step, self._order[beat.node]) < (known.step, self._order[known.node]):
            known = beat
        self._slowest = known.node
        return known

    def _on_step(self, now: float, beat: Beat) -> None:
        pause_s = now - self.moved_at
        if self.step < 0:
            self._start_s, self._trained_at = pause_s, now
        else:
            self._took = [*self._took, pause_s / (beat.step - self.step)][-_STEPS:]
            if self._looks:  # it was suspect, and came back: its like will be waited for
                self._remember_pause(now, pause_s)
        self.step, self._phase = beat.step, beat.phase
        self._reset_looks(now)

    def _remember_pause(self, now: float, pause_s: float) -> None:
        self.resumed, self.paused_s = True, pause_s
        self._usual_s = max(self._usual_s, self._quiet_s)
        if self._seen.ranks:
            self._slept_s = max(self._slept_s, self._stillness.asleep_s(now, self._seen.ranks))
        if self._phase:
            self._phases[self._phase] = max(self._phases.get(self._phase, 0.0), pause_s)
        if self._place and self._named:
            _remember_place(self._places, self._place, pause_s)

    def _reset_looks(self, now: float) -> None:
        self.moved_at, self._looks, self._look_at = now, 0, 0.0
        self._stillness = Stillness()
        self._seen, self._named = BlockingRanks(), ()
        self._stuck = (inf, ())
        self._place = ()
        self._told, self._quiet_s = False, 0.0

    @property
    def usual_step_s(self) -> float:
        """How many seconds a step of this job usually takes; 0 if this is not known."""
        return sorted(self._took)[len(self._took) // 2] if self._took else 0.0

    @property
    def patience_s(self) -> float:
        """How many seconds this job may go without a step before its processes are inspected."""
        if self.step < 0:
            return self.limits.start_s
        learned_s = self.limits.pause * self._phases.get(self._phase, 0.0)
        return max(self.limits.least_s, self.limits.steps * self.usual_step_s, learned_s)

    @property
    def is_in_named_phase(self) -> bool:
        """Whether the script says that it does something other than training."""
        return is_other_phase(self._phase)

    def stands_since(self, now: float) -> float | None:
        """Return when the job made its last step; None unless it has since stood still for longer than usual."""
        usual_until = max(self.moved_at + self.patience_s, self._usual_until)
        return self.moved_at if self._nodes and now >= usual_until else None

    def should_look(self, now: float) -> bool:
        """Return whether all processes should be inspected now. Call this several times a second."""
        asked_at, self._asked_at = self._asked_at, now
        if asked_at and now - asked_at > max(self.limits.least_s / 2, _ASKED_S):
            self.moved_at += now - asked_at  # we stood still, not they
        patience_s = min(self.patience_s, _EARLY_S) if self.step < 0 else self.patience_s
        return bool(self._nodes) and now >= max(self.moved_at + patience_s, self._look_at)

    def on_traces(self, now: float, traces: Sequence[Trace], named: BlockingRanks) -> Alarm | None:
        """Return an alarm if this inspection of all processes calls for one. The intervals between inspections grow."""
        motions = self._stillness.on_traces(now, traces, find_outside_waits(traces, self._phase))
        goes_on = any(motions[rank].collectives for rank in named.ranks or motions if rank in motions)
        if self.step < 0 and goes_on:  # no step is counted, as in an evaluation: collectives tell that it moves
            self.moved_at, self._looks, self._named = now, 0, ()
        early = self.step < 0 and now < self.moved_at + self.limits.start_s
        self._plan_look(now, early)
        if not named.ranks:
            self._seen, self._named = named, ()
            self._stuck = (inf, ())
            return None if goes_on else self._judge_standstill(now, traces, named, early)
        if early:
            self._stillness.begin()
            return self._make_alarm(now, named, Stance.ACT, named.reason) if named.how == "stopped" else None
        before, self._seen = self._seen, named
        if named.how in ("stopped", "gone"):
            return self._make_alarm(now, named, Stance.ACT, named.reason)
        if self._do_gpus_stand(now, named, goes_on):
            return self._make_alarm(now, named, Stance.ACT, named.reason, hard=True)
        self._place = self._find_place(named, traces)
        moved = goes_on or any(motions[rank].frames for rank in named.ranks if rank in motions)
        again = named.ranks == before.ranks and named.deadlock == before.deadlock and not moved
        if why := self._find_reason(now, traces, named, again):
            alarm = self._make_alarm(now, named, Stance.ACT, f"{named.reason}, {why}")
            return msgspec.structs.replace(alarm, action=CODE, confidence=1.0) if why == ENDLESS else alarm
        if named.ranks == self._named or named.ranks != before.ranks or goes_on or now < self._usual_until:
            return None
        self._named = named.ranks
        return self._make_alarm(now, named, Stance.NOTIFY, named.reason)

    def _do_gpus_stand(self, now: float, named: BlockingRanks, goes_on: bool) -> bool:
        """Return whether the same GPUs are surely stuck, and the job has waited for as long as a restart takes. Two
        inspections, at least `_RECORD_S` apart, must find the GPUs stuck. The job waits because a new kind of kernel
        may take long."""
        if named.how != "gpu" or not named.hard or goes_on or self.is_in_named_phase:
            self._stuck = (inf, ())
        elif self._stuck[1] != named.ranks:
            self._stuck = (now, named.ranks)
        least_s = min(SETTLED_S, self.limits.act_s)
        affordable_at = self.moved_at + affordable_wait_s(self._restart_s, 0.0, least_s, self.limits.act_s)
        due_at = max(self._stuck[0] + _RECORD_S, affordable_at, self._usual_until)
        self._look_at = min(self._look_at, max(due_at, now + self.limits.again_s))
        return now >= due_at

    def _find_reason(self, now: float, traces: Sequence[Trace], named: BlockingRanks, again: bool) -> str:
        """Return why to act on the named ranks now; "" to keep waiting. `again`: they were named last time as well."""
        ranks, stillness = named.ranks, self._stillness
        still_s = stillness.still_s(now, ranks)
        here_s = max(self._longest_at_place(self._places), self._phases.get(self._phase, 0.0))
        hang = NamedStandstill(
            deadlock=named.deadlock if again else "",
            certain=is_certain_deadlock(named, traces, still_s > 0),
            stood_s=now - self.moved_at,
            quiet_s=stillness.quiet_s(now, ranks),
            still_s=still_s,
            asleep_s=stillness.asleep_s(now, ranks) if do_most_wait(traces) else 0.0,
            restart_s=self._restart_s if self.step >= 0 else inf,  # how long a start takes is not known
            usual_s=self.limits.pause * max([*self._phases.values(), *self._places.values()], default=0.0),
            slept_s=self.limits.pause * max(self._slept_s, here_s),
            tried_s=self._longest_at_place(self._tried),
        )
        terms = tuple(hang_terms(hang, self.limits.act_s, self.limits.last_s))
        over = next((term for term in terms if term.lasts_s >= term.limit_s), None)
        if over is None:
            left_s = min((term.limit_s - term.lasts_s for term in terms if term.lasts_s), default=inf)
            self._look_at = min(self._look_at, now + max(left_s, self.limits.again_s))
            return ""
        if self._place:
            _remember_place(self._tried, self._place, over.lasts_s)
        return over.reason

    def _plan_look(self, now: float, early: bool) -> None:
        if early:
            self._look_at = now + _EARLY_S
            return
        self._looks += 1
        soon = self._looks < _SOON and not self._named
        self._look_at = now + self.limits.again_s * (1 if soon else min(30.0, 2 ** (self._looks // 2)))

    def _judge_standstill(self, now: float, traces: Sequence[Trace], named: BlockingRanks, early: bool) -> Alarm | None:
        """Return an alarm without suspects if the job has stood for longer than a restart would cost. `early` means
        that no step was made yet; then only a collective that is about to time out counts."""
        expires_at = first_expiry(traces, self.moved_at)
        self._look_at = next_look_at(self._look_at, now, expires_at)
        seen = [rank for rank, process in training_processes(traces).items() if main_frames(process)]
        self._quiet_s = self._stillness.most_quiet_s(now, seen)  # where no stack could be read, nobody knows
        stall = Standstill(
            quiet_s=self._quiet_s,
            waits=do_most_wait(traces),
            stepped=self.step >= 0,
            restart_s=self._restart_s,
            usual_s=self.limits.pause * max(self._usual_s, self._phases.get(self._phase, 0.0)),
            expires_s=None if expires_at is None else expires_at - now,
        )
        act_s, last_s = (inf, inf) if early else (self.limits.act_s, self.limits.last_s)
        why = find_reason(stall, act_s, last_s)
        if not why or self._told:
            return None
        self._told = True
        return self._make_alarm(now, named, Stance.ACT, f"{named.reason}, no rank is named, {why}")

    def _find_place(self, named: BlockingRanks, traces: Sequence[Trace]) -> Place:
        """Return where the first blocking rank is in its code: the frames that its stacks share in all inspections. If
        other ranks have the same frames, return the place found so far, because the rank may be moving again."""
        mains = {rank: main_frames(p) for rank, p in training_processes(traces).items()}
        own = mains.get(named.ranks[0], ())
        if not self._place:
            return own
        common = shared_place(self._place, own)
        others = [frames for rank, frames in mains.items() if rank not in named.ranks]
        return self._place if any(shared_place(common, frames) == common for frames in others) else common

    @property
    def _usual_until(self) -> float:
        """The time until which the blocking rank may stay at its place in the code, by earlier pauses there."""
        return self.moved_at + self.limits.pause * self._longest_at_place(self._places)

    def _longest_at_place(self, places: Mapping[Place, float]) -> float:
        """Return the longest pause in `places` at the place where the blocking rank is now."""
        return max((s for place, s in places.items() if shared_place(place, self._place) == place), default=0.0)

    @property
    def _restart_s(self) -> float:
        """What a restart costs at most: the start, and the steps that come after the last state known to be saved."""
        return self._start_s + max(0.0, self.moved_at - self._trained_at)

    def describe_step(self) -> str:
        """Return text with the job's current step. If its number is unknown, the text counts steps since the launch."""
        if self.step < 0:
            return ", no step seen yet,"
        counted = self._beats[self._slowest].counted
        origin = agreed_origin(beat.origin if beat.counted else -1 for beat in self._beats.values()) if counted else 0
        return f" at step {self.step + origin}" if origin >= 0 else f" {count_steps(self.step)} after its launch"

    def _make_alarm(
        self, now: float, named: BlockingRanks, stance: Stance, reason: str, *, hard: bool = False
    ) -> Alarm:
        order = [Stance.OBSERVE, Stance.NOTIFY, Stance.ACT]
        seen = named.how in ("stopped", "gone")  # by the kernel's word, whether or not anybody waits for it
        signature = f"{GPU_HANG if named.how == 'gpu' else 'hang'} {named.ranks}"
        what = "has stood" if seen or named.all else "keeps the others waiting" if named.ranks else "the job has stood"
        early = self.step < 0
        # A rank that was seen to run at one look and is stopped at the next one has not stood since the launch.
        since = max(self.moved_at, self._stillness.before_at) if early and named.how == "stopped" else self.moved_at
        lasted = f"{now - self._launched_at:.0f} s after its launch" if early else f"for {now - self.moved_at:.0f} s"
        return Alarm(
            kind=Kind.HANG,
            at=since,
            suspects=named.wide or named.nodes,
            ranks=named.ranks,
            generation=self.generation,
            reason=f"{what}{self.describe_step()} {lasted}: {reason}",
            signature=signature if named.ranks else UNNAMED,
            stance=min(stance, Stance(self.limits.stance), key=order.index),
            hard=seen or hard,
        )


def _remember_place(places: dict[Place, float], place: Place, lasted_s: float) -> None:
    """Record the longest pause at this place, and forget the places recorded longest ago."""
    places[place] = max(places.pop(place, 0.0), lasted_s)
    while len(places) > _PLACES:
        del places[next(iter(places))]


def shared_place(one: Place, other: Place) -> Place:
    """Return the outer frames that two stacks share. In the last one, the two stacks may be at different lines."""
    common: list[Frame] = []
    for a, b in zip(one, other, strict=False):
        if (a.function, a.file) != (b.function, b.file):
            break
        common.append(a if a.line == b.line else Frame(a.function, a.file))
        if a.line != b.line:
            break
    return tuple(common)
