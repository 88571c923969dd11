"""Reboot detector: finds a node that answers but does not know the generation that was launched on it.

The node's machine restarted without an alarm: it was back before it counted as silent, or no controller ran. Its ranks
are gone, and no process is left to report their end. The detector does not judge before the launch is over.
"""

from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.observation import Beat


class RebootDetector:
    def __init__(self) -> None:
        self._told: set[tuple[int, str]] = set()

    def on_beat(self, now: float, generation: int, beat: Beat) -> Alarm | None:
        """Return an alarm if this beat shows an older generation: the node has restarted and lost its ranks. Call
        only after the launch is over. Each node is reported once per generation."""
        if beat.generation >= generation or (generation, beat.node) in self._told:
            return None
        self._told = {told for told in self._told if told[0] == generation} | {(generation, beat.node)}
        return Alarm(
            kind=Kind.CRASH,
            at=now,
            suspects=(beat.node,),
            generation=generation,
            reason="was started anew, and its ranks are gone",
            signature=f"reborn {beat.node}",
        )
