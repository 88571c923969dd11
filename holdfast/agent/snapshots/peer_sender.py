"""Sends this node's snapshots to its peer: which steps to pin, which to send, and how far the copy has come.

All ranks of all nodes hold the same two steps: the job's floor, and the next one while it is copied. Held means
pinned: the rank goes on in its other slots.
"""

import asyncio
from pathlib import Path

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin, pin_snapshot
from holdfast.agent.snapshots.keeper_ports import KeeperPorts
from holdfast.checkpoint.arena import VERIFIED, Arena
from holdfast.checkpoint.parity_image import Cut, half_of
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
from holdfast.model.state_copy import Address, Aim
from holdfast.wire.keeper_messages import ArenaRequest, layout_file_name

_AGAIN_S = 1.0  # after a link that broke
_SLOTS = 3  # the least with which a floor can be held while snapshots go on safely


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


class SnapshotParcel(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one rank's snapshot that goes to one node."""

    rank: int
    pinned: SnapshotPin
    to: str
    at: Address
    ranges: tuple[Cut, ...]
    pair: tuple[int, int] | None = None  # with parity


class PeerSender:
    def __init__(
        self, arenas: ArenaTable, notes: Path, guard: PeerGuard | None, bytes_s: float, ports: KeeperPorts
    ) -> None:
        self._ports = ports
        self.aim = Aim(generation=0)
        self.backed = -1
        self.took_s = 0.0
        self._arenas = arenas
        self._notes = notes
        self._guard = guard
        self._pacer = BytePacer(bytes_s)
        self._wants: dict[int, ArenaRequest] = {}
        self.ranks = 0
        self._floor: dict[int, SnapshotPin] = {}
        self._before: dict[int, SnapshotPin] = {}  # the floor before, for as long as this one is not verified
        self._next: dict[int, SnapshotPin] = {}
        self._sending: CancelablePacer | None = None
        self._done: set[tuple[int, int, str]] = set()  # rank, seq and the node that has it
        self._said: set[str] = set()

    def begin_generation(self, generation: int, ranks: int, step: int) -> None:
        """Reset for a new generation; keep the floor pinned unless it is later than the step the job goes on from."""
        self.aim, self.backed, self.ranks = Aim(generation=generation), -1, ranks
        self._wants.clear()
        self._done.clear()
        self._cancel_next()
        for held in (self._before, self._floor):
            if any(one.step > step for one in held.values()):
                self._unpin_all(held)

    def on_want(self, want: ArenaRequest) -> None:
        held = self._floor.get(want.rank)
        if held and (held.arena is not self._arena_of(want.rank) or not held.is_intact()):
            self._floor.pop(want.rank).release()  # memory of another layout, or damaged
        self._wants[want.rank] = want

    def newest_shared_step(self) -> int:
        """Return the newest step that all ranks here have sealed; -1 if there is none or this node has no floor."""
        if len(self._wants) < self.ranks or not (self.aim.peer or self.wants_verification()):
            return -1
        arenas = [self._arena_of(rank) for rank in self._wants]
        if any(arena.slots < _SLOTS for arena in arenas):
            self._say_once(f"snapshots are not copied to {self.aim.peer}: that takes {_SLOTS} slots a rank")
            return -1
        return min(
            max((one.step for one in arena.list_sealed() if one.generation == self.aim.generation), default=-1)
            for arena in arenas
        )

    def _arena_of(self, rank: int) -> Arena:
        own = self._arenas.find_arena(rank)
        assert own is not None, "a rank wants copies only once it has an arena"
        return own.arena

    def next_seqs(self) -> dict[int, int]:
        """Return the seqs of the pinned snapshots that will become the next floor, by rank."""
        return {rank: pinned.sealed.seq for rank, pinned in self._next.items()}

    def wants_verification(self) -> bool:
        return any(want.verified for want in self._wants.values())

    def set_aim(self, aim: Aim) -> None:
        """Apply the controller's aim. The same aim again changes nothing; one of another generation is ignored."""
        if aim.generation != self.aim.generation:
            return
        before, self.aim = self.aim, aim
        if aim.peer != before.peer or aim.halves != before.halves:
            self._done.clear()
            if aim.halves and self.backed >= aim.next >= 0:
                self.backed = -1  # whoever keeps our half has started anew, and what is not sealed is lost with it
        if aim.floor >= 0 and {one.step for one in self._floor.values()} != {aim.floor}:
            self._raise_floor(aim.floor)
        if aim.next != before.next and self._next:
            self._cancel_next()
        if aim.verified >= 0:
            self._flag_verified(aim.verified)
        if aim.verified == aim.floor:
            self._unpin_all(self._before)

    def _raise_floor(self, floor: int) -> None:
        """Pin the snapshots of a new floor: those that were just sent, or those found after the agent restarted."""
        found: dict[int, SnapshotPin] = {}
        for rank in self._wants:
            arena = self._arena_of(rank)
            one = next((one for one in arena.list_sealed() if one.step == floor), None)
            if one and (pinned := pin_snapshot(arena, one)):
                found[rank] = pinned
        self._cancel_next()
        self._unpin_all(self._before)
        self._before, self._floor = self._floor, found
        if not self.wants_verification():
            self._unpin_all(self._before)

    def _flag_verified(self, step: int) -> None:
        for arena in map(self._arena_of, self._wants):
            for one in arena.list_sealed():
                if one.step == step and not one.flags & VERIFIED:
                    arena.flag_slot(one.slot, VERIFIED)

    def step_aside(self) -> None:
        """Give up the next floor, as a checkpoint needs the slot more."""
        if self._next:
            self._cancel_next()

    def _cancel_next(self) -> None:
        if self._sending:
            self._sending.over = True
        self._unpin_all(self._next)

    def _unpin_all(self, held: dict[int, SnapshotPin]) -> None:
        for pinned in held.values():
            pinned.release()
        held.clear()

    # --- sending -----------------------------------------------------------------------------------------------

    def is_next_ready(self) -> bool:
        """Pin snapshots for the next floor; return whether all ranks here have one, of the same step."""
        if self.aim.next < 0 or self.backed >= self.aim.next or self._sending or len(self._wants) < self.ranks:
            return False
        least = max([self.aim.next, *(one.step for one in self._next.values())])
        for rank in self._wants:
            self._pin_candidate(rank, least)
        return len(self._next) == len(self._wants) and len({one.step for one in self._next.values()}) == 1

    def _pin_candidate(self, rank: int, least: int) -> None:
        arena, before = self._arena_of(rank), self._next.get(rank)
        if before and before.step >= least:
            return
        if before:
            self._next.pop(rank).release()
        fresh = [one for one in arena.list_sealed() if one.generation == self.aim.generation and one.step >= least]
        one = min(fresh, key=lambda one: one.step, default=None)
        if one and arena.can_pin() and (pinned := pin_snapshot(arena, one)):
            self._next[rank] = pinned

    async def send_next(self) -> None:
        """Send the next floor of all ranks at once; retry broken links until something newer is wanted."""
        if not self._next:
            return  # it was let go before its turn came
        sending = self._sending = CancelablePacer(self._pacer)
        aim, began_at, failures = self.aim, self._ports.clock.monotonic(), 0
        step = next(iter(self._next.values())).step
        try:
            while aim.peer and not sending.over:
                parcels = [parcel for rank, one in self._next.items() for parcel in self._make_parcels(rank, one)]
                errors = await asyncio.gather(*(asyncio.to_thread(self._push_parcel, one, sending) for one in parcels))
                failed = [(parcel, error) for parcel, error in zip(parcels, errors, strict=True) if error]
                if not failed or sending.over:
                    break
                failures += 1
                if failures > 1:  # one that goes on at once where it broke is not worth a word
                    self._say_once(f"the copy of step {step} does not get to {failed[0][0].to}: {failed[0][1]}")
                await asyncio.sleep(_AGAIN_S)
            if not sending.over:
                self.backed, self.took_s = step, self._ports.clock.monotonic() - began_at
                self._ports.report_progress()
        finally:
            self._sending = None

    def _make_parcels(self, rank: int, pinned: SnapshotPin) -> list[SnapshotParcel]:
        aim, share = self.aim, self._wants[rank].share
        if not aim.halves:
            return [SnapshotParcel(rank=rank, pinned=pinned, to=aim.peer, at=aim.peer_at, ranges=share)]
        parcels = []
        for number, half in enumerate(aim.halves):
            other = half.beside + rank - min(self._wants)
            pair = (rank, other) if number == 0 else (other, rank)
            ranges = half_of(share, number)
            parcels.append(
                SnapshotParcel(rank=rank, pinned=pinned, to=half.keeper, at=half.keeper_at, ranges=ranges, pair=pair)
            )
        return parcels

    def _push_parcel(self, parcel: SnapshotParcel, pace: CancelablePacer) -> str:
        rank, one = parcel.rank, parcel.pinned.sealed
        want, key = self._wants[rank], (rank, one.seq, parcel.to)
        if key in self._done:
            return ""
        views = [parcel.pinned.image[start:end] for start, end in parcel.ranges]
        state = PeerRequest(
            verb="push",
            rank=rank,
            world=want.world,
            step=one.step,
            generation=one.generation,
            layout=want.layout,
            floor=self.aim.floor,
            bytes=sum(map(len, views)),
            pair=parcel.pair,
        )
        keeper = PeerKeeper(
            parcel.at, self._guard, max(1, MOST_LINKS // len(self._wants))
        )  # several ranks have several
        try:
            try:
                push_state(keeper, state, views, pace)
            except TransportError as e:
                if e.code is not RefusalCode.NO_LAYOUT:
                    raise
                self._send_layout(want, state, parcel.at)
                push_state(keeper, state, views, pace)
        except OSError as e:
            return str(e)
        except TransportError as e:
            if e.code is not RefusalCode.SUPERSEDED:
                return str(e)
            # Another rank has gone on to a later step. The controller hears that from its node, and aims anew.
        self._done.add(key)
        return ""

    def _send_layout(self, want: ArenaRequest, state: PeerRequest, at: Address) -> None:
        content = (self._notes / layout_file_name(want.rank, want.layout)).read_bytes()
        plan = PeerRequest(
            verb="tell",
            rank=want.rank,
            layout=want.layout,
            generation=state.generation,
            bytes=len(content),
        )
        push_state(PeerKeeper(at, self._guard), plan, [memoryview(content)], BytePacer(0))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._ports.say(text)
