"""silence: a node has said nothing for too long.

Refuses to judge while its own clock stood still: if it was not asked for a while (a controller short of CPU, a
stopped laptop), the gap is given back to every node, for their beats may be waiting unread.
"""

import msgspec

from holdfast.model.alarm import Alarm, Kind


class SilenceLimits(msgspec.Struct, frozen=True, kw_only=True):
    beat_s: float = 1.0  # how often an agent speaks
    silence_s: float = 3.0  # this long without a word is an alarm


class SilenceDetector:
    def __init__(self, limits: SilenceLimits) -> None:
        self.limits = limits
        self._heard_at: dict[str, float] = {}
        self._asked_at: float | None = None

    def on_message(self, now: float, node: str) -> None:
        self._heard_at[node] = now

    def forget_node(self, node: str) -> None:
        self._heard_at.pop(node, None)

    def overdue_alarms(self, now: float) -> tuple[Alarm, ...]:
        """Alarms for nodes that became silent; each is named once. To be asked several times per beat."""
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
