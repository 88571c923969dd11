"""A model of how failures show to the detectors: which alarm is raised, after what delay, and which node it names."""

from random import Random

import msgspec

from holdfast.core.detect.crash import alarm_of
from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.replica import ReplicaLimits
from holdfast.core.detect.slow import EARLY, HABIT, SlowLimits
from holdfast.core.diagnose.suspectless_hang_timeout import SETTLED_S, affordable_wait_s
from holdfast.core.incident.incident_case import CODE
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.model.detector_alarm import GPU_HANG, UNNAMED, Alarm, Kind, Stance
from holdfast.model.observation import Exit
from holdfast.sim.scale.failure_mixes import FailureMode
from holdfast.sim.scale.node_defects import NodeDefect, draw_wide_lot
from holdfast.sim.scale.node_neighbours import FailurePlace
from holdfast.sim.scale.price_sheet import PriceDraws

_TIMED_OUT = (
    "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91, OpType=ALLREDUCE) ran for 600000"
    " milliseconds before timing out."
)

# Kinds of the hangs in which a process is named; the rest may wait for something outside the job.
_NAMED_KINDS = ("hang_spinning", "hang_stopped", "hang_asleep", "hang_endless")
_UNNAMED, _GPU, _SPINNING, _OUTSIDE = "hang_unnamed", "hang_gpu", "hang_spinning", "outside"


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
                wide_lot = defect.wide_lot if defect else draw_wide_lot(lot)
                return self._hang_sign(places, lot, wide_lot, machine=defect is not None)
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

    def _hang_sign(self, places: FailurePlace, lot: float, wide_lot: float, *, machine: bool) -> AlarmSign:
        """Draw the alarm for a hang. It names a rank, or it is a timeout, or it names no node. `machine`: a machine is
        the cause, and not the code."""
        if "hang" in self._off:
            return self._timeout_sign(places.other)
        kind = _UNNAMED if "naming" in self._off else self._hang_kind(lot, machine=machine)
        named_s = max(self._hang.least_s, self._hang.steps * self._step_s) + self._prices("look")
        if kind == _UNNAMED:
            return AlarmSign(after_s=named_s + self._hang.act_s, alarm=_unnamed_alarm())
        # Where ranks of several nodes keep the others waiting, all of their pipeline is under suspicion.
        several = wide_lot < self._prices.share_value("hang_group") and len(places.ranks) > 1
        alarm = _named_alarm(kind, places, several=several)
        if kind == _SPINNING:  # it shows life until its collective times out
            told = msgspec.structs.replace(alarm, stance=Stance.NOTIFY)
            return msgspec.structs.replace(self._timeout_sign(places.other), named=(named_s, told))
        return AlarmSign(after_s=named_s + self._patience_s(kind, named_s), alarm=alarm)

    def _hang_kind(self, lot: float, *, machine: bool) -> str:
        """Return which kind of hang this lot draws. No machine makes a deadlock."""
        unnamed = self._prices.share_value(_UNNAMED)
        if lot < unnamed:
            return _GPU if lot < unnamed * self._prices.share_value(_GPU) else _UNNAMED
        kinds = _NAMED_KINDS[:-1] if machine else _NAMED_KINDS
        all_s = 1.0 - (self._prices.share_value(_NAMED_KINDS[-1]) if machine else 0.0)
        left = (lot - unnamed) / (1 - unnamed) * all_s
        for kind in kinds:
            left -= self._prices.share_value(kind)
            if left < 0:
                return kind
        return _OUTSIDE

    def _patience_s(self, kind: str, named_s: float) -> float:
        """Return how long the detector waits after it has named a rank, by its own rules: until waiting has cost a
        restart, if the rank may wake or its GPU stands; for `act_s`, if it may wait for something outside."""
        limits = self._hang
        if kind == "hang_stopped":
            return 0.0
        if kind == "hang_endless":
            return limits.again_s
        if kind == _OUTSIDE or "snapshots" in self._off:  # then a restart costs all steps since a checkpoint
            return limits.act_s
        restart_s = self._prices.mean_price("fork", "own_state", "first_step")
        wait_s = affordable_wait_s(restart_s, 0.0, min(SETTLED_S, limits.act_s), limits.act_s)
        return max(limits.again_s, wait_s - named_s) if kind == _GPU else wait_s  # a GPU stands since the last step

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


def _named_alarm(kind: str, places: FailurePlace, *, several: bool) -> Alarm:
    suspects = places.group if several else (places.node,)
    alarm = Alarm(
        kind=Kind.HANG,
        at=0.0,
        suspects=suspects,
        ranks=places.ranks if several else (),
        reason="the others wait for it",
        signature=f"{GPU_HANG if kind == _GPU else 'hang'} {suspects}",
        hard=kind in ("hang_stopped", _GPU),
    )
    return msgspec.structs.replace(alarm, action=CODE, confidence=1.0) if kind == "hang_endless" else alarm


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
