"""Silence detector: raises an alarm when a node has sent nothing for too long.

A controller that is short of CPU, or on a suspended laptop, may not call the detector for a while. Beats may then wait
unread. So a gap between two calls does not count as silence: the detector adds the gap to each node's allowed time.
"""

from collections.abc import Collection

import msgspec

from holdfast.model.detector_alarm import AGENT_LOST, LEFT, MACHINE_LOST, Alarm, Kind, Stance
from holdfast.model.fleet_node_reports import FleetNode
from holdfast.model.observation import Departure


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    beat_s: float = 1.0  # how often an agent speaks
    silence_s: float = 3.0  # this long without a word is an alarm


def departure_alarm(departure: Departure) -> Alarm:
    """Return the alarm for a node that left because it had no controller. The note that it left raises the alarm
    earlier than its silence would."""
    reason = f"left by itself: {departure.reason}"
    return Alarm(kind=Kind.SILENCE, at=departure.at, suspects=(departure.node,), reason=reason, signature=LEFT)


def gone_alarm(at: float, node: str, seen: FleetNode) -> Alarm:
    """Return the alarm for a node that its fleet reports as gone. It is proof if the node's machine failed."""
    what = "has lost its machine" if seen.failed else "is gone"
    reason = f"{what}, says its fleet{f' ({seen.reason})' if seen.reason else ''}"
    signature = MACHINE_LOST if seen.failed else f"gone {node}"
    return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason=reason, signature=signature)


def lost_agent_alarm(at: float, node: str, how: str, *, has_ranks: bool) -> Alarm:
    """Return the alarm that a node's agent ended without having been told to, and that another one does its work. It
    is only reported: a node goes on without its agent for a moment."""
    return Alarm(
        kind=Kind.HEALTH,
        at=at,
        suspects=(node,),
        reason=f"{how}; another one has its place{', and the ranks went on' if has_ranks else ''}",
        signature=AGENT_LOST,
        stance=Stance.NOTIFY,
    )


class SilenceDetector:
    def __init__(self, limits: SilenceLimits) -> None:
        self.limits = limits
        self._heard_at: dict[str, float] = {}
        self._asked_at: float | None = None

    def on_message(self, now: float, node: str) -> None:
        self._heard_at[node] = now

    @property
    def watched_nodes(self) -> Collection[str]:
        """Return the nodes that were heard of and do not count as silent."""
        return self._heard_at.keys()

    def heard_at(self, node: str) -> float | None:
        return self._heard_at.get(node)

    def forget_node(self, node: str) -> None:
        self._heard_at.pop(node, None)

    def overdue_alarms(self, now: float) -> tuple[Alarm, ...]:
        """Return alarms for nodes that became silent; each node is reported once. Call this several times per beat,
        because a long gap between calls is not counted as silence."""
        asked_at, self._asked_at = self._asked_at, now
        if asked_at is not None and now - asked_at > self.limits.beat_s:
            for node, at in self._heard_at.items():
                self._heard_at[node] = min(at + now - asked_at, max(at, now))
            return ()
        silent = [n for n, at in self._heard_at.items() if now >= at + self.limits.silence_s]
        return tuple(self._make_alarm(node) for node in sorted(silent))

    def _make_alarm(self, node: str) -> Alarm:
        at = self._heard_at.pop(node)
        reason = f"has been silent for {self.limits.silence_s:g} s"
        return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason=reason, signature=f"silence {node}")
