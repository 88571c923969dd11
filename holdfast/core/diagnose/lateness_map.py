"""A map of slow ranks with one character per rank: how much longer the rank takes between collectives than the median
rank.

All ranks leave a collective together. So a rank that comes later to the next one has taken longer in between.
"""

from collections.abc import Mapping
from string import ascii_letters, digits

_SIGNS = ascii_letters + digits  # for -11 to 50 percent of the time
_LEAST, _MOST = -11, 50
_UNKNOWN = "."
_NEW = 0.3  # the weight of the newest round; a few rounds make the map, so that noise does not


class LatenessMap:
    """Averages the rounds of the slow detector."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}

    def add_round(self, shares: Mapping[int, float]) -> None:
        """Add a round to the averages. `shares` says for each rank how much later it arrived than the median rank,
        divided by the time of a round. A rank that arrived earlier has a negative share."""
        known = self._shares
        known.update({rank: share + (1 - _NEW) * (known.get(rank, share) - share) for rank, share in shares.items()})

    def encode(self, ranks: int) -> str:
        """Return a string with one character for each of `ranks` ranks; empty if nothing is known about any rank."""
        signs = (self._sign_of(rank) for rank in range(ranks))
        return "".join(signs) if self._shares else ""

    def _sign_of(self, rank: int) -> str:
        share = self._shares.get(rank)
        return _UNKNOWN if share is None else _SIGNS[min(max(round(100 * share), _LEAST), _MOST) - _LEAST]
