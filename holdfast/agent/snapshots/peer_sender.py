"""Pins this node's snapshots and sends them to its peer; `core/snapshots/node_floor.py` decides which."""

import asyncio
from pathlib import Path

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin
from holdfast.agent.snapshots.keeper_ports import KeeperPorts
from holdfast.checkpoint.parity_image import half_of
from holdfast.checkpoint.peer_transport import (
    MOST_LINKS,
    BytePacer,
    PeerGuard,
    PeerKeeper,
    PeerRequest,
    RefusalCode,
    TransportError,
    push_state,
)
from holdfast.core.snapshots.node_floor import (
    AimReceived,
    ArenaGranted,
    CancelSending,
    CopyParcel,
    FloorNews,
    GenerationBegun,
    MarkVerified,
    NodeFloor,
    OwnSnapshot,
    ParcelArrived,
    PinRefused,
    PinSnapshot,
    ReportBacked,
    SendingBegun,
    SendingEnded,
    SlotNeeded,
    SnapshotsListed,
    UnpinSnapshot,
)
from holdfast.core.snapshots.slot_limits import FLOOR_SLOTS
from holdfast.model.state_copy import Aim
from holdfast.wire.keeper_messages import ArenaRequest, layout_file_name

_AGAIN_S = 1.0  # after a link that broke


class CancelablePacer(BytePacer):
    """A pacer that stops a transfer as soon as what it sends is no longer wanted."""

    def __init__(self, pacer: BytePacer) -> None:
        super().__init__(pacer.bytes_s)
        self._pacer = pacer
        self.over = False

    def spend_bytes(self, count: int) -> None:
        self._pacer.spend_bytes(count)
        if self.over:
            raise TransportError("it is given up for a newer one")


class ParcelPush(msgspec.Struct, frozen=True, kw_only=True):
    """One parcel with all that its thread needs, so that the thread reads nothing that the event loop changes."""

    parcel: CopyParcel
    keeper: PeerKeeper
    ask: PeerRequest
    views: tuple[memoryview, ...]


class PeerSender:
    def __init__(
        self, arenas: ArenaTable, notes: Path, guard: PeerGuard | None, bytes_s: float, ports: KeeperPorts
    ) -> None:
        self._arenas = arenas
        self._notes = notes
        self._guard = guard
        self._ports = ports
        self._pacer = BytePacer(bytes_s)
        self._floor = NodeFloor()
        self._pins: dict[OwnSnapshot, SnapshotPin] = {}
        self._wants: dict[int, ArenaRequest] = {}
        self._sending: CancelablePacer | None = None
        self._said: set[str] = set()

    @property
    def aim(self) -> Aim:
        return self._floor.aim

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
        """How long it took to send that step."""
        return self._floor.took_s

    def begin_generation(self, generation: int, ranks: int, shared_step: int) -> None:
        self._wants.clear()
        self._take_news(GenerationBegun(generation=generation, ranks=ranks, shared_step=shared_step))

    def on_want(self, want: ArenaRequest) -> None:
        own = self._arenas.find_arena(want.rank)
        assert own is not None, "a rank is heard here only once it has an arena"
        self._wants[want.rank] = want
        sealed, slots = own.list_snapshots(), own.arena.slots
        self._take_news(ArenaGranted(rank=want.rank, slots=slots, verifies=want.verified, sealed=sealed))

    def set_aim(self, aim: Aim) -> None:
        self._take_news(AimReceived(aim=aim, sealed=self._arenas.list_snapshots()))

    def step_aside(self) -> None:
        """Give up the next floor, as a checkpoint needs the slot more."""
        self._take_news(SlotNeeded())

    def newest_shared_step(self) -> int:
        """Return the newest step that all ranks here have sealed; -1 if there is none or this node has no floor."""
        if self._floor.lacks_slots():
            self._say_once(f"snapshots are not copied to {self.aim.peer}: that takes {FLOOR_SLOTS} slots a rank")
        return self._floor.shared_step(self._arenas.list_snapshots())

    def wants_verification(self) -> bool:
        return self._floor.verifies

    def next_seqs(self) -> dict[int, int]:
        """Return the seqs of the pinned snapshots that will become the next floor, by rank."""
        return self._floor.next_seqs()

    def is_next_ready(self) -> bool:
        """Pin snapshots for the next floor; return whether all ranks here have one, of the same step."""
        if self._floor.wants_next():
            self._take_news(SnapshotsListed(sealed=self._arenas.list_snapshots()))
        return self._floor.is_next_ready()

    def _take_news(self, news: FloorNews) -> None:
        for deed in self._floor.step(self._ports.clock.monotonic(), news):
            match deed:
                case UnpinSnapshot(snapshot):
                    self._pins.pop(snapshot).release()
                case PinSnapshot(snapshot, spare):
                    self._pin_snapshot(snapshot, spare)
                case MarkVerified(snapshot):
                    self._arenas.mark_verified(snapshot)
                case CancelSending():
                    if self._sending:
                        self._sending.over = True
                case ReportBacked():
                    self._ports.report_progress()

    def _pin_snapshot(self, snapshot: OwnSnapshot, spare: bool) -> None:
        pinned = self._arenas.pin_own(snapshot, spare=spare)
        if pinned is None:
            self._take_news(PinRefused(snapshot))
        else:
            self._pins[snapshot] = pinned

    # --- sending -----------------------------------------------------------------------------------------------

    async def send_next(self) -> None:
        """Send the next floor of all ranks at once; retry broken links until something newer is wanted."""
        self._take_news(SendingBegun())
        if self._floor.sending is None:
            return  # it was let go before its turn came
        sending = self._sending = CancelablePacer(self._pacer)
        try:
            await self._send_parcels(self._floor.sending.step, sending)
        finally:
            self._sending = None
            self._take_news(SendingEnded())

    async def _send_parcels(self, step: int, sending: CancelablePacer) -> None:
        failures = 0
        while not sending.over and (parcels := self._floor.open_parcels()):
            pushes = [self._make_push(parcel) for parcel in parcels]
            errors = await asyncio.gather(*(asyncio.to_thread(self._push_parcel, push, sending) for push in pushes))
            for parcel in [parcel for parcel, error in zip(parcels, errors, strict=True) if not error]:
                self._take_news(ParcelArrived(parcel))
            failed = [(parcel.to, error) for parcel, error in zip(parcels, errors, strict=True) if error]
            if not failed or sending.over:
                continue
            failures += 1
            if failures > 1:  # one that goes on at once where it broke is not worth a word
                self._say_once(f"the copy of step {step} does not get to {failed[0][0]}: {failed[0][1]}")
            await asyncio.sleep(_AGAIN_S)

    def _make_push(self, parcel: CopyParcel) -> ParcelPush:
        one = parcel.snapshot
        want, image = self._wants[one.rank], self._pins[one].image
        ranges = want.share if parcel.half < 0 else half_of(want.share, parcel.half)
        views = tuple(image[start:end] for start, end in ranges)
        ask = PeerRequest(
            verb="push",
            rank=one.rank,
            world=want.world,
            step=one.step,
            generation=one.generation,
            layout=want.layout,
            floor=self.aim.floor,
            bytes=sum(map(len, views)),
            pair=parcel.pair,
        )
        links = max(1, MOST_LINKS // len(self._wants))  # several ranks have several
        return ParcelPush(parcel=parcel, keeper=PeerKeeper(parcel.at, self._guard, links), ask=ask, views=views)

    def _push_parcel(self, push: ParcelPush, pace: CancelablePacer) -> str:
        """Send one parcel, in a thread of its own; return why it did not arrive, empty if it did."""
        try:
            try:
                push_state(push.keeper, push.ask, push.views, pace)
            except TransportError as e:
                if e.code is not RefusalCode.NO_LAYOUT:
                    raise
                self._send_layout(push)
                push_state(push.keeper, push.ask, push.views, pace)
        except OSError as e:
            return str(e)
        except TransportError as e:
            if e.code is not RefusalCode.SUPERSEDED:
                return str(e)
            # Another rank has gone on to a later step. The controller hears that from its node, and aims anew.
        return ""

    def _send_layout(self, push: ParcelPush) -> None:
        rank, layout = push.ask.rank, push.ask.layout
        content = (self._notes / layout_file_name(rank, layout)).read_bytes()
        plan = PeerRequest(verb="tell", rank=rank, layout=layout, generation=push.ask.generation, bytes=len(content))
        keeper = PeerKeeper(push.keeper.address, self._guard)
        push_state(keeper, plan, [memoryview(content)], BytePacer(0))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._ports.say(text)
