"""Ports of an agent: interfaces to its machine, and callbacks by which the agent's parts report news.

A real node implements these ports with sockets, files and processes, the simulation with a simulated world.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.config import Settings
from holdfast.core.agent_state_machine import ErrandDone, HeedEpoch, RememberDone, RememberLeaving
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.logs.secret_masking import Masker
from holdfast.model.code_release import Release
from holdfast.model.copy_aim import Aim
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import HostIdentity
from holdfast.model.node_errands import Done, LaunchHere, Leave, PairTestHere, Parking, ProbeHere, ReplayHere, StageHere
from holdfast.model.observation import Beat, Departure, Exit, LinkTraffic, Mark, Reach, StepValues, Strain
from holdfast.model.rank_traces import Trace
from holdfast.model.state_copy import Address, Copy
from holdfast.wire.agent_messages import JobFigures, TraceRequest
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.holder_messages import HolderRank, KeptArena, RankKey
from holdfast.wire.rank_memory.flight_log_reader import FlightReport
from holdfast.wire.rank_memory.slot_reader import SlotReading


class ControllerLink(Protocol):
    """One link to the controller; `async for` yields the controller's messages until the link ends."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def send_bytes(self, packet: bytes) -> None:
        """Send a message; raise OSError if the link is gone."""


class LinkDialer(Protocol):
    def open_link(self) -> AbstractAsyncContextManager[ControllerLink]:
        """Return a context that opens a link to the controller. OSError is raised if it cannot be opened or breaks."""


class AgentNotes(Protocol):
    """Notes that outlive an agent. No method raises: an agent must act even if it cannot write its notes."""

    def read_done(self) -> tuple[Done, ...]: ...
    def read_stopped(self) -> int: ...
    def read_epoch(self) -> int: ...
    def read_leave_intent(self) -> Leave | None: ...
    def write_deed(self, deed: HeedEpoch | RememberDone | RememberLeaving) -> None: ...
    def write_stopped(self, generation: int) -> None: ...
    def write_leave_reason(self, errand: Leave) -> None: ...
    def write_departure(self, departure: Departure) -> None: ...
    def complete_departure(self, complete: Callable[[Beat], Beat]) -> None: ...
    def mark_alone(self, now: float) -> float:
        """Note that the controller is gone. Return the time of the first such note, by this agent or an earlier one."""

    def clear_alone(self) -> None: ...


class RankSlots(Protocol):
    """The progress slots in which ranks report their steps."""

    def read_slots(self) -> list[tuple[int, SlotReading]]:
        """Return the newest content of each rank's progress slot, with the slot's index."""

    def read_entries(self, index: int, reading: SlotReading, after: int) -> tuple[int, list[StepValues | Mark]]:
        """Return the newest entry's number, and the losses and hashes after entry number `after`, oldest first."""


class NodeRanks(Protocol):
    """The ranks of the node and the holder that is their parent."""

    @property
    def held(self) -> Mapping[RankKey, HolderRank]:
        """All ranks that the holder knows, including ended ones."""

    @property
    def arenas(self) -> tuple[KeptArena, ...]:
        """Snapshot arenas that the holder has kept since before this agent started."""

    @property
    def slots(self) -> RankSlots: ...

    @property
    def warm(self) -> asyncio.Event:
        """An event, set as soon as ranks can be started without waiting for a zygote."""

    @property
    def cold(self) -> str:
        """Return why ranks start as new processes instead of forks of a zygote; "" if they are forked."""

    async def listen(self, listed: asyncio.Event) -> None:
        """Receive the holder's messages until it ends. Set `listed` once the holder has listed ranks and arenas."""

    @property
    def kept(self) -> int:
        """The number of parked ranks that the newest launch continued in the same process; a stop resets it to 0."""

    async def end_parked(self) -> None:
        """End the parked ranks."""

    async def launch_ranks(self, errand: LaunchHere) -> str:
        """Start the seat's ranks, or continue the parked ones; return an error in words, empty if every rank runs."""

    async def stop_ranks(self, up_to: int, grace_s: float, parking: Parking | None = None) -> str:
        """End all ranks of generations up to `up_to`, except those that park. Return in words which processes still
        live; empty if none does."""

    def quit_holder(self, code: int) -> None:
        """End everything on this node, this agent included."""

    def learn_imports(self, trains: bool) -> None:
        """Have the zygote preload modules that the script has imported, so that the next ranks start sooner."""

    def keep_spares(self, trains: bool) -> None:
        """Begin a spare rank for a rank that has none, if the settings say that each rank has one."""

    def hear_imports(self, modules: tuple[str, ...]) -> None:
        """Note modules that the script imported on other nodes, to be preloaded while no rank runs here."""

    @property
    def proven_imports(self) -> tuple[str, ...]:
        """Return the script's modules that the zygote has preloaded, once a rank is known to start well with them."""

    def read_notes(self) -> dict[str, Any]:
        """Return the fields of a beat that notes of ranks fill: `mesh`, `replayable` and `trackers`."""

    def read_loss_source(self) -> str: ...

    def write_figures(self, figures: JobFigures) -> None:
        """Write the job's incidents, restarts and ETTR to where the ranks read them."""


class RankTracer(Protocol):
    """Reads the stacks and the flight logs of the ranks' processes."""

    def watch_ranks(self, ranks: Iterable[HolderRank]) -> None: ...
    async def trace_ranks(self, ranks: tuple[HolderRank, ...], look: TraceRequest, offset_s: float) -> Trace: ...
    def read_reports(self, generation: int, offset_s: float) -> dict[int, FlightReport]: ...


class SnapshotKeeper(Protocol):
    """Keeps the snapshots of this node's ranks, and copies of other nodes' snapshots."""

    def admit_peers(self, peers: AdmittedPeers) -> None:
        """Accept the keepers of these nodes and no others, also after a restart of this agent."""

    @property
    def address(self) -> tuple[str, int]: ...

    def adopt_arenas(self, kept: tuple[KeptArena, ...]) -> None: ...
    def begin_launch(self, errand: LaunchHere) -> str: ...
    async def apply_aim(self, aim: Aim) -> None: ...
    def list_copies(self) -> tuple[Copy, ...]: ...
    def complete_beat(self, beat: Beat) -> Beat:
        """Return the beat, completed with the progress of snapshots, copies and checkpoints."""

    def report_checkpoints(self) -> None:
        """Report once more what is published at the storage that this node publishes to, if anything was."""

    async def use_run(self, run: str) -> None:
        """Set the run whose states on this host's disk may be restored, and list those states."""

    def end_training(self) -> None:
        """Take note that this node's ranks are being ended."""

    async def leave_job(self, errand: Leave) -> None:
        """Before the node leaves, write the final states if time allows, and remove unneeded states from its disk."""


class NodeStaging(Protocol):
    """Brings releases of the user's code to this node."""

    async def stage_all(self, releases: tuple[Release, ...]) -> str: ...
    async def stage_and_check(self, errand: StageHere) -> tuple[str, bool]: ...
    async def begin_launch(self, release: Release, *, first: bool) -> str: ...
    async def gather_outputs(self) -> None: ...
    def complete(self, trains: bool) -> None: ...


class DiagnosisRunner(Protocol):
    async def run_errand(self, errand: ProbeHere | PairTestHere | ReplayHere) -> ErrandDone: ...
    async def stop(self) -> None:
        """Cancel the running probe, pair test or replay; return once all its processes have ended."""


class HealthSigns(Protocol):
    """Health of the machine: why a rank may have ended, the machine's strains, and the speed of its GPUs."""

    @property
    def peak_flops(self) -> float:
        """Return the peak FLOP/s of the GPUs that the node's ranks use; 0 if unknown."""

    @property
    def tensor_share(self) -> float | None:
        """Return the share of recent time in which the tensor cores of the machine's GPUs worked; None if unknown."""

    @property
    def strains(self) -> tuple[Strain, ...]:
        """Return the strains of this machine, which may explain trouble of the job."""

    @property
    def links_read(self) -> bool:
        """Return whether this agent or another node has read the host's links; True if the host has none."""

    def on_rank_exit(self, at: float) -> None:
        """Raise the alarms that explain a rank's exit, before the exit itself is reported."""

    def has_oom_kill(self) -> bool: ...
    def scarcely(self) -> str: ...


class AgentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The node that an agent works for, and its settings."""

    node: str
    host: str
    order: int
    nproc: int
    settings: Settings
    on_host: HostIdentity


class AgentEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks by which the parts of an agent report news."""

    say: Callable[[str], None]  # a sentence for the person at the console
    on_rank_exit: Callable[[HolderRank], None]
    on_alarm: Callable[[Alarm], None]
    on_copies: Callable[[], None]  # how far copies are should be told now
    on_checkpoints: Callable[[CheckpointListing], None]
    on_marks: Callable[[tuple[Mark, ...]], None]
    on_traffic: Callable[[tuple[LinkTraffic, ...]], None]
    on_logged: Callable[[StepValues, str], None]  # what a rank's line says about a step, and what kind of line it is
    on_leave_request: Callable[[], None]  # somebody on this host wants the node to leave
    on_end_warning: Callable[[], None]  # the cluster has said that it will end this node


class AgentParts(msgspec.Struct, frozen=True, kw_only=True):
    """Every part that an agent is put together from."""

    clock: AgentClock
    controller_clock: ControllerClock
    dialer: LinkDialer
    notes: AgentNotes
    ranks: NodeRanks
    tracer: RankTracer
    keeper: SnapshotKeeper
    staging: NodeStaging
    diagnosis: DiagnosisRunner
    health: HealthSigns
    judge: Callable[[Exit], Awaitable[Alarm]]  # why a rank ended badly
    mask: Masker  # of secrets in what leaves the node
    reach: Callable[[dict[str, Address]], Awaitable[Reach]]  # which of these nodes can be connected to
    background: tuple[Callable[[], Coroutine[Any, Any, None]], ...]  # runs as long as the agent, once ranks are listed


AssembleParts = Callable[[AgentEvents], AgentParts]
