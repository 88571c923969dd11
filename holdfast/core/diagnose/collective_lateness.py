"""Measures how late the ranks of one group arrive at collectives, when only some collectives are reported."""

from statistics import median

_OPEN = 512  # collectives that are waited for


class CollectiveLateness:
    """Sums up the lateness of each rank of one group since the round began."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.sums: dict[int, float] = {}
        self.count = 0
        self.first = self.last = (0, 0.0)  # collectives of the round: number, when the latest came
        self._open: dict[int, dict[int, float]] = {}
        self._judged = 0  # newest

    def on_arrival(self, rank: int, seq: int, at: float) -> None:
        """Record that a rank arrived at a collective. Arrivals may be repeated and out of order."""
        if rank not in self.ranks:  # whoever was judged without it was judged too soon
            self.ranks.add(rank)
            self._begin_round()
        if seq <= self._judged and seq not in self._open:
            return
        came = self._open.setdefault(seq, {})
        came[rank] = at
        if len(came) == len(self.ranks) > 1:
            self._add_collective(seq, self._open.pop(seq))
        while len(self._open) > _OPEN:
            del self._open[next(iter(self._open))]

    def _add_collective(self, seq: int, came: dict[int, float]) -> None:
        usual = median(came.values())
        for rank, at in came.items():
            self.sums[rank] = self.sums.get(rank, 0.0) + at - usual
        self.count += 1
        self._judged = max(self._judged, seq)
        here = (seq, max(came.values()))
        self.first, self.last = min(self.first, here) if self.first[0] else here, max(self.last, here)

    def take_shares(self) -> dict[int, float]:
        """Return for each rank the part of the round in which the others waited for it; then start a new round."""
        (first, began), (last, ended) = self.first, self.last
        rate = (last - first) / (ended - began) if ended > began else 0.0  # only some of them are told of
        found = {rank: total / self.count * rate for rank, total in self.sums.items()}
        self._begin_round()
        return found

    def _begin_round(self) -> None:
        self.sums, self.count, self.first = {}, 0, self.last
