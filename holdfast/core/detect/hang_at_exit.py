"""Exit hang detector: finds ranks that have finished their work but whose processes do not end.

The script of such a rank has returned, or waits in `destroy_process_group` or after it. Usual causes are a thread that
nobody joins, an exit handler, or a deadlock in PyTorch's teardown. The detector names such ranks once no other ranks
are left. After `hang.act_s` without a sign of life, the job counts as ended well without these ranks. If they use CPU
time and do nothing else, the limit is `hang.last_s`.

There is no limit while a rank reads or writes bytes, since it may be saving something. There is also no limit after the
script has ended its process groups, since it may be evaluating its model.

If some ranks have ended well and another rank is still but has not finished, the detector blames the script.
"""

from collections.abc import Sequence

from holdfast.core.detect.hang import HangLimits
from holdfast.core.diagnose.blocking_ranks import GONE
from holdfast.core.diagnose.rank_stillness import STILL_BYTES, Stillness
from holdfast.core.diagnose.stack_folding import fold_stack, main_frames
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Process, Trace

_NAME_S = 10.0  # without a sign of life, before anybody is told
_RETURNED, _PARTED = "returned", "parted"


class ExitHangDetector:
    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits
        self.on_launch(0)

    def on_launch(self, generation: int) -> None:
        self.generation = generation
        self._stillness = Stillness()
        self._named = False
        self._since: float | None = None  # all that is left are ranks at their end, and no bytes move

    def on_traces(
        self, now: float, traces: Sequence[Trace], seats: tuple[Seat, ...]
    ) -> tuple[bool, tuple[Alarm | Ended, ...]]:
        """Return whether all remaining ranks have finished, and the alarms or end events that follow from this
        inspection.

        `traces` come from nodes that still have ranks; `seats` are all seats of the generation.
        """
        motions = self._stillness.on_traces(now, traces)
        left = {p.rank: p for trace in traces for p in trace.processes if not p.child}
        if not left or any(trace.error for trace in traces) or any(p.state in GONE for p in left.values()):
            self._since = None
            return False, ()
        before_it = {rank: p for rank, p in left.items() if not p.ending}
        works_on = any(p.ending == _PARTED for p in left.values())
        if before_it or works_on or any(motion.io_bytes > STILL_BYTES for motion in motions.values()):
            self._since = None
        elif self._since is None:
            self._since = now
        if before_it and len(left) == sum(seat.nproc for seat in seats):
            return False, ()  # it trains, and how that goes is not told by who has ended
        lasts_s = self._stillness.still_s(now, left)
        if self._since is not None and now - self._since >= self.limits.last_s:
            lasts_s = max(lasts_s, now - self._since)
        return not before_it, self._judge_left(now, left, before_it, lasts_s)

    def _judge_left(
        self, now: float, left: dict[int, Process], before_it: dict[int, Process], lasts_s: float
    ) -> tuple[Alarm | Ended, ...]:
        if lasts_s >= self.limits.act_s and self.limits.stance == Stance.ACT:
            return (
                self._end_events(left, lasts_s)
                if not before_it
                else (self._make_alarm(now, before_it, lasts_s, Stance.ACT),)
            )
        if lasts_s < _NAME_S or self._named:
            return ()
        self._named = True
        return (self._make_alarm(now, before_it or left, lasts_s, Stance.NOTIFY),)

    def _end_events(self, left: dict[int, Process], lasts_s: float) -> tuple[Ended, ...]:
        whom = "it" if len(left) == 1 else "them"
        reason = f"{_describe_left(left, lasts_s)}; the job has ended well, and does not wait for {whom}"
        if any(p.ending != _RETURNED for p in left.values()):
            reason += "; what the script does after destroy_process_group is not done"
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, process in sorted(left.items()):
            ranks[process.node] = (*ranks.get(process.node, ()), rank)
        first = min(ranks)
        return tuple(
            Ended(node=node, generation=self.generation, left=own, reason=reason if node == first else "")
            for node, own in ranks.items()
        )

    def _make_alarm(self, now: float, left: dict[int, Process], lasts_s: float, stance: Stance) -> Alarm:
        """Return an alarm that suspects no machine, because it is the script that does not end."""
        order = [Stance.OBSERVE, Stance.NOTIFY, Stance.ACT]
        return Alarm(
            kind=Kind.HANG,
            at=now - lasts_s,
            suspects=(),
            ranks=tuple(sorted(left)),
            generation=self.generation,
            group="script",
            action="rollback_or_fix_code",
            confidence=1.0,
            reason=_describe_left(left, lasts_s),
            hint="Have every rank come to the end of the script, and join its threads there.",
            signature=f"hang at the end {tuple(sorted(left))}",
            stance=min(stance, Stance(self.limits.stance), key=order.index),
        )


def _describe_left(left: dict[int, Process], lasts_s: float) -> str:
    """Return text that says which ranks do not end, how far the first of them got and where it is in its code."""
    ranks = sorted(left)
    process = left[ranks[0]]
    whose = "its" if len(ranks) == 1 else f"rank {ranks[0]}'s"
    how = {
        _RETURNED: f"{whose} script has returned",
        "parting": f"{whose} script is in destroy_process_group",
        _PARTED: f"{whose} script is past destroy_process_group",
    }
    far = how.get(process.ending, "others have ended well")
    where = f", and it stands in {fold_stack(frames[-1:])[0]}" if (frames := main_frames(process)) else ""
    verb = "does" if len(ranks) == 1 else "do"
    return f"{format_ranks(ranks)} {verb} not end: {far}{where}, for {lasts_s:.0f} s"
