"""Which snapshots a node pins and sends: told by lists of what is sealed, without memory or links."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.snapshots.floor_pins_and_copies import (
    AimReceived,
    ArenaGranted,
    CopyParcel,
    FloorDeed,
    FloorNews,
    GenerationBegun,
    MarkVerified,
    NodeFloor,
    OwnSnapshot,
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
from holdfast.model.copy_aim import Aim, Half


def snap(step: int, rank: int = 0, generation: int = 1, arena: int = 1) -> OwnSnapshot:
    return OwnSnapshot(rank=rank, arena=arena, seq=2 * step, step=step, generation=generation)


class Node:
    """The machine, and the pins of a shell that does at once what it is told."""

    def __init__(self, ranks: int = 1, verifies: bool = False, slots: int = 4) -> None:
        self.floor = NodeFloor()
        self.pinned: set[OwnSnapshot] = set()
        self.refused: set[OwnSnapshot] = set()
        self.done: list[FloorDeed] = []
        self.now = 0.0
        self.ranks = ranks
        self.verifies, self.slots = verifies, slots
        self.begin(1)

    def begin(self, generation: int, shared_step: int = -1, *sealed: OwnSnapshot) -> None:
        self.hear(GenerationBegun(generation=generation, ranks=self.ranks, shared_step=shared_step))
        for rank in range(self.ranks):
            own = tuple(one for one in sealed if one.rank == rank)
            self.hear(ArenaGranted(rank=rank, slots=self.slots, verifies=self.verifies, sealed=own))

    def hear(self, news: FloorNews) -> None:
        for deed in self.floor.step(self.now, news):
            self.done.append(deed)
            match deed:
                case UnpinSnapshot(one):
                    self.pinned.remove(one)
                case PinSnapshot(one) if one in self.refused:
                    assert self.floor.step(self.now, PinRefused(one)) == ()
                case PinSnapshot(one):
                    assert one not in self.pinned, "pinned twice"
                    self.pinned.add(one)
        assert self.pinned == set(self.floor.held_snapshots())

    def aim(self, *sealed: OwnSnapshot, **fields: object) -> None:
        self.hear(AimReceived(aim=msgspec.structs.replace(self.floor.aim, **fields), sealed=sealed))

    def send(self, *sealed: OwnSnapshot) -> bool:
        """List snapshots, and send them if they are ready."""
        self.hear(SnapshotsListed(sealed=sealed))
        if not self.floor.is_next_ready():
            return False
        self.hear(SendingBegun())
        for parcel in self.floor.open_parcels():
            self.hear(ParcelArrived(parcel))
        self.hear(SendingEnded())
        return True


def test_a_step_is_held_sent_and_becomes_the_floor() -> None:
    node = Node()
    node.aim(peer="b", next=5)
    assert not node.send(snap(4)) and not node.pinned
    node.hear(SnapshotsListed(sealed=(snap(6), snap(5))))
    assert node.pinned == {snap(5)}, "the first that will do"
    node.hear(SendingBegun())
    assert node.floor.open_parcels() == [CopyParcel(snapshot=snap(5), to="b", at=("", 0))]
    node.hear(ParcelArrived(node.floor.open_parcels()[0]))
    node.now = 0.5
    node.hear(SendingEnded())
    assert (node.floor.backed, node.floor.took_s, node.done[-1]) == (5, 0.5, ReportBacked())
    node.aim(snap(7), snap(5), floor=5, next=-1)
    assert node.pinned == {snap(5)}
    node.aim(snap(20), snap(5), next=20)
    assert node.send(snap(20), snap(5)) and node.pinned == {snap(5), snap(20)}
    node.aim(snap(20), snap(5), floor=20, next=-1)
    assert node.pinned == {snap(20)}


def test_ranks_agree_on_the_step() -> None:
    """One of two ranks had gone on before anybody looked."""
    node = Node(ranks=2)
    node.aim(peer="b", next=5)
    assert not node.send(snap(7, 0), snap(6, 0), snap(8, 1), snap(7, 1))
    assert node.send(snap(7, 0), snap(6, 0), snap(8, 1), snap(7, 1))
    assert node.floor.backed == 7 and node.pinned == {snap(7, 0), snap(7, 1)}


def test_what_cannot_be_pinned_is_not_held() -> None:
    node = Node(ranks=2)
    node.refused = {snap(5, 1)}
    node.aim(peer="b", next=5)
    assert not node.send(snap(5, 0), snap(5, 1)) and node.pinned == {snap(5, 0)}
    assert PinSnapshot(snap(5, 1), spare=True) in node.done, "only while the rank keeps slots enough"
    node.refused = set()
    assert node.send(snap(5, 0), snap(5, 1))


def test_a_copy_that_did_not_arrive_does_not_count() -> None:
    node = Node()
    node.aim(peer="b", next=5)
    node.hear(SnapshotsListed(sealed=(snap(5),)))
    node.hear(SendingBegun())
    node.hear(SendingEnded())
    assert node.floor.backed == -1 and node.floor.is_next_ready(), "it is sent again"


def test_who_has_no_peer_needs_no_copy() -> None:
    node = Node(verifies=True)
    node.aim(next=5)
    assert node.send(snap(5)) and node.floor.backed == 5


def test_a_newer_aim_ends_what_is_being_sent() -> None:
    node = Node()
    node.aim(peer="b", next=5)
    node.hear(SnapshotsListed(sealed=(snap(5),)))
    node.hear(SendingBegun())
    node.aim(snap(5), next=9)
    assert node.floor.sending and node.floor.sending.cancelled and not node.pinned
    assert not node.floor.wants_next(), "not before the old one has ended"
    node.hear(SendingEnded())
    assert node.floor.backed == -1 and node.send(snap(9)) and node.floor.backed == 9


def test_a_checkpoint_gets_the_slot_of_the_next_floor() -> None:
    node = Node()
    node.aim(peer="b", next=5)
    node.hear(SnapshotsListed(sealed=(snap(5),)))
    node.hear(SlotNeeded())
    assert not node.pinned
    node.hear(SendingBegun())
    assert node.floor.sending is None, "it was given up before its turn came"


def test_a_floor_that_checkpoints_keep_waiting_takes_a_slot_of_the_rank() -> None:
    """Storage is full or slow: at any time some checkpoint holds a slot."""
    node = Node()
    node.refused = {snap(step) for step in range(5, 9)}
    node.aim(peer="b", next=5)
    for tenth in range(10):
        node.now = tenth / 10
        node.hear(SnapshotsListed(sealed=(snap(5),)))
    assert not node.floor.is_late(node.now), "a write that takes as long costs no rank its newest snapshot"
    node.now = 1.1
    node.hear(SnapshotsListed(sealed=(snap(8),)))
    assert node.floor.is_late(node.now)
    node.hear(SnapshotsListed(sealed=(snap(9),)))
    assert node.done[-1] == PinSnapshot(snap(9), spare=True, late=True) and node.send(snap(9))
    node.aim(snap(9), floor=9, next=10)
    node.hear(SnapshotsListed(sealed=(snap(10),)))
    assert node.done[-1] == PinSnapshot(snap(10), spare=True, late=True), "and at once the next time"
    node.now = 90.0
    assert not node.floor.is_late(node.now), "until the trouble may be over"


def test_who_missed_the_step_for_want_of_a_slot_does_so_once() -> None:
    """Or nodes would hold different steps again and again."""
    node = Node()
    node.refused = {snap(5)}
    node.aim(peer="b", next=5)
    node.hear(SnapshotsListed(sealed=(snap(5),)))
    assert node.send(snap(6)) and node.floor.backed == 6 and node.floor.is_late(node.now)


def test_copies_slower_than_checkpoints_are_late_too() -> None:
    node = Node()
    node.aim(peer="b", next=5)
    for second in range(3):
        node.now = float(second)
        node.hear(SnapshotsListed(sealed=(snap(5 + second),)))
        node.hear(SlotNeeded())
    assert node.floor.is_late(node.now)


def test_an_aim_of_another_generation_is_not_heard() -> None:
    node = Node()
    node.hear(AimReceived(aim=Aim(generation=2, peer="b", floor=5, next=9), sealed=(snap(5),)))
    assert node.floor.aim == Aim(generation=1) and not node.pinned


def test_the_floor_before_stays_until_the_new_one_is_verified() -> None:
    node = Node(verifies=True)
    node.aim(snap(5), peer="b", floor=5)
    node.aim(snap(9), snap(5), floor=9)
    assert node.pinned == {snap(5), snap(9)}
    node.aim(snap(9), snap(5), verified=9)
    assert node.pinned == {snap(9)} and MarkVerified(snap(9)) in node.done


def test_a_generation_that_goes_on_from_an_older_step_frees_the_floor() -> None:
    node = Node()
    node.aim(snap(5), peer="b", floor=5)
    node.begin(2, 5, snap(5))
    assert node.pinned == {snap(5)} and node.floor.backed == -1
    node.begin(3, 4)
    assert not node.pinned


def test_memory_of_another_layout_and_damaged_snapshots_are_no_floor() -> None:
    for found in ((), (snap(5, arena=2),)):
        node = Node()
        node.aim(snap(5), peer="b", floor=5)
        node.begin(2, 5, *found)
        assert not node.pinned


def test_a_keeper_of_halves_that_starts_anew_gets_them_again() -> None:
    halves = (Half(keeper="b", beside=1), Half(keeper="c", beside=2))
    node = Node()
    node.aim(peer="b", halves=halves, next=5)
    assert node.send(snap(5)) and node.floor.backed == 5
    node.aim(snap(5), halves=(msgspec.structs.replace(halves[0], keeper_at=("new", 1)), halves[1]))
    assert node.floor.backed == -1
    pairs = [(parcel.to, parcel.half, parcel.pair) for parcel in node.floor.open_parcels()]
    assert pairs == [("b", 0, (0, 1)), ("c", 1, (2, 0))]


class Sender(Node):
    """A node with two peers, some of which cannot be reached."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(ranks)
        self.away: set[str] = set()
        self.sent: list[str] = []
        self.aim(peer="b", second="c")

    def copy(self, step: int, within_s: float) -> bool:
        """Aim at a step and send it as the shell does, which tries again every second. Return whether it counts."""
        self.aim(next=step)
        self.hear(SnapshotsListed(sealed=tuple(snap(step, rank) for rank in range(self.ranks))))
        self.hear(SendingBegun())
        until = self.now + within_s
        while self.now < until and (parcels := self.floor.next_parcels(self.now)):
            for parcel in parcels:
                self.sent.append(parcel.to)
                self.hear(ParcelFailed(parcel) if parcel.to in self.away else ParcelArrived(parcel))
            self.now += any(parcel.to in self.away for parcel in parcels)
        self.hear(SendingEnded())
        return self.floor.backed == step


def test_two_peers_get_the_same_snapshot_one_after_the_other() -> None:
    node = Sender(ranks=2)
    node.aim(next=5)
    assert node.copy(5, 1.0) and node.sent == ["b", "b", "c", "c"] and not node.floor.absent
    assert node.pinned == {snap(5, 0), snap(5, 1)}


def test_what_one_of_two_peers_has_does_not_count_while_the_other_may_take_it() -> None:
    node = Sender()
    node.away = {"c"}
    assert not node.copy(5, 9.0) and node.floor.backed == -1
    node.away = set()
    assert node.copy(6, 1.0) and not node.floor.absent


def test_a_peer_that_is_long_away_is_named_and_not_waited_for_and_asked_again() -> None:
    node = Sender()
    node.away = {"b"}
    assert node.copy(5, 30.0) and node.floor.absent == "b" and node.now <= 12.0
    node.sent.clear()
    node.now += 1.0
    assert node.copy(20, 30.0) and node.sent == ["c"], "not at once"
    node.now += 10.0
    node.sent.clear()
    assert node.copy(30, 30.0) and node.sent == ["c", "b"] and node.floor.absent == "b"
    node.away, node.now = set(), node.now + 10.0
    assert node.copy(40, 1.0) and node.floor.absent == ""


def test_without_any_copy_no_step_counts() -> None:
    node = Sender()
    node.away = {"b", "c"}
    assert not node.copy(5, 100.0) and {"b", "c"} == {*node.sent}
    node.away = {"b"}
    assert node.copy(6, 5.0) and node.floor.absent == "b"


def test_a_peer_that_lacks_the_copy_of_one_rank_lacks_the_step() -> None:
    node = Sender(ranks=2)
    node.aim(next=5)
    node.hear(SnapshotsListed(sealed=(snap(5, 0), snap(5, 1))))
    node.hear(SendingBegun())
    for parcel in node.floor.open_parcels():
        if (parcel.to, parcel.snapshot.rank) != ("c", 1):
            node.hear(ParcelArrived(parcel))
    node.hear(SendingEnded())
    assert node.floor.backed == -1
    assert [(parcel.to, parcel.snapshot.rank) for parcel in node.floor.next_parcels(node.now)] == [("c", 1)]


def test_the_step_that_all_ranks_share() -> None:
    node = Node(ranks=2)
    sealed = (snap(8, 0), snap(7, 0), snap(7, 1), snap(9, 1, generation=0))
    assert node.floor.shared_step(sealed) == -1, "nobody copies them"
    node.aim(peer="b")
    assert node.floor.shared_step(sealed) == 7 and node.floor.shared_step(sealed[:2]) == -1
    poor = Node(slots=2)
    poor.aim(peer="b")
    assert poor.floor.lacks_slots() and poor.floor.shared_step((snap(7),)) == -1


steps = st.integers(0, 6)
sealed_lists = st.lists(st.builds(snap, steps, st.integers(0, 1)), unique=True, max_size=6).map(tuple)
aims = st.builds(
    Aim,
    generation=st.just(1),
    floor=st.integers(-1, 6),
    next=st.integers(-1, 6),
    verified=st.integers(-1, 6),
    peer=st.sampled_from(["", "b", "c"]),
    second=st.sampled_from(["", "d"]),
)
parcels = st.builds(CopyParcel, snapshot=st.builds(snap, steps), to=st.sampled_from("bcd"), at=st.just(("", 0)))
all_news = st.one_of(
    st.builds(AimReceived, aim=aims, sealed=sealed_lists),
    st.builds(SnapshotsListed, sealed=sealed_lists),
    st.builds(ArenaGranted, rank=st.integers(0, 1), slots=st.just(4), verifies=st.booleans(), sealed=sealed_lists),
    st.builds(GenerationBegun, generation=st.just(1), ranks=st.just(2), shared_step=steps),
    st.sampled_from([SlotNeeded(), SendingBegun(), SendingEnded()]),
    st.builds(ParcelArrived, parcels),
    st.builds(ParcelFailed, parcels),
)


@settings(max_examples=100)
@given(heard=st.lists(all_news, max_size=25), refused=st.sets(st.builds(snap, steps, st.integers(0, 1)), max_size=3))
def test_whatever_is_heard_pins_and_unpins_are_in_balance(heard: list[FloorNews], refused: set[OwnSnapshot]) -> None:
    """`Node.hear` looks after every deed: nothing is pinned twice or let go unpinned, and what is held is pinned."""
    node = Node(ranks=2)
    node.refused = refused
    for news in heard:
        node.hear(news)
    node.begin(2)
    assert not node.pinned, "a generation that starts from nothing holds nothing"
