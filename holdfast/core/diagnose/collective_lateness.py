"""Measures how late the ranks of one group arrive at collectives, when only some collectives are reported.

If all ranks report how long a collective held their GPUs, the GPUs are compared. All GPUs leave a collective together.
So the GPU that waited for the shortest time came last, and no clocks need to agree. Otherwise the module compares the
times at which the processes entered the collective.
"""

from statistics import median

_OPEN = 512  # collectives that are waited for


class CollectiveLateness:
    """Sums up the lateness of each rank of one group since the round began."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.sums: dict[int, float] = {}
        self.count = 0
        self.first = self.last = (0, 0.0)  # collectives of the round: number, when the latest came
        self.longest_s: dict[int, float] = {}  # the longest single wait of the round for a rank's GPU
        self._open: dict[int, dict[int, tuple[float, float | None]]] = {}
        self._judged = 0  # newest

    def on_arrival(self, rank: int, seq: int, at: float, held_s: float | None = None) -> None:
        """Record that a rank arrived at a collective. Arrivals may be repeated and out of order."""
        if rank not in self.ranks:  # whoever was judged without it was judged too soon
            self.ranks.add(rank)
            self._begin_round()
        if seq <= self._judged and seq not in self._open:
            return
        came = self._open.setdefault(seq, {})
        came[rank] = (at, held_s)
        if len(came) == len(self.ranks) > 1:
            self._add_collective(seq, self._open.pop(seq))
        while len(self._open) > _OPEN:
            del self._open[next(iter(self._open))]

    def _add_collective(self, seq: int, came: dict[int, tuple[float, float | None]]) -> None:
        entered = {rank: at for rank, (at, _) in came.items()}
        on_gpus = {rank: -held_s for rank, (_, held_s) in came.items() if held_s is not None}
        compares_gpus = len(on_gpus) == len(came)
        late = on_gpus if compares_gpus else entered
        usual = median(late.values())
        for rank, at in late.items():
            self.sums[rank] = self.sums.get(rank, 0.0) + at - usual
            if compares_gpus:
                self.longest_s[rank] = max(self.longest_s.get(rank, 0.0), at - usual)
        self.count += 1
        self._judged = max(self._judged, seq)
        here = (seq, max(entered.values()))
        self.first, self.last = min(self.first, here) if self.first[0] else here, max(self.last, here)

    def take_shares(self) -> dict[int, float]:
        """Return for each rank for what share of the round other ranks waited for it. Start a new round."""
        (first, began), (last, ended) = self.first, self.last
        rate = (last - first) / (ended - began) if ended > began else 0.0  # only some of them are told of
        found = {rank: total / self.count * rate for rank, total in self.sums.items()}
        self._begin_round()
        return found

    def _begin_round(self) -> None:
        self.sums, self.longest_s, self.count, self.first = {}, {}, 0, self.last
