"""Pins this node's snapshots and sends them to its peers; `core/snapshots/floor_pins_and_copies.py` decides which."""

import asyncio
from collections.abc import Callable

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.copy_pacer import CancelablePacer
from holdfast.agent.snapshots.parcel_transport import ParcelTransport, parcel_ranges
from holdfast.core.snapshots.floor_pins_and_copies import (
    AimReceived,
    ArenaGranted,
    CopyRun,
    FloorNews,
    GenerationBegun,
    MarkVerified,
    NodeFloor,
    ParcelArrived,
    ParcelFailed,
    PinRefused,
    PinSnapshot,
    ReportBacked,
    SendingBegun,
    SendingEnded,
    SlotNeeded,
    SnapshotsListed,
    UnpinSnapshot,
)
from holdfast.core.snapshots.slot_pin_limit import FLOOR_SLOTS
from holdfast.model.copy_aim import Aim
from holdfast.wire.rank_keeper_messages import ArenaRequest

_AGAIN_S = 1.0  # after a link that broke


class PeerSender:
    def __init__(
        self,
        snapshots: ArenaTable,
        transport: ParcelTransport,
        clock: AgentClock,
        say: Callable[[str], None],
        report_progress: Callable[[], None],
        *,
        to_disk: bool = False,  # floors go to this node's disk, too
    ) -> None:
        self._snapshots = snapshots
        self._transport = transport
        self.pacer = transport.pacer
        self._clock = clock
        self._say = say
        self._report_progress = report_progress
        self._floor = NodeFloor(to_disk=to_disk)
        self._wants: dict[int, ArenaRequest] = {}
        self._said: set[str] = set()

    @property
    def aim(self) -> Aim:
        return self._floor.aim

    @property
    def has_peer(self) -> bool:
        return bool(self.aim.peer)

    @property
    def ranks(self) -> int:
        """The number of ranks on this node in this generation."""
        return self._floor.ranks

    @property
    def backed(self) -> int:
        """The newest step whose copies are complete; -1 if there is none in this generation."""
        return self._floor.backed

    @property
    def took_s(self) -> float:
        """How long it took to send the step in `backed`, in seconds."""
        return self._floor.took_s

    @property
    def absent(self) -> str:
        """Of two peers the one that does not have the step in `backed`; "" if all have it."""
        return self._floor.absent

    def begin_generation(self, generation: int, ranks: int, shared_step: int) -> None:
        self._wants.clear()
        self._take_news(GenerationBegun(generation=generation, ranks=ranks, shared_step=shared_step))

    def on_want(self, want: ArenaRequest) -> None:
        """Note that a rank of this generation now has the arena that it asked for."""
        rank, self._wants[want.rank] = want.rank, want
        sealed = tuple(one for one in self._snapshots.list_snapshots() if one.rank == rank)
        slots = self._snapshots.count_slots(rank)
        self._take_news(ArenaGranted(rank=rank, slots=slots, verifies=want.verified, sealed=sealed))

    def set_aim(self, aim: Aim) -> None:
        self._take_news(AimReceived(aim=aim, sealed=self._snapshots.list_snapshots()))

    def step_aside(self) -> None:
        """Give up preparing the next floor, because a checkpoint needs its slot."""
        self._take_news(SlotNeeded())

    def is_late(self) -> bool:
        """Return whether checkpoints have delayed the next floor so long that it may use one more slot of each rank."""
        return self._floor.is_late(self._clock.monotonic())

    def newest_shared_step(self) -> int:
        """Return the newest step that all ranks here have sealed; -1 if there is none or this node has no floor."""
        if self._floor.lacks_slots():
            where = self.aim.peer or "disk"
            self._say_once(f"snapshots are not copied to {where}: that takes {FLOOR_SLOTS} slots per rank")
        return self._floor.shared_step(self._snapshots.list_snapshots())

    def wants_verification(self) -> bool:
        return self._floor.verifies

    def next_seqs(self) -> dict[int, int]:
        """Return the sequence number of each rank's snapshot that is pinned to become the next floor."""
        return self._floor.next_seqs()

    def is_next_ready(self) -> bool:
        """Pin snapshots for the next floor, where possible; return whether every rank has one of the same step."""
        if not self._floor.wants_next():
            return False
        self._take_news(SnapshotsListed(sealed=self._snapshots.list_snapshots()))
        return self._floor.is_next_ready()

    async def send_next(self) -> None:
        """Send all ranks' snapshots for the next floor at once, to one peer after the other; retry failed transfers
        until sending is cancelled."""
        self._take_news(SendingBegun())
        run = self._floor.sending
        if run is None:
            return  # it was let go before its turn came
        wants = ((parcel, self._wants[parcel.snapshot.rank]) for parcel in self._floor.open_parcels())
        count = sum(end - start for parcel, want in wants for start, end in parcel_ranges(parcel, want))
        pacer = self.pacer.begin_copy(run, count)
        try:
            await self._send_parcels(run, pacer)
        finally:
            if not run.cancelled and not self._floor.open_parcels():
                self.pacer.end_copy(pacer, count, self._clock.monotonic() - run.began_at)
            self._take_news(SendingEnded())

    async def _send_parcels(self, run: CopyRun, pacer: CancelablePacer) -> None:
        failures = 0
        while not run.cancelled and (parcels := self._floor.next_parcels(self._clock.monotonic())):
            errors = await asyncio.gather(
                *(self._transport.send_parcel(one, self._wants[one.snapshot.rank], pacer) for one in parcels)
            )
            for parcel in [parcel for parcel, error in zip(parcels, errors, strict=True) if not error]:
                self._take_news(ParcelArrived(parcel))
            failed = [(parcel, error) for parcel, error in zip(parcels, errors, strict=True) if error]
            if not failed or run.cancelled:
                continue
            for parcel, _ in failed:
                self._take_news(ParcelFailed(parcel))
            failures += 1
            if failures > 1:  # one that goes on at once where it broke is not worth a word
                self._say_once(f"cannot send the copy of step {run.step} to {failed[0][0].to}: {failed[0][1]}")
            await asyncio.sleep(_AGAIN_S)

    def _take_news(self, news: FloorNews) -> None:
        for deed in self._floor.step(self._clock.monotonic(), news):
            match deed:
                case UnpinSnapshot(snapshot):
                    self._snapshots.unpin_own(snapshot)
                case PinSnapshot(snapshot, spare, late):
                    if not self._snapshots.pin_own(snapshot, spare=spare, late=late):
                        self._take_news(PinRefused(snapshot))
                case MarkVerified(snapshot):
                    self._snapshots.mark_verified(snapshot)
                case ReportBacked():
                    self._report_progress()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
