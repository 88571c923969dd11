"""The recovery floor: the newest step that every rank and every rank's peers hold.

Ranks take snapshots at every step, so without coordination the peers would hold different steps. The controller tells
the nodes which step to hold and copy next. When the last node has copied that step, it is the new floor, and nodes may
drop the old floor. Nodes report in their beats, so a lost report is repeated.
"""

from collections.abc import Callable
from math import ceil, isfinite

import msgspec

from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.core.snapshots.disk_floor_coordination import DiskFloor
from holdfast.core.snapshots.gap_pacing import PacingChoice
from holdfast.core.snapshots.parity_placement import place_halves
from holdfast.model.copy_aim import Aim, Half
from holdfast.model.job_and_seats import Dims, Seat
from holdfast.model.observation import Beat

_MOST, _MOST_S = 256, 5.0  # steps ahead, and seconds: what takes nodes longer to hear is no reason to wait for
_BEHIND_STEPS = 20  # a copy that has been under way for so many steps, and for `stuck_s`, does not keep up


class BackupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for copying snapshots to peers."""

    enabled: bool = True
    duty: float = 0.25  # of the time is at most spent copying; the next floor waits as long
    stuck_s: float = 60.0  # a copy that has not arrived by then is given up for a newer one
    bytes_s: int = 0  # a node sends at most so much per second; 0: as fast as it goes
    pacing: PacingChoice = PacingChoice.AUTO  # whether copies go into the gaps between a step's collectives
    copies: int = 1  # of each state, on as many nodes: 1 or 2
    parity: bool = False  # two copies are laid over one another, for half the memory
    verify_steps: int = 10  # a floor counts as verified when so many steps after it went well


class RecoveryFloor:
    def __init__(self, limits: BackupLimits, newest_equal: Callable[[], int | None], disk: DiskFloor) -> None:
        """`newest_equal` returns the newest step at which replicas were equal: -1 if unknown yet, None if none was."""
        self.limits = limits
        self.disk = disk
        self._newest_equal = newest_equal
        self.generation = 0
        self.floor = -1
        self.verified = -1
        self.peers: dict[str, str] = {}
        self.seconds: dict[str, str] = {}  # the other keeper of each node's copies, with two copies
        self.halves: dict[str, tuple[Half, Half]] = {}  # with parity
        self._seats: tuple[Seat, ...] = ()
        self._kept_by: dict[str, tuple[Seat, ...]] | None = None  # by keeper; None: not looked for yet
        self._next = -1
        self._aimed_at = 0.0
        self._due: tuple[float, int] | None = None  # since when, and from which step on, the next floor is due
        self.behind = ""  # why copies do not keep up with the job, in one sentence
        self.lone = ""  # whose copies lie on one peer though they are to lie on two, in one sentence
        self._not_before = 0.0
        self._ahead = 1  # steps from what nodes have to what they are told: they must hear it first
        self._well = 0  # floors in a row
        self._beats: dict[str, Beat] = {}
        self.nodes: frozenset[str] = frozenset()

    @property
    def copies(self) -> int:
        """The number of peers that have each state of the floor; with parity, one."""
        return 2 if self.seconds and not self.lone else 1

    def on_launch(self, generation: int, seats: tuple[Seat, ...], mesh: Dims) -> tuple[str, ...]:
        """Choose peers for a new generation. Return sentences on evictions that lose state, and on parity or second
        copies that are impossible."""
        self.generation, self.nodes, self._seats = generation, frozenset(seat.node for seat in seats), seats
        self.floor = self.verified = self._next = -1
        self.disk.on_launch()
        self._due, self.behind, self.lone = None, "", ""
        self._beats.clear()
        self.peers, self.seconds, self.halves, self._kept_by = {}, {}, {}, None
        if not self.limits.enabled:
            return ()
        why = ""
        if self.limits.parity:
            self.halves, why = place_halves(seats, mesh)
        if self.halves:
            self.peers = {node: first.keeper for node, (first, _) in self.halves.items()}
            return ()
        keepers, exposed = choose_keepers(seats, mesh, self.limits.copies)
        self.peers = {node: own[0] for node, own in keepers.items()}
        self.seconds = {node: own[1] for node, own in keepers.items() if len(own) > 1}
        return (why, *exposed) if why else exposed

    def on_beat(self, now: float, beat: Beat) -> bool:
        """Record a beat. Return whether the nodes must be sent a new aim."""
        if beat.generation != self.generation or beat.node not in self.nodes:
            return False
        self._beats[beat.node] = beat
        return self.tick(now)

    def tick(self, now: float) -> bool:
        """Update the floor from the nodes' newest reports. Return whether the nodes must be sent a new aim."""
        if len(self._beats) < len(self.nodes) or not self._beats or any(b.sealed < 0 for b in self._beats.values()):
            return False
        before = self.floor
        told = self._raise_floor(now) | self._verify_floor()
        good = self.verified if any(beat.verifies for beat in self._beats.values()) else self.floor
        told |= self.disk.tick(now, good, self._beats.values())
        self._compare_pace(now, self.floor != before)
        return told or self.floor != before

    def _compare_pace(self, now: float, raised: bool) -> None:
        """Record when the next floor became due. Set `behind` to a sentence if the copies on peers are long overdue and
        the job is many steps ahead of them."""
        newest = max(beat.sealed for beat in self._beats.values())
        if raised or self._due is None:
            self._due = (now, newest) if self._next >= 0 else None
            self.behind = "" if raised else self.behind
        elif self.peers and now >= self._due[0] + self.limits.stuck_s and newest >= self._due[1] + _BEHIND_STEPS:
            late = sorted(node for node, beat in self._beats.items() if beat.backed < self._next)
            named = ", ".join(late[:4]) + (" and more" if len(late) > 4 else "")
            has = f"they are of step {self.floor}" if self.floor >= 0 else "there are none yet"
            self.behind = f"copies on peers do not keep up: {has}, the job is at step {newest}"
            self.behind += f"; missing from {named}" if late else ""

    def aim_for(self, node: str) -> Aim:
        """Return the aim of one node. The caller has to add the addresses of its peers."""
        return Aim(
            generation=self.generation,
            floor=self.floor,
            next=self._next,
            verified=self.verified,
            peer=self.peers.get(node, ""),
            second=self.seconds.get(node, ""),
            halves=self.halves.get(node, ()),
            disk=self.disk.aim,
            disk_from=self.disk.oldest_kept,
            wards=self._wards_of(node),
        )

    def _wards_of(self, keeper: str) -> tuple[Seat, ...]:
        """Return the seats of all nodes whose copies are on the node `keeper`."""
        if self._kept_by is None:
            self._kept_by = {}
            for seat in self._seats:
                halves = {half.keeper for half in self.halves.get(seat.node, ())}
                for other in halves or {self.peers.get(seat.node, ""), self.seconds.get(seat.node, "")}:
                    self._kept_by[other] = (*self._kept_by.get(other, ()), seat)
        return self._kept_by.get(keeper, ())

    def _raise_floor(self, now: float) -> bool:
        backed = {beat.backed for beat in self._beats.values()}
        if self._next < 0:
            return self._aim_if_settled(now)
        if min(backed) < self._next:
            return now >= self._aimed_at + self.limits.stuck_s and self._set_next_aim(now)
        if len(backed) > 1:  # somebody heard of it too late and took a later one
            self._ahead, self._well = self._look_further(now), 0
            return self._set_next_aim(now)
        if self.halves and {beat.kept for beat in self._beats.values()} != backed:  # sent, and not yet sealed
            return now >= self._aimed_at + self.limits.stuck_s and self._set_next_aim(now)
        if not self._are_replicas_equal(*backed):
            return now >= self._aimed_at + self.limits.stuck_s and self._set_next_aim(now)
        self.floor, self._next = backed.pop(), -1
        self.lone = self._describe_lone()
        self._well += 1
        if self._well % 8 == 0:
            self._ahead = max(1, self._ahead - 1)
        self._not_before = now + max(self._rest_after(beat) for beat in self._beats.values())
        return self._aim_if_settled(now)

    def _rest_after(self, beat: Beat) -> float:
        """Return how long a node's next copy is to wait after the one that the beat tells of."""
        return beat.backing_rest_s if beat.backing_rest_s >= 0 else beat.backing_s * (1 / self.limits.duty - 1)

    @property
    def pacing(self) -> str:
        """How the newest copies were paced: "gaps", or "duty" with the reason of some node; "" before the first."""
        told = sorted({beat.pacing for beat in self._beats.values() if beat.pacing})
        return next((one for one in told if one != "gaps"), told[0] if told else "")

    @property
    def age_steps(self) -> int:
        """How many steps the newest snapshot is ahead of the floor, as beats have told; -1 if there is no floor."""
        newest = max((beat.sealed for beat in self._beats.values()), default=-1)
        return max(0, newest - self.floor) if self.floor >= 0 else -1

    def _describe_lone(self) -> str:
        """Return in one sentence whose copies of the floor lie on one of two peers; "" if both have all of them."""
        short = sorted((beat.node, beat.absent) for beat in self._beats.values() if beat.absent)
        named = ", ".join(f"{absent} does not take those of {node}" for node, absent in short[:4])
        return f"some states have one copy instead of two: {named}{' and more' * (len(short) > 4)}" if short else ""

    def _look_further(self, now: float) -> int:
        """Return how many steps ahead to aim next: twice as many as now, but at most what ranks make in a fixed
        time."""
        made = max(beat.sealed for beat in self._beats.values()) + self._ahead - self._next
        timely = ceil(made / max(now - self._aimed_at, 0.01) * _MOST_S)
        return max(2, min(2 * self._ahead, _MOST, timely))

    def _are_replicas_equal(self, step: int) -> bool:
        """Return whether replicas were equal up to this step; True if replicas are not compared."""
        equal = self._newest_equal() if any(beat.compares for beat in self._beats.values()) else None
        return equal is None or equal >= step

    def _aim_if_settled(self, now: float) -> bool:
        """Set the next aim if it is due. If ranks want verified states kept, the floor must be verified before that."""
        settled = self.verified == self.floor or not any(beat.verifies for beat in self._beats.values())
        return settled and now >= self._not_before and self._set_next_aim(now)

    def _set_next_aim(self, now: float) -> bool:
        self._next, self._aimed_at = max(beat.sealed for beat in self._beats.values()) + self._ahead, now
        return True

    def _verify_floor(self) -> bool:
        beats = self._beats.values()
        if self.floor <= self.verified or any(b.loss is not None and not isfinite(b.loss) for b in beats):
            return False
        if min(beat.step for beat in beats) < self.floor + self.limits.verify_steps:
            return False
        self.verified = self.floor
        return True
