"""A model of how failures show to the detectors: which alarm is raised, after what delay, and which node it names."""

from random import Random

import msgspec

from holdfast.core.detect.crash import FailureCatalog, alarm_of
from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.replica import ReplicaLimits
from holdfast.core.detect.slow import EARLY, HABIT, SlowLimits
from holdfast.model.detector_alarm import UNNAMED, Alarm, Kind, Stance
from holdfast.model.observation import Exit
from holdfast.sim.scale.failure_mixes import FailureMode
from holdfast.sim.scale.node_defects import NodeDefect, draw_wide_lot
from holdfast.sim.scale.node_neighbours import FailurePlace
from holdfast.sim.scale.price_sheet import PriceDraws

_TIMED_OUT = (
    "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91, OpType=ALLREDUCE) ran for 600000"
    " milliseconds before timing out."
)

_KINDS = ("hang_spinning", "hang_stopped")  # shares of the hangs that are seen


class AlarmSign(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm that a failure will raise, the delay until then, and the effect on training."""

    after_s: float
    alarm: Alarm
    stalls: bool = True  # no step is made from the failure on
    back_steps: int = 0  # the last so many steps are spoilt
    named: tuple[float, Alarm] | None = None  # after so long, who is to blame as it seems: told, not acted on


class AlarmModel:
    """Draws how the detectors react to a failure; detectors that are switched off see nothing."""

    def __init__(self, prices: PriceDraws, catalog: FailureCatalog, step_s: float, off: frozenset[str]) -> None:
        self._prices = prices
        self._catalog = catalog
        self._step_s = step_s
        self._off = off
        self._read: dict[str, Alarm] = {}  # last words -> what they tell
        self._hang, self._slow = HangLimits(), SlowLimits()
        self._every = ReplicaLimits().every

    def draw_sign(self, fault: FailureMode, places: FailurePlace, rng: Random, defect: NodeDefect | None) -> AlarmSign:
        """Draw the alarm that a failure raises; `defect` is the node's own defect, if it has one."""
        node, other = places.node, places.other
        prices = self._prices
        match fault.shows:
            case "crash":
                where = node if rng.random() < prices.share_value("first_cause") else other
                return AlarmSign(after_s=prices("notice", "tell"), alarm=self._crash_alarm(fault.said, where))
            case "oom":
                return AlarmSign(after_s=prices("notice", "tell"), alarm=_oom_alarm(node))
            case "silence":
                return AlarmSign(after_s=prices("silence"), alarm=silence_alarm(node))
            case "health" if "health" in self._off:
                return self._timeout_sign(other)
            case "health":
                read_s = rng.uniform(0.0, fault.read_s) + (fault.reads - 1) * fault.read_s
                return AlarmSign(after_s=read_s + prices("tell"), alarm=_health_alarm(fault, node))
            case "hang":
                lot = defect.hang_lot if defect else rng.random()
                return self._hang_sign(places, lot, defect.wide_lot if defect else draw_wide_lot(lot))
            case "loss":
                compared = defect is not None and "replica" not in self._off
                if compared and defect is not None and defect.hash_lot < prices.share_value("hash_finds"):
                    return self._hash_sign(node, rng)
                return self._nan_sign(other)
            case "slow":
                raise AssertionError("a slow job goes on: see slow.py")

    def slow_sign(self, node: str, runs_s: float) -> AlarmSign | None:
        """Return the alarm that names a slow node once it has cost as much as a replacement of the node.

        A generation learns its normal pace in its first rounds; cost counts only after them. Return None if the
        generation is so young that it learns the slow pace as its normal one.
        """
        limits = self._slow
        round_s = max(limits.round_s, limits.round_steps * self._step_s)
        learning_s = max(0.0, EARLY * round_s - runs_s)
        if learning_s >= HABIT * round_s:
            return None
        after_s = max(limits.rounds * round_s, learning_s) + limits.cost_s / self._prices.share_value("drag")
        reason = "makes the others wait"
        alarm = Alarm(kind=Kind.SLOW, at=0.0, suspects=(node,), reason=reason, signature=f"slow {node}")
        return AlarmSign(after_s=after_s, alarm=alarm, stalls=False)

    def _crash_alarm(self, said: str, node: str) -> Alarm:
        if said not in self._read:
            exit = Exit(node=node, generation=0, rank=0, code=1, at=0.0, words=(said,) if said else ())
            alarm = alarm_of(exit, self._catalog)
            if "words" in self._off:
                dumb = {"klass": "", "group": "", "action": "", "confidence": 0.0, "signature": "exit 1"}
                alarm = msgspec.structs.replace(alarm, **dumb)
            self._read[said] = alarm
        return msgspec.structs.replace(self._read[said], suspects=(node,))

    def _timeout_sign(self, node: str) -> AlarmSign:
        return AlarmSign(after_s=self._prices("nccl_timeout", "notice"), alarm=self._crash_alarm(_TIMED_OUT, node))

    def _hang_sign(self, places: FailurePlace, lot: float, wide_lot: float) -> AlarmSign:
        """Draw the alarm for a hang. It names a process that is stopped or spins, or it is a timeout, or it names no
        node. An alarm that names none comes later, by `act_s` of the hang detector's settings."""
        node, other = places.node, places.other
        limits, unnamed = self._hang, self._prices.share_value("hang_unnamed")
        spinning, stopped = (unnamed + (1 - unnamed) * self._prices.share_value(name) for name in _KINDS)
        if "hang" in self._off:
            return self._timeout_sign(other)
        named_s = max(limits.least_s, limits.steps * self._step_s) + self._prices("look")
        if lot < unnamed:
            return AlarmSign(after_s=named_s + limits.act_s, alarm=_unnamed_alarm())
        is_stopped = spinning <= lot < spinning + stopped - unnamed
        # Where ranks of several nodes keep the others waiting, all of their pipeline is under suspicion.
        several = wide_lot < self._prices.share_value("hang_group") and len(places.ranks) > 1
        if "naming" in self._off:
            return AlarmSign(after_s=named_s + limits.act_s, alarm=_unnamed_alarm())
        suspects = places.group if several else (node,)
        alarm = Alarm(
            kind=Kind.HANG,
            at=0.0,
            suspects=suspects,
            ranks=places.ranks if several else (),
            reason="the others wait for it",
            signature=f"hang {suspects}",
            hard=is_stopped,
        )
        if lot < spinning:  # it shows life until its collective times out
            told = msgspec.structs.replace(alarm, stance=Stance.NOTIFY)
            return msgspec.structs.replace(self._timeout_sign(other), named=(named_s, told))
        return AlarmSign(after_s=named_s + (0.0 if is_stopped else limits.act_s), alarm=alarm)

    def _hash_sign(self, node: str, rng: Random) -> AlarmSign:
        """Return the alarm that the next comparison of state hashes raises. The job loses the steps made since the
        comparison before that one."""
        wait = rng.randint(1, self._every)
        reason = "has other parameters than its replicas"
        alarm = Alarm(
            kind=Kind.REPLICA, at=0.0, suspects=(node,), reason=reason, signature="replica parameters", hard=True
        )
        return AlarmSign(after_s=wait * self._step_s, alarm=alarm, stalls=False, back_steps=self._every)

    def _nan_sign(self, node: str) -> AlarmSign:
        alarm = Alarm(kind=Kind.LOSS, at=0.0, suspects=(node,), reason="the loss is not finite", signature="loss")
        return AlarmSign(after_s=self._step_s, alarm=alarm, stalls=False, back_steps=1)


def silence_alarm(*nodes: str) -> Alarm:
    reason = "has been silent for 3 s"
    return Alarm(kind=Kind.SILENCE, at=0.0, suspects=nodes, reason=reason, signature=f"silence {nodes[0]}")


def _unnamed_alarm() -> Alarm:
    return Alarm(kind=Kind.HANG, at=0.0, suspects=(), reason="the job stands, no rank is named", signature=UNNAMED)


def _oom_alarm(node: str) -> Alarm:
    return Alarm(
        kind=Kind.LINES,
        at=0.0,
        suspects=(node,),
        klass="host_oom_kill",
        group="framework",
        reason="lost a process to the kernel, for want of memory",
        signature="host_oom_kill",
    )


def _health_alarm(fault: FailureMode, node: str) -> Alarm:
    return Alarm(
        kind=Kind.HEALTH,
        at=0.0,
        suspects=(node,),
        klass=fault.klass,
        group="infrastructure",
        action="evict_and_restart",
        reason=f"reads as {fault.name}",
        signature=f"{fault.klass} {node}",
        hard=True,
    )
