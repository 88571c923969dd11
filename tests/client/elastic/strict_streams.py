"""Messages as NCCL carries them at its strictest, between threads that stand in for workers.

The groups of messages that a worker posts end one after the other. A message is only carried while both its ends are in
the oldest groups of their workers. If nothing can move any more, all who wait are told so."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch


class DeadlockError(Exception):
    pass


class Group:
    """Messages that one worker posted together: tensor, the other worker, whether it was carried."""

    def __init__(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        self.sends: list[list[Any]] = [[*one, False] for one in sends]
        self.receives: list[list[Any]] = [[*one, False] for one in receives]

    @property
    def is_over(self) -> bool:
        return all(carried for _, _, carried in (*self.sends, *self.receives))


class GroupWork:
    def __init__(self, streams: "StrictStreams", worker: int, group: Group) -> None:
        self._streams, self._worker, self._group = streams, worker, group

    def wait(self) -> None:
        self._streams.wait(self._worker, self._group)

    def is_completed(self) -> bool:
        return self._group.is_over


class StrictStreams:
    def __init__(self, workers: int) -> None:
        self._posted: list[deque[Group]] = [deque() for _ in range(workers)]
        self._moved = threading.Condition()
        self._awaited: dict[int, Group] = {}
        self._running, self._stuck = workers, False

    def run(self, work: Callable[[int], object]) -> None:
        """Call this for each worker, each in a thread of its own. Raise what one of them has raised."""
        raised: list[BaseException] = []

        def follow(worker: int) -> None:
            try:
                work(worker)
            except BaseException as e:
                raised.append(e)
            with self._moved:
                self._running -= 1
                self._look_for_deadlock()

        threads = [threading.Thread(target=follow, args=(worker,)) for worker in range(len(self._posted))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
        assert not any(self._posted), "messages are left"

    def post(
        self, worker: int, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[GroupWork]:
        group = Group(sends, receives)
        with self._moved:
            self._posted[worker].append(group)
            while self._carry_one():
                pass
            self._moved.notify_all()
        return [GroupWork(self, worker, group)]

    def wait(self, worker: int, group: Group) -> None:
        with self._moved:
            self._awaited[worker] = group
            self._look_for_deadlock()
            while not group.is_over:
                if self._stuck:
                    raise DeadlockError
                self._moved.wait()
            del self._awaited[worker]

    def _carry_one(self) -> bool:
        for worker, groups in enumerate(self._posted):
            for send in groups[0].sends if groups else ():
                tensor, to, carried = send
                other = self._posted[to][0].receives if self._posted[to] else []
                into = next((one for one in other if one[1] == worker and not one[2]), None)
                first = next(one for one in groups[0].sends if one[1] == to and not one[2]) if not carried else None
                if into is not None and first is send:
                    assert into[0].shape == tensor.shape and into[0].dtype == tensor.dtype
                    into[0].copy_(tensor)
                    send[2] = into[2] = True
                    return True
            if groups and groups[0].is_over:
                groups.popleft()
                return True
        return False

    def _look_for_deadlock(self) -> None:
        if self._running and len(self._awaited) == self._running:
            self._stuck = self._stuck or not any(group.is_over for group in self._awaited.values())
        self._moved.notify_all()
