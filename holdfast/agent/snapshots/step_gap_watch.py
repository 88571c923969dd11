"""Watches the ranks of this node for the gaps between their collectives, in memory that ranks and agent share."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from holdfast.agent.agent_clock import AgentClock
from holdfast.core.snapshots.gap_pacing import GapWindow, StepMoment, find_window
from holdfast.core.snapshots.network_look_orders import LookOrders
from holdfast.core.snapshots.step_network_profile import NetworkSample, StepGaps, StepNetworkProfile, shared_gaps
from holdfast.wire.rank_memory.slot_reader import SlotReading

_LOOK_S = 0.25  # how often looks are read; the ring of a rank has room for those of half a second
_FRESH_S = 0.001  # so long the slots need not be read again


class NetworkLooksOfRanks(Protocol):
    """The memory in which ranks tell of their steps, and of looks at their network, by the rank's number here."""

    def read_slots(self) -> list[tuple[int, SlotReading]]: ...
    def order_looks(self, local: int, wanted: int, spacing_s: float) -> None: ...
    def read_looks(self, local: int, after: int) -> tuple[int, list[NetworkSample]]: ...


class UnwatchedRanks:
    """Stands where no ranks can be watched: nothing is known of their network."""

    def read_slots(self) -> list[tuple[int, SlotReading]]:
        return []

    def order_looks(self, local: int, wanted: int, spacing_s: float) -> None:
        pass

    def read_looks(self, local: int, after: int) -> tuple[int, list[NetworkSample]]:
        return after, []


class _WatchedRank:
    def __init__(self) -> None:
        self.profile, self.orders = StepNetworkProfile(), LookOrders()
        self.gaps = self.profile.read()
        self.newest = 0  # number of the newest look
        self.ordered = 0  # looks, in all


class StepGapWatch:
    def __init__(self, ranks: NetworkLooksOfRanks, clock: AgentClock, is_wanted: Callable[[], bool]) -> None:
        self._ranks, self._clock, self._is_wanted = ranks, clock, is_wanted
        self._generation = self._count = 0
        self._watched: dict[int, _WatchedRank] = {}
        self._begins: dict[int, float] = {}
        self._read_at = 0.0

    def begin_generation(self, generation: int, ranks: int) -> None:
        self._generation, self._count = generation, ranks
        self._watched = {}

    async def run(self) -> None:
        while True:
            if self._is_wanted():
                self._watch_ranks()
            await asyncio.sleep(_LOOK_S)

    def _watch_ranks(self) -> None:
        now = self._clock.monotonic()
        for local, slot in self._ranks.read_slots():
            if slot.generation != self._generation or slot.step < 0:
                continue
            rank = self._watched.get(local)
            if rank is None:
                rank = self._watched[local] = _WatchedRank()
                rank.newest, _ = self._ranks.read_looks(local, 0)  # those that an agent before this one has ordered
                rank.ordered = rank.newest
            rank.newest, looks = self._ranks.read_looks(local, rank.newest)
            if looks:
                rank.profile.add_samples(looks)
                rank.gaps = rank.profile.read()
                rank.orders.note_looks(len(looks))
            steps, made_s = slot.step - slot.first_step, slot.at - slot.first_at
            if order := rank.orders.next_order(now, rank.profile.count, steps, made_s):
                rank.ordered = rank.newest + order.count
                self._ranks.order_looks(local, rank.ordered, order.spacing_s)

    def read_gaps(self) -> StepGaps:
        """Return the gaps that all ranks of this node share, or why none are known."""
        if not self._count or len(self._watched) < self._count:
            return StepGaps(why="not every rank's network has been watched yet")
        return shared_gaps([rank.gaps for rank in list(self._watched.values())])

    def find_window(self, now: float) -> GapWindow:
        """Return until when a gap of all ranks is open, or when to look again. For any thread."""
        if now - self._read_at > _FRESH_S:
            slots = self._ranks.read_slots()
            self._begins = {local: slot.at for local, slot in slots if slot.generation == self._generation}
            self._read_at = now
        known = [(self._begins.get(local), rank.gaps) for local, rank in list(self._watched.items())]
        return find_window(now, [StepMoment(at, gaps) for at, gaps in known if at is not None and not gaps.why])
