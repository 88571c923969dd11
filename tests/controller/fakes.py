"""A fleet, a store, a list of blocked hosts and notes that do what they are told, and remember it."""

import asyncio
from collections.abc import Collection
from concurrent.futures import Future

from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.core.decide.decider import Decider
from holdfast.core.membership.host_blocking import BlockedHost, BlockLimits
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure


class FakeFleet:
    survey_s = 0.0  # a test that surveys sets another

    def __init__(self, *nodes: str, can_acquire: bool = True) -> None:
        self.can_acquire = can_acquire
        self.here = list(nodes)
        self.released: list[tuple[str, str]] = []
        self.error: OSError | None = None
        self.departed: tuple[Departure, ...] = ()
        self.avoided: tuple[str, ...] = ()  # nodes that were being evicted at the last acquisition
        self.seen: dict[str, FleetNode] = {}  # what a survey tells of nodes; the others are up
        self.surveys = 0
        self.survey_error: OSError | None = None

    def departures(self) -> tuple[Departure, ...]:
        return self.departed

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        if self.error:
            raise self.error
        self.avoided = tuple(evicted)
        names = tuple(f"new{len(self.here) + n}" for n in range(count))
        self.here += names
        return names

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        self.released.append((node, reason))
        if node in self.here:
            self.here.remove(node)

    async def survey(self) -> dict[str, FleetNode]:
        self.surveys += 1
        if self.survey_error:
            raise self.survey_error
        up = FleetNode(state=FleetState.UP)
        return {node: self.seen.get(node, up) for node in self.here}

    def nodes(self) -> tuple[str, ...]:
        return tuple(self.here)


def admission_of(blocked: "MemoryBlockList") -> HostAdmission:
    return HostAdmission(blocked, BlockLimits(), Decider().view, now=lambda: 1.0, say=print)


class MemoryBlockList:
    flag = ""

    def __init__(self, *entries: BlockedHost) -> None:
        self.entries = entries
        self.error: OSError | None = None
        self.waiting: Future[tuple[BlockedHost, ...] | OSError] | None = None  # set: reads get it, and wait

    def read_entries(self) -> Future[tuple[BlockedHost, ...] | OSError]:
        if self.waiting:
            return self.waiting
        found: Future[tuple[BlockedHost, ...] | OSError] = Future()
        found.set_result(self.error or self.entries)
        return found

    def add_entry(self, entry: BlockedHost) -> Future[OSError | None]:
        self.entries = self.entries if self.error else (*self.entries, entry)
        done: Future[OSError | None] = Future()
        done.set_result(self.error)
        return done


class FakeStore:
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.over = False
        self.error: Exception | None = None

    async def open(self, generation: int) -> int:
        if self.error:
            raise self.error
        self.opened.append(generation)
        return 7000 + generation

    async def quit(self) -> None:
        self.over = True


class MemoryNotes:
    """Notes that are lost with their controller, unless its successor gets them too."""

    def __init__(self) -> None:
        self._all: dict[str, bytes] = {}

    def put_note(self, name: str, content: bytes) -> None:
        self._all[name] = content

    def get_note(self, name: str) -> bytes:
        return self._all.get(name, b"")
