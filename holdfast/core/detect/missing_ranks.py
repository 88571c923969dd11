"""deserted: a node that should have ranks of the running generation, and has none.

Whatever the books say: their end was told to nobody, or to somebody who has lost it. Refuses to judge before the launch
is over, of nodes whose ranks have ended well, and for a moment in which the news of an end may be on its way.
"""

from holdfast.model.alarm import Alarm, Kind
from holdfast.model.signal import Beat

_NEWS_S = 10.0  # an end is told within this, or by nobody


class MissingRanksDetector:
    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def on_beat(self, now: float, generation: int, beat: Beat) -> Alarm | None:
        """A beat of a node whose launch of this generation is known to be over; each is named once."""
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
