"""A queue of callers, ordered by arrival and by host, in which no host can crowd out the others."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class CallerQueue(Generic[T]):
    """Waiting callers, or their tasks, by arrival and host; all operations take constant time, even in a flood."""

    def __init__(self) -> None:
        self._all: OrderedDict[T, tuple[str, float]] = OrderedDict()  # host and since when, the oldest first
        self._hosts: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()  # the one whose turn is next first

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[T]:
        return iter(self._all)

    def add(self, one: T, host: str, now: float) -> None:
        self._all[one] = (host, now)
        self._hosts.setdefault(host, OrderedDict())[one] = None

    def remove(self, one: T) -> None:
        """Remove a caller; do nothing if the caller has already left."""
        if (found := self._all.pop(one, None)) is None:
            return
        theirs = self._hosts[found[0]]
        del theirs[one]
        if not theirs:
            del self._hosts[found[0]]

    def host_of(self, one: T) -> str | None:
        return self._all[one][0] if one in self._all else None

    def count(self, host: str) -> int:
        return len(self._hosts.get(host, ()))

    def oldest(self, host: str | None = None) -> tuple[T, float]:
        """Return the caller that has been queued longest, of `host` or of all, and the time when it came."""
        one = next(iter(self._all if host is None else self._hosts[host]))
        return one, self._all[one][1]

    def crowded_out(self, newcomer: str) -> T:
        """Return the queued caller that must make room for a new caller from the host `newcomer`. This is the oldest
        caller. But if `newcomer` has more callers in the queue than that caller's host, it is the oldest from
        `newcomer`."""
        oldest, _ = self.oldest()
        greedy = self.count(self._all[oldest][0]) < self.count(newcomer)
        return self.oldest(newcomer)[0] if greedy else oldest

    def take_turn(self, may: Callable[[str], bool]) -> tuple[T, str] | None:
        """Take a caller out of the queue; return it and its host. Hosts for which `may` returns true take turns, and
        the oldest caller of a host comes first. Return None if there is no such host."""
        host = next(filter(may, self._hosts), None)
        if host is None:
            return None
        one, _ = self.oldest(host)
        self._hosts.move_to_end(host)
        self.remove(one)
        return one, host
