"""States on the disks of simulated machines: a keeper writes, reads and removes them as on real disks."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from holdfast.checkpoint.arena import Arena, SealedSnapshot
from holdfast.checkpoint.disk_state_record import DiskNote, DiskState
from holdfast.checkpoint.manifest import Author
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits, list_stored_ranks
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.model.copy_aim import Aim
from holdfast.model.state_copy import Copy
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.simulated_machine import KeptState
from holdfast.sim.dst.simulated_state_image import make_layout


class PinnedSnapshot(NamedTuple):
    arena: Arena
    sealed: SealedSnapshot


class SimStateDisk:
    """One keeper's access to the states on its machine's disk, which outlive the machine's memory."""

    def __init__(self, process: AgentProcess, limits: DiskLimits, find_arena: Callable[[int], Arena | None]) -> None:
        self.limits = limits
        self.unseen = False
        self.written = self.tried = self.final = -1
        self._process, self._machine = process, process.machine
        self._truth = process.office.truth
        self._find_arena = find_arena  # of one of the node's own ranks
        self._author = Author(0)
        self._aimed = self._removed = -1

    def begin_generation(self, author: Author) -> None:
        self._author = author
        self.written = self.tried = self._aimed = self._removed = -1

    async def use_run(self, run: str) -> None:
        pass  # a seed has one

    async def look_at_path(self) -> None:
        pass

    # --- what lies there ---------------------------------------------------------------------------------------

    def list_copies(self, node: str) -> list[Copy]:
        return [one.state.describe_copy(node) for one in self._machine.states]

    def find_state(
        self, rank: int, layout: str, step: int | None = None, is_wanted: Callable[[int], bool] = lambda one: True
    ) -> DiskState | None:
        there = [one.state for one in self._machine.states if one.state.matches(rank, layout, step)]
        found = [state for state in there if is_wanted(state.author.generation)]
        return max(found, key=lambda state: (state.author.generation, state.step), default=None)

    def read_image(self, state: DiskState, into: memoryview) -> None:
        into[:] = self._image_of(state)

    def open_image(self, rank: int, layout: str, step: int, generation: int) -> memoryview | None:
        state = self.find_state(rank, layout, step, lambda one: generation in (0, one))
        return memoryview(self._image_of(state)) if state else None

    def _image_of(self, state: DiskState) -> bytes:
        return next(one.image for one in self._machine.states if one.state == state)

    # --- writing -----------------------------------------------------------------------------------------------

    async def follow_aim(self, aim: Aim, ranks: Sequence[int]) -> None:
        if aim.generation != self._author.generation:
            return
        if aim.disk_from > self._removed:
            self._removed = aim.disk_from
            self._process.check_alive()
            later = [one for one in self._machine.states if one.state.step >= aim.disk_from]
            self._truth.on_disk_removal(self._machine, later)
        if aim.disk > self._aimed:
            author, self._aimed = self._author, aim.disk
            ok = await self._write_step(aim.disk, ranks, verified=aim.verified >= aim.disk)
            if author == self._author:
                self.tried, self.written = aim.disk, aim.disk if ok else self.written

    async def _write_step(self, step: int, ranks: Sequence[int], *, verified: bool) -> bool:
        """Write the ranks' snapshots of this step. Return False if one is missing, the disk is full, or another
        generation has begun."""
        author, pins = self._author, [pin for rank in ranks if (pin := self._pin_step(rank, step))]
        try:
            await asyncio.sleep(self._machine.scene.rng.choice((0.1, 1.0, 6.0)))
            self._process.check_alive()
            if len(pins) < len(ranks) or self._machine.disk.full or author != self._author:
                return False
            self._machine.states += [self._describe_state(pin, verified=verified) for pin in pins]
            return True
        finally:
            for arena, sealed in pins:
                arena.unpin(sealed.slot)

    def _pin_step(self, rank: int, step: int) -> PinnedSnapshot | None:
        arena = self._find_arena(rank)
        for sealed in arena.list_sealed() if arena else ():
            if arena and sealed.step == step and arena.pin(sealed.slot, sealed.seq):
                return PinnedSnapshot(arena, sealed)
        return None

    def _describe_state(self, pin: PinnedSnapshot, *, verified: bool) -> KeptState:
        arena, sealed = pin
        state = DiskState(
            url=f"/disk/rank-{arena.rank}/step-{sealed.step}-{self._author.generation}",
            step=sealed.step,
            author=self._author,
            note=DiskNote(layout=make_layout(arena.rank, arena.world), verified=verified),
            bytes=arena.image_bytes,
        )
        return KeptState(state, bytes(arena.slot_image(sealed.slot)))

    async def write_final(self, step: int, ranks: Sequence[int], within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                if await self._write_step(step, ranks, verified=False):
                    self.final = step

    # --- removal -----------------------------------------------------------------------------------------------

    def remove_given_up(self, launch: KeeperLaunch) -> None:
        self._process.check_alive()
        states = self._machine.states
        wanted = [one for one in states if not launch.gives_up(one.state.author.generation, one.state.step)]
        if launch.restore.sources or launch.restore.doubts:  # what it gives up is of no use
            self._machine.states = wanted
        else:
            self._truth.on_disk_removal(self._machine, wanted)

    def remove_run(self) -> None:
        self._process.check_alive()
        self._truth.on_disk_eviction(self._machine, self._author.generation)

    async def leave_job(
        self, ranks: Sequence[int], stored: int, spared: Sequence[int], not_after: int, *, answered: bool
    ) -> None:
        self._process.check_alive()
        self._truth.on_disk_removal(self._machine, self._list_unstored(stored, spared))

    def _list_unstored(self, stored: int, spared: Collection[int]) -> list[KeptState]:
        """Return the states that stay on disk at the job's end, because storage does not have them."""
        newest: dict[int, int] = {}
        for state, _ in self._machine.states:
            newest[state.note.layout.rank] = max(newest.get(state.note.layout.rank, -1), state.step)
        gone = list_stored_ranks(newest, stored, spared)
        return [one for one in self._machine.states if one.state.note.layout.rank not in gone]
