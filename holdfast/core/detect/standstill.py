"""Standstill detector: reports that the job makes no step, whether or not a rank is named for it.

The detector puts an alarm into the journal at the second inspection, because stalls do not count as training time. A
person gets a message only if no rank is named and the job has stood for ten seconds. If a reported stall ended by
itself, the next stall must last longer before a person gets a message. There is no alarm while ranks still enter
collectives, or are in a phase that the script has named.
"""

from collections.abc import Sequence

from holdfast.core.detect.hang import HangDetector
from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.diagnose.rank_motion import find_motion
from holdfast.core.diagnose.suspectless_hang_timeout import SETTLED_S
from holdfast.model.detector_alarm import NO_STEP, Alarm, Kind, Stance
from holdfast.model.rank_traces import Trace


class StandstillDetector:
    def __init__(self, hang: HangDetector) -> None:
        self._hang = hang
        self._stand = (0, -1)  # the generation and the step at which the job stood at the last look
        self._last: Sequence[Trace] = ()  # of that stand
        self._told: Stance | None = None  # of that stand
        self._usual_s = 0.0  # so long stands lasted that a person was told of

    def on_traces(self, now: float, traces: Sequence[Trace], named: BlockingRanks) -> Alarm | None:
        """Return an alarm if stacks show a new standstill. Call this after the hang detector has judged them."""
        hang = self._hang
        if self._stand != (hang.generation, hang.step):
            if self._told is Stance.NOTIFY and self._stand[0] == hang.generation:  # else a restart has ended it
                self._usual_s = max(self._usual_s, hang.paused_s)
            self._stand, self._last, self._told = (hang.generation, hang.step), (), None
        last, self._last = self._last, traces
        moving = any(motion.collectives for motion in find_motion(last, traces).values())
        if not last or moving or hang.step < 0 or hang.is_in_named_phase or self._told is Stance.NOTIFY:
            return None
        stood_s = now - hang.moved_at
        long = stood_s >= max(SETTLED_S, hang.limits.pause * self._usual_s)
        stance = Stance.NOTIFY if long and not named.ranks and hang.limits.stance != "observe" else Stance.OBSERVE
        if stance is self._told:
            return None
        self._told = stance
        return Alarm(
            kind=Kind.HANG,
            at=hang.moved_at,
            suspects=(),
            generation=hang.generation,
            reason=f"no step for {stood_s:.0f} s{hang.describe_step()}: {named.reason}",
            signature=NO_STEP,
            stance=stance,
        )
