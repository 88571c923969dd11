"""Measures for how long the ranks of a job have been still."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.diagnose.rank_motion import RankMotion, find_motion
from holdfast.model.rank_traces import Trace

_STILL_CPU = 0.02  # of a core: what threads that only wait use up
STILL_BYTES = 4096


class Stillness:
    """Measures from successive traces how long each rank has been still: no CPU time, new frame, collective or I/O."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._quiet: dict[int, float] = {}  # the same, if processor time is no sign of life
        self._asleep: dict[int, float] = {}  # the same, if a wait for something outside is a sign of life, too
        self._outside: Collection[int] = ()  # ranks that may have waited for something outside at the last look
        self._last: tuple[float, tuple[Trace, ...]] = (0.0, ())
        self.before_at = 0.0  # when all ranks were looked at before the last time

    def on_traces(self, now: float, traces: Sequence[Trace], outside: Collection[int] = ()) -> dict[int, RankMotion]:
        """Record one inspection of all ranks. Return what each rank did since the previous one. `outside` are the ranks
        that may wait for something outside the job."""
        (last_at, last), self._last = self._last, (now, tuple(traces))
        self.before_at = last_at
        waited, self._outside = {*self._outside, *outside}, outside  # at the beginning or the end of this time
        motions = find_motion(last, traces)
        for rank, motion in motions.items():
            used = motion.cpu_s > _STILL_CPU * max(now - last_at, 0.1)
            moved = motion.frames or motion.collectives > 0 or motion.io_bytes > STILL_BYTES
            awake = used or moved or rank in waited
            for since, lives in ((self._since, used or moved), (self._quiet, moved), (self._asleep, awake)):
                if lives:
                    since.pop(rank, None)
                else:
                    since.setdefault(rank, last_at)
        return motions

    def begin(self) -> None:
        """Forget how long ranks have been still, so that stillness counts from now on."""
        for since in (self._since, self._quiet, self._asleep):
            since.clear()

    def still_s(self, now: float, ranks: Iterable[int]) -> float:
        """Return for how many seconds all of these ranks have been still; 0 if one of them has just moved."""
        return _least_s(now, self._since, ranks)

    def quiet_s(self, now: float, ranks: Iterable[int]) -> float:
        """Return for how many seconds these ranks had no new frame, collective or I/O; CPU time does not count."""
        return _least_s(now, self._quiet, ranks)

    def asleep_s(self, now: float, ranks: Iterable[int]) -> float:
        """Return for how many seconds these ranks have been still and have waited for nothing outside the job."""
        return _least_s(now, self._asleep, ranks)

    def most_quiet_s(self, now: float, ranks: Iterable[int]) -> float:
        """Return for how many seconds at least half of these ranks have been quiet, as in `quiet_s`. Half is enough,
        because a single rank may still write its log."""
        quiet = sorted(now - self._quiet.get(rank, now) for rank in ranks)
        return quiet[len(quiet) // 2] if quiet else 0.0


def _least_s(now: float, since: Mapping[int, float], ranks: Iterable[int]) -> float:
    return min(now - since.get(rank, now) for rank in ranks)
