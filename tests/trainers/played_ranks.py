"""Ranks that are threads of one process, and libraries that are not installed, as far as ours asks them."""

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
_PATIENCE_S = 30.0


class PlayedRanks:
    """Runs a function once for each rank. Collectives take place when all ranks have entered one of the same name; if
    they enter different ones, where real ranks would wait for one another, all of them raise."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mine = threading.local()
        self._entered: list[tuple[str, Any]] = [("", None)] * size
        self._barrier = threading.Barrier(size, timeout=_PATIENCE_S)

    @property
    def rank(self) -> int:
        return int(self._mine.rank)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return what each rank returns; raise what one of them raises."""
        returned: dict[int, T] = {}
        raised: list[BaseException] = []

        def run_rank(rank: int) -> None:
            self._mine.rank = rank
            try:
                returned[rank] = work(rank)
            except BaseException as e:
                if not isinstance(e, threading.BrokenBarrierError):
                    raised.append(e)
                self._barrier.abort()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
        return [returned[rank] for rank in range(self.size)]

    def meet(self, collective: str, value: T) -> list[T]:
        """Take part in a collective; return the values of all ranks."""
        self._entered[self.rank] = collective, value
        self._barrier.wait()
        entered = list(self._entered)
        self._barrier.wait()
        assert len({name for name, _ in entered}) == 1, f"ranks are in different collectives: {entered}"
        return [value for _, value in entered]

    def gather_all(self, value: T, kind: type[T]) -> list[T]:
        return self.meet("gather_all", value)


def import_beside(monkeypatch: pytest.MonkeyPatch, name: str, library: dict[str, dict[str, Any]]) -> ModuleType:
    """Import our module `name` anew, beside a played library: what each of its modules holds, by their names."""
    played: dict[str, ModuleType] = {}
    for path, held in library.items():
        parts = path.split(".")
        for outer in (".".join(parts[: n + 1]) for n in range(len(parts))):
            played.setdefault(outer, ModuleType(outer))
        vars(played[path]).update(held)
    for path, module in played.items():
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that what was there is there again after the test
    del sys.modules[name]
    return import_module(name)
