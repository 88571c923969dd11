"""A node's part in the recovery floor, as a pure state machine: which snapshots to pin, and which to send to peers.

All ranks of all nodes hold the same two steps: the job's floor, and the next one while it is copied. Holding pins a
snapshot's slot; the rank uses its other slots. The keeper lists, pins and sends snapshots, and reports the results.
"""

import msgspec

from holdfast.core.snapshots.slot_pin_limit import FLOOR_SLOTS
from holdfast.model.copy_aim import Aim
from holdfast.model.state_copy import Address

_LATE_S = 1.0  # a next floor that waits as long for a slot, because of checkpoints, or misses its step, is late
_LENT_S = 60.0  # as long it may then leave the rank one free slot alone: storage that is slow or full stays so
_ABSENT_S = 10.0  # a second peer that has taken nothing for so long is not waited for; it is asked again as often


class OwnSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed snapshot of a rank on this node."""

    rank: int
    arena: int  # number of the rank's arena: a rank may get another one, whose seqs begin anew
    seq: int
    step: int
    generation: int


Sealed = tuple[OwnSnapshot, ...]  # of each rank the newest first


class CopyParcel(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one snapshot that goes to one node: all of the rank's share, or one half of it."""

    snapshot: OwnSnapshot
    to: str
    at: Address
    floor: int = -1  # a step that the node must not give up for this one
    half: int = -1  # 0, 1: with parity
    pair: tuple[int, int] | None = None  # with parity: the ranks whose first and second half are XORed


# What the machine hears.
class GenerationBegun(msgspec.Struct, frozen=True, kw_only=True):
    generation: int
    ranks: int  # on this node
    shared_step: int  # the last step that the generation shares with the snapshots held here; -1: none


class ArenaGranted(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of this generation has its arena, which is new or comes from the generation before."""

    rank: int
    slots: int
    verifies: bool  # the rank wants verified snapshots to be kept
    sealed: Sealed  # of this rank


class AimReceived(msgspec.Struct, frozen=True, kw_only=True):
    aim: Aim
    sealed: Sealed


class SnapshotsListed(msgspec.Struct, frozen=True, kw_only=True):
    sealed: Sealed


class PinRefused(msgspec.Struct, frozen=True):
    """The snapshot is gone, or its arena has no slot to spare."""

    snapshot: OwnSnapshot


class SlotNeeded(msgspec.Struct, frozen=True):
    """A checkpoint needs the slot that is held for the next floor."""


class SendingBegun(msgspec.Struct, frozen=True): ...


class ParcelArrived(msgspec.Struct, frozen=True):
    parcel: CopyParcel


class ParcelFailed(msgspec.Struct, frozen=True):
    parcel: CopyParcel


class SendingEnded(msgspec.Struct, frozen=True): ...


FloorNews = (
    GenerationBegun
    | ArenaGranted
    | AimReceived
    | SnapshotsListed
    | PinRefused
    | SlotNeeded
    | SendingBegun
    | ParcelArrived
    | ParcelFailed
    | SendingEnded
)


# What the machine wants done, in this order.
class UnpinSnapshot(msgspec.Struct, frozen=True):
    snapshot: OwnSnapshot


class PinSnapshot(msgspec.Struct, frozen=True):
    snapshot: OwnSnapshot
    spare: bool  # only if the arena has a slot to spare
    late: bool = False  # one that stays free is enough


class MarkVerified(msgspec.Struct, frozen=True):
    snapshot: OwnSnapshot


class ReportBacked(msgspec.Struct, frozen=True):
    """Tell the controller now that a copy is complete."""


FloorDeed = UnpinSnapshot | PinSnapshot | MarkVerified | ReportBacked
Held = dict[int, OwnSnapshot]  # by rank


class _Trouble(msgspec.Struct, kw_only=True):
    """A peer that could not be given a copy: since when, and when that was last tried."""

    since: float
    tried_at: float


class CopyRun(msgspec.Struct, kw_only=True):
    """A transfer of the snapshots of one step to peers. It lasts until the keeper reports that sending has ended.
    Sending threads stop once `cancelled` is set."""

    step: int
    began_at: float
    cancelled: bool = False  # what is being sent is no longer wanted


class NodeFloor:
    """A node's part in the floor, which is the step that all ranks of all nodes hold. `step` takes news and returns
    what to do: pin snapshots newly held for the floor, and unpin others."""

    def __init__(self, *, to_disk: bool = False) -> None:
        """With `to_disk`, the node has a floor even if no peer keeps copies of it: its own disk keeps the floor."""
        self._to_disk = to_disk
        self.aim = Aim(generation=0)
        self.backed = -1  # newest step whose copies are complete
        self.took_s = 0.0  # to send it
        self.ranks = 0
        self.sending: CopyRun | None = None
        self._granted: dict[int, ArenaGranted] = {}
        self._floor: Held = {}
        self._before: Held = {}  # the floor before, for as long as this one is not verified
        self._next: Held = {}
        self._refused_at: float | None = None  # when the next floor was first refused a slot
        self._late_until = 0.0
        self._arrived: set[tuple[OwnSnapshot, str]] = set()  # snapshots, and the nodes that have them
        self.absent = ""  # of two peers the one that does not have the step in `backed`
        self._troubles: dict[str, _Trouble] = {}  # by peer

    def step(self, now: float, news: FloorNews) -> tuple[FloorDeed, ...]:
        if isinstance(news, PinRefused):
            self._forget_pin(now, news.snapshot)
            return ()
        before = self.held_snapshots()
        deeds = self._take_news(now, news)
        after = self.held_snapshots()
        kept = {*self._floor.values(), *self._before.values()}
        return (
            *(UnpinSnapshot(one) for one in before if one not in after),
            *(PinSnapshot(one, one not in kept, self.is_late(now)) for one in after if one not in before),
            *deeds,
        )

    def _take_news(self, now: float, news: FloorNews) -> tuple[FloorDeed, ...]:
        match news:
            case GenerationBegun():
                self._begin_generation(news)
            case ArenaGranted(rank=rank, sealed=sealed):
                if rank in self._floor and self._floor[rank] not in sealed:
                    del self._floor[rank]  # memory of another layout, or damaged
                self._granted[rank] = news
            case AimReceived(aim=aim, sealed=sealed) if aim.generation == self.aim.generation:
                return self._set_aim(aim, sealed)
            case SnapshotsListed(sealed=sealed):
                self._choose_next(sealed)
            case SlotNeeded():
                if self._next:
                    self._note_refusal(now)
                self._cancel_next()
            case SendingBegun() if self._next:
                self.sending = CopyRun(step=next(iter(self._next.values())).step, began_at=now)
            case ParcelArrived(parcel):
                self._arrived.add((parcel.snapshot, parcel.to))
                if all(parcel.to != other.to for other in self.open_parcels()):
                    self._troubles.pop(parcel.to, None)
            case ParcelFailed(parcel):
                self._troubles.setdefault(parcel.to, _Trouble(since=now, tried_at=now)).tried_at = now
            case SendingEnded():
                return self._end_sending(now)
            case AimReceived() | SendingBegun():
                pass  # an aim of another generation; a floor that was given up before its turn came
        return ()

    # --- what is held ------------------------------------------------------------------------------------------

    def held_snapshots(self) -> dict[OwnSnapshot, None]:
        """Return all snapshots that are pinned, in a fixed order."""
        return dict.fromkeys(one for held in (self._floor, self._before, self._next) for one in held.values())

    def _begin_generation(self, news: GenerationBegun) -> None:
        """Begin a generation. Snapshots held for the floor stay unless they are later than the step to resume from."""
        self.aim, self.backed, self.ranks = Aim(generation=news.generation), -1, news.ranks
        self.absent = ""
        self._troubles.clear()
        self._granted.clear()
        self._arrived.clear()
        self._refused_at = None
        for held in (self._before, self._floor):
            if any(one.step > news.shared_step for one in held.values()):
                held.clear()
        self._cancel_next()

    def _set_aim(self, aim: Aim, sealed: Sealed) -> tuple[FloorDeed, ...]:
        """Apply the controller's aim; the same aim again changes nothing."""
        before, self.aim = self.aim, aim
        if (aim.peer, aim.second, aim.halves) != (before.peer, before.second, before.halves):
            self._arrived.clear()
            if aim.halves and self.backed >= aim.next >= 0:
                self.backed = -1  # whoever keeps our half has started anew, and what is not sealed is lost with it
        if aim.floor >= 0 and {one.step for one in self._floor.values()} != {aim.floor}:
            self._cancel_next()
            self._before = self._floor if self.verifies else {}
            self._floor = self._find_step(aim.floor, sealed)
        if aim.next != before.next and self._next:
            self._cancel_next()
        if aim.verified == aim.floor:
            self._before = {}
        good = (one for one in sealed if one.step == aim.verified and one.rank in self._granted)
        return tuple(map(MarkVerified, good))

    def _find_step(self, step: int, sealed: Sealed) -> Held:
        """Return, by rank, the newest snapshot of this step. Ranks without an arena in this generation are left out."""
        found: Held = {}
        for one in sealed:
            if one.step == step and one.rank in self._granted:
                found.setdefault(one.rank, one)
        return found

    def is_late(self, now: float) -> bool:
        """Return whether the next floor may take a rank's spare slot now. It may for a while after it waited too long
        for a slot or missed the step that other nodes have copied."""
        return now < self._late_until

    def _note_refusal(self, now: float) -> None:
        if self._refused_at is None:
            self._refused_at = now
        elif now >= self._refused_at + _LATE_S:
            self._late_until = now + _LENT_S

    def _forget_pin(self, now: float, snapshot: OwnSnapshot) -> None:
        if self._next.get(snapshot.rank) == snapshot:
            self._note_refusal(now)
        for held in (self._floor, self._before, self._next):
            if held.get(snapshot.rank) == snapshot:
                del held[snapshot.rank]

    def _cancel_next(self) -> None:
        self._next = {}
        if self.sending:
            self.sending.cancelled = True

    # --- the next floor ----------------------------------------------------------------------------------------

    def wants_next(self) -> bool:
        """Return whether to search the ranks' snapshots for the next floor."""
        behind = self.backed < self.aim.next and self.aim.next >= 0
        return behind and self.sending is None and len(self._granted) >= self.ranks

    def is_next_ready(self) -> bool:
        """Return whether all ranks here hold a snapshot of the same step for the next floor."""
        if not self._next or len(self._next) < len(self._granted) or not self.wants_next():
            return False
        return len({one.step for one in self._next.values()}) == 1

    def _choose_next(self, sealed: Sealed) -> None:
        """Choose for each rank the oldest snapshot that is at least as new as the controller's aim. Repeated choices
        bring all ranks to the same step."""
        if not self.wants_next():
            return
        least = max([self.aim.next, *(one.step for one in self._next.values())])
        chosen = {rank: one for rank, one in self._next.items() if one.step >= least}
        for rank in [rank for rank in self._granted if rank not in chosen]:
            fresh = [one for one in sealed if one.rank == rank and one.generation == self.aim.generation]
            if late := [one for one in fresh if one.step >= least]:
                chosen[rank] = min(late, key=lambda one: one.step)
        self._next = chosen

    def next_seqs(self) -> dict[int, int]:
        """Return, by rank, the sequence number of the snapshot that is held for the next floor."""
        return {rank: one.seq for rank, one in self._next.items()}

    def open_parcels(self) -> list[CopyParcel]:
        """Return the parts of snapshots that are still to be sent to peers for the next floor (the next step that all
        nodes will hold). Return an empty list if this node has no peer."""
        parcels = [parcel for one in self._next.values() for parcel in self._make_parcels(one)]
        return [parcel for parcel in parcels if (parcel.snapshot, parcel.to) not in self._arrived]

    def next_parcels(self, now: float) -> list[CopyParcel]:
        """Return the open parcels to send now. With two peers these are the parcels for one of them: the other one gets
        its copies afterwards. A peer that took nothing when it was last asked comes last."""
        parcels = self.awaited_parcels(now)
        if not parcels or not self.aim.second:
            return parcels
        first = min((parcel.to for parcel in parcels), key=lambda to: self._tried_at(to))
        return [parcel for parcel in parcels if parcel.to == first]

    def awaited_parcels(self, now: float) -> list[CopyParcel]:
        """Return the open parcels that the next floor waits for: all, but those for a second peer that has long taken
        none and has just been asked again, once the other peer has its copies."""
        parcels = self.open_parcels()
        if self.aim.second and len({parcel.to for parcel in parcels}) == 1 and self._is_absent(now, parcels[0].to):
            return []
        return parcels

    def _is_absent(self, now: float, peer: str) -> bool:
        trouble = self._troubles.get(peer)
        return trouble is not None and trouble.tried_at >= max(trouble.since + _ABSENT_S, now - _ABSENT_S)

    def _tried_at(self, peer: str) -> float:
        """Return when a peer was last asked in vain; -1 if it has taken what it was last sent."""
        return self._troubles[peer].tried_at if peer in self._troubles else -1.0

    def _make_parcels(self, one: OwnSnapshot) -> list[CopyParcel]:
        aim = self.aim
        if not aim.halves:
            peers = ((aim.peer, aim.peer_at), (aim.second, aim.second_at))
            return [CopyParcel(snapshot=one, to=peer, at=at, floor=aim.floor) for peer, at in peers if peer]
        parcels = []
        for number, half in enumerate(aim.halves):
            other = half.beside + one.rank - min(self._granted)
            pair = (one.rank, other) if number == 0 else (other, one.rank)
            parcels.append(
                CopyParcel(snapshot=one, to=half.keeper, at=half.keeper_at, floor=aim.floor, half=number, pair=pair)
            )
        return parcels

    def _end_sending(self, now: float) -> tuple[FloorDeed, ...]:
        sent, self.sending = self.sending, None
        if sent is None or sent.cancelled or self.awaited_parcels(now):
            return ()
        if self._refused_at is not None and sent.step > self.aim.next >= 0:
            self._late_until = now + _LENT_S  # the other nodes have copied an earlier step
        self.backed, self.took_s, self._refused_at = sent.step, now - sent.began_at, None
        self.absent = next((parcel.to for parcel in self.open_parcels()), "")
        return (ReportBacked(),)

    # --- what is reported --------------------------------------------------------------------------------------

    @property
    def verifies(self) -> bool:
        """Return whether any rank here wants its newest verified snapshot to be kept beside newer ones."""
        return any(granted.verifies for granted in self._granted.values())

    def lacks_slots(self) -> bool:
        """Return whether this node takes part in the floor, but a rank has too few slots to hold a snapshot for it."""
        return self._has_floor() and any(granted.slots < FLOOR_SLOTS for granted in self._granted.values())

    def shared_step(self, sealed: Sealed) -> int:
        """Return the newest step that all ranks here have sealed; -1 if there is none or this node takes no part in the
        floor (the step that all nodes hold)."""
        if not self._has_floor() or self.lacks_slots():
            return -1
        newest = dict.fromkeys(self._granted, -1)
        for one in sealed:
            if one.generation == self.aim.generation and one.rank in newest:
                newest[one.rank] = max(newest[one.rank], one.step)
        return min(newest.values(), default=-1)

    def _has_floor(self) -> bool:
        return len(self._granted) >= self.ranks and bool(self.aim.peer or self.verifies or self._to_disk)
