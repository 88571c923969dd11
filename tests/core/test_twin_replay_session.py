"""Two halves of real geometry, against every node that can be wrong."""

import pytest

from holdfast.core.replay.majority import GroupResult
from holdfast.core.replay.node_grid import UnfitError
from holdfast.core.replay.regrouped_replay import ReplayLimits, ReplayRuling, RulingKind
from holdfast.core.replay.regrouped_session import GroupLaunch, ReplayRequest
from holdfast.core.replay.twin_replay_session import TwinSession
from holdfast.model.job_and_seats import Dims, Seat

LIMITS = ReplayLimits(steps=4, most=8)


def asked(count: int, nproc: int = 1, mesh: Dims = ()) -> ReplayRequest:
    seats = tuple(Seat(node=f"n{x}", group_rank=x, first_rank=x * nproc, nproc=nproc) for x in range(count))
    return ReplayRequest(seats=seats, mesh=mesh, seeded=True, steps=LIMITS.steps)


class Machines:
    """Work as a group does it: what a rank sends is passed on along its pipeline, and summed over replicas after it."""

    def __init__(self, bad: str = "", *, strikes: int = 1, after_sum: bool = False, signs: bool = True) -> None:
        self.bad, self.after_sum, self.signs = bad, after_sum, signs
        self.strikes = strikes  # the work of the bad one is wrong in its n-th group, and never again
        self.seen = 0
        self.groups: list[tuple[str, ...]] = []

    def work(self, launch: GroupLaunch) -> GroupResult:
        nodes, nproc = launch.group.nodes, launch.seats[0].nproc
        self.groups.append(nodes)
        self.seen += self.bad in nodes
        wrong_at = 10 + launch.replay.steps - 1 if self.bad in nodes and self.seen == self.strikes else -1
        marks, signed, spoilt = {}, {}, set[int]()
        for step in range(10, 10 + launch.replay.steps):
            struck = {r for r in range(launch.world_size) if step == wrong_at and nodes[r // nproc] == self.bad}
            sent = set() if self.after_sum else self._passed_on(launch, struck)
            spoilt = set(range(launch.world_size)) if sent else spoilt | struck
            for rank in range(launch.world_size):
                signed[step, rank] = 1000 * step + rank + 7 * (rank in sent)
                marks[step, rank] = 10**6 * step + rank + 7 * (rank in spoilt)
        return GroupResult(marks=marks, signed=signed if self.signs else {})

    def _passed_on(self, launch: GroupLaunch, struck: set[int]) -> set[int]:
        """Later stages of the same replica inherit it as activations, and earlier ones as gradients."""
        if not launch.mesh:
            return struck
        (_, stages), (_, replicas) = launch.mesh  # pp, dp
        return {s * replicas + r % replicas for r in struck for s in range(stages)}


def run(session: TwinSession, machines: Machines) -> ReplayRuling:
    for _ in range(100):
        wave = session.next_launches()
        if isinstance(wave, ReplayRuling):
            return wave
        for launch in wave:
            session.on_group_result(launch.replay.name, machines.work(launch))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("after_sum", [False, True])
@pytest.mark.parametrize(
    ("count", "nproc", "mesh"),
    [
        (4, 1, ()),
        (3, 1, ()),
        (6, 2, ()),
        (8, 1, (("pp", 2), ("dp", 4))),
        (4, 1, (("pp", 2), ("dp", 2))),
        (8, 2, (("pp", 2), ("dp", 8))),
        (7, 1, ()),
    ],
)
def test_every_node_is_named_though_it_strikes_once(count: int, nproc: int, mesh: Dims, after_sum: bool) -> None:
    for seat in asked(count, nproc, mesh).seats:
        machines = Machines(seat.node, after_sum=after_sum)
        ruling = run(TwinSession(asked(count, nproc, mesh), LIMITS), machines)
        if mesh and not after_sum:  # whoever has it from the other stage cannot be told from who began
            assert ruling.how is (RulingKind.SOME if count > 4 else RulingKind.EVERYWHERE), (
                "of two replicas both differ all over"
            )
            assert seat.node in ruling.nodes if ruling.nodes else count == 4
            continue
        assert (ruling.how, ruling.nodes) == (RulingKind.ONE, (seat.node,)), ruling
        assert machines.seen <= 1 or seat.node not in machines.groups[-1], "who is in doubt is no referee"
        assert len(set(machines.groups[-1])) == len(machines.groups[-1]), "nobody sits twice"


def test_a_fault_that_shows_late_is_still_seen() -> None:
    machines = Machines("n5", strikes=3)
    assert run(TwinSession(asked(6), LIMITS), machines).nodes == ("n5",)


def test_nobody_within_the_budget() -> None:
    machines = Machines()
    ruling = run(TwinSession(asked(6), LIMITS), machines)
    assert ruling.how is RulingKind.NOBODY and " 32 steps" in ruling.reason
    assert len(machines.groups) == 2 * 4, "4, 8, 16 and the 4 that are left"


def test_a_machine_that_is_always_wrong() -> None:
    class Always(Machines):
        def work(self, launch: GroupLaunch) -> GroupResult:
            self.strikes = self.seen + 1
            return super().work(launch)

    assert run(TwinSession(asked(4), LIMITS), Always("n1")).nodes == ("n1",)


def test_a_sharded_state_that_differs_does_not_accuse_who_keeps_it() -> None:
    """What one computed wrongly, and nobody signed, may lie on another after a reduce-scatter."""

    class Sharded(Machines):
        def work(self, launch: GroupLaunch) -> GroupResult:
            step = 10 + launch.replay.steps - 1
            right = {place: value - value % 10**6 + place[1] for place, value in super().work(launch).marks.items()}
            if "n1" in launch.group.nodes:
                right[step, 1 - launch.group.nodes.index("n1")] += 7
            return GroupResult(marks=right)

    ruling = run(TwinSession(asked(4), LIMITS), Sharded("n1"))
    assert ruling.how is RulingKind.SOME and set(ruling.nodes) == {"n0", "n1", "n2", "n3"}


def test_an_odd_number_of_replicas_is_watched_all_round() -> None:
    ruling = run(TwinSession(asked(3), ReplayLimits(steps=20, most=20)), Machines())
    assert ruling.how is RulingKind.NOBODY and ruling.unheard == ()
    assert " 220 steps" in ruling.reason, "of 400, those in which the least watched was"


def test_without_signed_sums_several_replicas_cannot_be_told_apart() -> None:
    ruling = run(TwinSession(asked(6), LIMITS), Machines("n2", signs=False))
    assert (ruling.how, ruling.nodes) == (RulingKind.EVERYWHERE, ())
    assert run(TwinSession(asked(3), LIMITS), Machines("n1", signs=False)).nodes == ("n1",)


def test_a_half_that_fails_is_for_others_to_look_into() -> None:
    session = TwinSession(asked(4), LIMITS)
    wave = session.next_launches()
    assert not isinstance(wave, ReplayRuling)
    for launch in wave:
        session.on_group_result(launch.replay.name, GroupResult(failed="n3" in launch.group.nodes))
    ruling = session.next_launches()
    assert isinstance(ruling, ReplayRuling) and (ruling.how, ruling.nodes) == (RulingKind.SOME, ("n2", "n3"))


def test_a_half_that_nobody_heard_of() -> None:
    session = TwinSession(asked(4), LIMITS)
    wave = session.next_launches()
    assert not isinstance(wave, ReplayRuling)
    for launch in wave:
        session.on_group_result(launch.replay.name, None)
    ruling = session.next_launches()
    assert isinstance(ruling, ReplayRuling) and ruling.how is RulingKind.SOME


def test_two_wrong_at_once_accuse_no_single_one() -> None:
    class Two(Machines):
        def _passed_on(self, launch: GroupLaunch, struck: set[int]) -> set[int]:
            return struck | {launch.group.nodes.index("n1")} if struck and "n1" in launch.group.nodes else struck

    ruling = run(TwinSession(asked(8), LIMITS), Two("n0"))
    assert ruling.how is RulingKind.SOME and {"n0", "n1"} <= set(ruling.nodes)


@pytest.mark.parametrize(
    ("count", "mesh", "why"),
    [
        (1, (), "no two halves"),
        (2, (), "no third node"),
        (6, (("pp", 6), ("dp", 1)), "no two halves"),
    ],
)
def test_what_has_no_halves(count: int, mesh: Dims, why: str) -> None:
    with pytest.raises(UnfitError, match=why):
        TwinSession(asked(count, 1, mesh), LIMITS)
