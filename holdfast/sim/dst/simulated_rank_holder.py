"""The holder of a simulated machine as one agent sees it: it starts and ends ranks, and reports ranks that ended."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from holdfast.model.node_errands import LaunchHere, Parking
from holdfast.model.observation import Mark, StepValues
from holdfast.sim.dst.failpoints import FaultChances
from holdfast.sim.dst.simulated_machine import SimMachine, SimRank
from holdfast.wire.agent_messages import JobFigures
from holdfast.wire.holder_messages import HolderListing, HolderRank, KeptArena, RankEnded, RankKey, ZygoteWarmed
from holdfast.wire.rank_memory.slot_reader import SlotReading

_UNKILLABLE_S = 10.0
_UNWINDS = 0.8  # part of the ranks that can leave a broken generation in time


class SimSlots:
    """The progress slots of a machine's ranks."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine

    def read_slots(self) -> list[tuple[int, SlotReading]]:
        return [(index, held.read_slot()) for index, held in enumerate(self._machine.held.values())]

    def read_entries(self, index: int, reading: SlotReading, after: int) -> tuple[int, list[StepValues | Mark]]:
        return after, []


class SimHolder:
    """One agent's link to the holder; messages from the holder wait here until the agent reads them."""

    def __init__(
        self,
        machine: SimMachine,
        chances: FaultChances,
        check_alive: Callable[[], None],
        on_rank_exit: Callable[[HolderRank], None],
    ) -> None:
        self._machine = machine
        self._scene = machine.scene
        self._chances = chances
        self._check_alive = check_alive
        self._on_rank_exit = on_rank_exit
        self._stopped = 0  # ranks of generations up to this one may not start any more
        self.kept = 0  # ranks that went on in their processes at the newest launch
        self._sent: asyncio.Queue[HolderListing | RankEnded | ZygoteWarmed] = asyncio.Queue()
        self.held: dict[RankKey, HolderRank] = {}
        self.arenas: tuple[KeptArena, ...] = ()
        self.slots = SimSlots(self._machine)
        self.warm = asyncio.Event()
        self.cold = ""
        ranks = tuple(held.describe_rank() for held in self._machine.held.values())
        arenas = tuple(self._machine.memory.kept.values())
        self.send_agent(HolderListing(ranks=ranks, arena="", arenas=arenas, warm=self._machine.warm))

    def send_agent(self, message: HolderListing | RankEnded | ZygoteWarmed) -> None:
        """Queue a message for the agent; called by the machine."""
        self._sent.put_nowait(message)

    async def listen(self, listed: asyncio.Event) -> None:
        while True:
            match await self._sent.get():
                case HolderListing(ranks=ranks, arenas=arenas, warm=warm):
                    self.arenas = arenas
                    self.held = {rank.rank_key: rank for rank in ranks}
                    if warm:
                        self.warm.set()
                    listed.set()
                case RankEnded(rank=rank):
                    self.held[rank.rank_key] = rank
                    self._on_rank_exit(rank)
                case ZygoteWarmed():
                    self.warm.set()
            self._sent.task_done()

    async def make_arena(self, name: str, size_bytes: int) -> str:
        self._check_alive()
        return self._machine.memory.make_arena(name, size_bytes)

    async def launch_ranks(self, errand: LaunchHere) -> str:
        self._check_alive()
        self._machine.forget_ranks(errand.generation)
        self.held = {k: r for k, r in self.held.items() if r.code is None or k.generation >= errand.generation}
        kept = [held.rank for held in self._find_parked() if errand.keep and errand.seat.has_rank(held.rank)]
        self._end_parked(kept)
        error = self._chances.launch_error()
        await asyncio.sleep(self._chances.launch_delay_s())
        for local in range(errand.seat.nproc - bool(error)):
            await asyncio.sleep(self._scene.rng.uniform(0.01, 0.3))
            self._check_alive()
            key = RankKey(errand.generation, errand.seat.first_rank + local)
            if errand.generation <= self._stopped:
                error = error or "it was told to stop before it had started"
            elif key not in self.held:  # or an earlier agent got this far with the same errand
                self.held[key] = self._start_rank(errand, key).describe_rank()
        return error

    def _start_rank(self, errand: LaunchHere, key: RankKey) -> SimRank:
        old = next((held for held in self._find_parked() if held.rank == key.rank), None)
        if old is None:
            return self._machine.start_rank(errand, key)
        del self.held[RankKey(old.generation, old.rank)]
        self.kept += 1
        return self._machine.rejoin_rank(old, key)

    def _find_parked(self) -> list[SimRank]:
        return [held for held in self._machine.running_ranks() if held.parked]

    async def end_parked(self) -> None:
        self._check_alive()
        self._end_parked(())

    def _end_parked(self, but: Collection[int]) -> None:
        for held in self._find_parked():
            if held.rank not in but:
                held.parked = False
                self._machine.end_rank(held, -9)

    def _park_ranks(self, up_to: int) -> None:
        """Park the healthy ranks of this and older generations, except some, at random, that do not park in time."""
        for held in self._machine.running_ranks(up_to):
            if held.is_healthy and self._scene.rng.random() < _UNWINDS:
                self._machine.park_rank(held)

    async def stop_ranks(self, up_to: int, grace_s: float, parking: Parking | None = None) -> str:
        self._stopped, self.kept = max(self._stopped, up_to), 0
        if parking is not None:
            await asyncio.sleep(self._scene.rng.uniform(0.0, parking.park_s))
            self._check_alive()
            self._park_ranks(up_to)
        else:
            for held in self._find_parked():
                held.parked = False
        until = self._machine.clock.monotonic() + _UNKILLABLE_S
        await asyncio.sleep(0.02 + self._scene.rng.random() * min(1.0, grace_s + 0.1))
        left = self._kill_ranks(up_to)
        while left and self._machine.clock.monotonic() < until:
            await asyncio.sleep(1.0)
            left = self._kill_ranks(up_to)
        await self._sent.join()  # the ends of ranks are heard before the stop is done
        return f"{left} ranks do not die" if left else ""

    def _kill_ranks(self, up_to: int) -> int:
        """Kill ranks of generations up to `up_to`. Return how many still live, because they cannot be killed."""
        self._check_alive()
        left = [held for held in self._machine.running_ranks(up_to) if not held.parked]
        for held in left:
            held.killed = True
            if not held.unkillable:
                self._machine.end_rank(held, -15)
        return sum(held.code is None for held in left)

    def quit_holder(self, code: int) -> None:
        self._check_alive()
        self._machine.end_holder()

    proven_imports: tuple[str, ...] = ()

    def learn_imports(self, trains: bool) -> None:
        pass

    def keep_spares(self, trains: bool) -> None:
        pass

    def hear_imports(self, modules: tuple[str, ...]) -> None:
        pass

    def read_notes(self) -> dict[str, Any]:
        ranks = max((held.world for held in self._machine.held.values()), default=0)
        told = self._scene.setup.reports_mesh and ranks and not ranks % 2
        return {"mesh": (("pp", 2), ("dp", ranks // 2)) if told else ()}

    def read_loss_source(self) -> str:
        return ""

    def write_figures(self, figures: JobFigures) -> None:
        pass
