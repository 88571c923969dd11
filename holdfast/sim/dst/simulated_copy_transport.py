"""The keeper of one simulated agent as the agent sees it, and the transport of copies to other machines."""

import asyncio

import msgspec

from holdfast.core.snapshots.floor_pins_and_copies import CopyParcel, CopyRun
from holdfast.model.errand import LaunchHere, Leave
from holdfast.model.observation import Beat, Reach
from holdfast.model.state_copy import Address, Aim, Copy
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.simulated_snapshot_keeper import SimKeeper
from holdfast.wire.holder_messages import KeptArena
from holdfast.wire.rank_keeper_messages import ArenaRequest

_COPY_S = 0.3
_LOOK_S = 0.5


class SimBackup:
    def __init__(self, process: AgentProcess, keeper: SimKeeper) -> None:
        self._process = process
        self._machine = process.machine
        self._keeper = keeper
        self.revoked: frozenset[str] = frozenset()
        self.address = (process.machine.name, 1)

    @property
    def stored(self) -> int:
        return self._keeper.stored

    def adopt_arenas(self, kept: tuple[KeptArena, ...]) -> None:
        self._keeper.recall_launch(self._machine.disk.launch)

    def begin_launch(self, errand: LaunchHere) -> str:
        """Begin a launch in the keeper and note it on disk; return why it cannot be noted, empty if it was."""
        self._process.check_alive()
        self._keeper.begin_launch(errand)
        told = self._keeper.launch.restore
        if told.sources or told.doubts:  # what it gives up is of no use
            self._keeper.states.kept = self._keeper.list_wanted()
        else:
            self._process.office.truth.on_disk_removal(self._machine, self._keeper.list_wanted())
        return self._machine.disk.write_launch(errand)

    async def apply_aim(self, aim: Aim) -> None:
        self._process.check_alive()
        self._keeper.apply_aim(aim)
        states = self._keeper.begin_disk_write(aim)
        if states is not None:
            await asyncio.sleep(self._machine.scene.rng.choice((0.1, 1.0, 6.0)))
            self._process.check_alive()
            self._keeper.end_disk_write(aim, states, full=self._machine.disk.full)
        if aim.disk_from >= 0 and aim.generation == self._keeper.launch.generation:
            later = [one for one in self._keeper.states.kept if one[2].step >= aim.disk_from]
            self._process.office.truth.on_disk_removal(self._machine, later)

    def list_copies(self) -> tuple[Copy, ...]:
        return self._keeper.list_copies()

    def complete_beat(self, beat: Beat) -> Beat:
        sender = self._keeper.sender
        return msgspec.structs.replace(
            beat,
            sealed=sender.newest_shared_step(),
            backed=sender.backed,
            backing_s=sender.took_s,
            stored=self.stored,
            disked=self._keeper.disked,
            disk_tried=self._keeper.disk_tried,
            verifies=sender.wants_verification(),
        )

    async def use_run(self, run: str) -> None:
        pass

    async def leave_job(self, errand: Leave) -> None:
        self._process.check_alive()
        states, truth = self._keeper.states, self._process.office.truth
        if errand.ended:
            truth.on_disk_removal(self._machine, states.list_unstored(errand.stored, errand.spared))
        elif errand.disk_over:
            truth.on_disk_eviction(self._machine, self._keeper.launch.generation)

    async def send_copies(self) -> None:
        """Send snapshots to the peer as soon as they are ready, for as long as the agent lives."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._keeper.sender.is_next_ready():
                await self._keeper.sender.send_next()


class SimTransport:
    """The transport to other machines. A copy takes time, and arrives if both machines are connected at its end."""

    def __init__(self, process: AgentProcess) -> None:
        self._process = process
        self._machine = process.machine
        self._machines = process.office.cloud.machines

    async def try_peers(self, peers: dict[str, Address]) -> Reach:
        """Tell which of these machines are connected, as this one sees it."""
        self._process.check_alive()
        there = {peer: self._machines.get(peer) for peer in peers}
        reached = [peer for peer, one in there.items() if one and one.is_connected and self._machine.is_connected]
        missed = tuple(peer for peer in peers if peer not in reached)
        return Reach(node=self._machine.name, reached=tuple(reached), missed=missed)

    async def send_parcel(self, parcel: CopyParcel, want: ArenaRequest, run: CopyRun) -> str:
        await asyncio.sleep(_COPY_S * self._machine.scene.rng.uniform(0.3, 2.0))
        self._process.check_alive()
        there = self._machines.get(parcel.to)
        if not (there and there.agent and there.is_connected and self._machine.is_connected):
            return "it cannot be reached"
        snap = self._process.keeper.snapshots.pinned.get(parcel.snapshot)
        if snap is None:
            return "it is given up for a newer one"
        return there.agent.keeper.keep_copy(parcel.snapshot.rank, want.world, parcel.floor, snap)
