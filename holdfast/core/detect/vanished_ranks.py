"""Vanished-ranks detector: finds a node that should run ranks of the current generation but has none.

The ranks ended without a report, or the report was lost. The detector does not judge before the launch is over, and
ignores nodes whose ranks have ended well. It waits for some seconds, since the report may still be on its way.
"""

from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.observation import Beat

_NEWS_S = 10.0  # an end is told within this, or by nobody


class MissingRanksDetector:
    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def on_beat(self, now: float, generation: int, beat: Beat) -> Alarm | None:
        """Return an alarm if this node has had no ranks for too long; each node is reported once per generation. Call
        only after the node's launch of this generation is over."""
        self._since = {key: at for key, at in self._since.items() if key[0] == generation}
        key = (generation, beat.node)
        if beat.generation != generation or beat.running != 0:
            self._since.pop(key, None)
            return None
        at = self._since.setdefault(key, now)
        if now < at + _NEWS_S:
            return None
        self._since[key] = float("inf")
        return Alarm(
            kind=Kind.CRASH,
            at=at,
            suspects=(beat.node,),
            generation=generation,
            reason="has no rank any more, and nobody has told how they ended",
            signature=f"deserted {beat.node}",
        )
