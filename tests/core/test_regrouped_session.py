"""From seats to groups that replay."""

from math import prod

import msgspec
import pytest

from holdfast.core.replay.majority import GroupResult
from holdfast.core.replay.node_grid import UnfitError
from holdfast.core.replay.regrouped_replay import DualPhaseReplay, ReplayLimits, ReplayRuling, ReplayWave, RulingKind
from holdfast.core.replay.regrouped_session import GroupLaunch, GroupSession, ReplayRequest, plan_replay, wave_launches
from holdfast.model.job_and_seats import Dims, Seat


def seats(count: int, nproc: int = 8) -> tuple[Seat, ...]:
    return tuple(Seat(node=f"n{x}", group_rank=x, first_rank=x * nproc, nproc=nproc) for x in range(count))


def first_wave(count: int, mesh: Dims, nproc: int = 8) -> ReplayWave:
    wave = DualPhaseReplay(plan_replay(seats(count, nproc), mesh), ReplayLimits()).next_wave()
    assert isinstance(wave, ReplayWave)
    return wave


def test_groups_are_numbered_from_zero_and_keep_tensor_and_pipeline_parallelism() -> None:
    mesh = (("pp", 2), ("dp", 6), ("tp", 8))
    wave = first_wave(12, mesh)
    found = wave_launches(wave, seats(12), mesh, steps=5, not_after=300)
    assert len(found) == 6
    for launch in found:
        assert [seat.first_rank for seat in launch.seats] == [0, 8]
        assert [seat.group_rank for seat in launch.seats] == [0, 1]
        assert tuple(seat.node for seat in launch.seats) == launch.group.nodes
        assert launch.world_size == 16 == prod(size for _, size in launch.mesh)
        assert launch.mesh == (("pp", 2), ("dp", 1), ("tp", 8))
        assert (launch.replay.steps, launch.replay.not_after) == (5, 300)
    assert len({launch.replay.name for launch in found}) == 6
    assert found[0].replay.name == "1-1-h0"


def test_all_groups_have_the_same_size_whatever_is_left_over() -> None:
    made = plan_replay(seats(13), ())
    assert len(made.first) == 2
    sizes = {len(nodes) for wave in (*made.first, *made.second) for _, nodes in wave}
    assert sizes == {3}


def test_suspects_alone_where_they_are_enough() -> None:
    few = plan_replay(seats(24), (), suspects=("n3", "n5", "n20"))
    assert {node for _, nodes in few.first[0] for node in nodes} == {"n3", "n5", "n20"}
    assert plan_replay(seats(24), (), suspects=("n3", "n5")) == plan_replay(seats(24), ())
    mesh = (("pp", 2), ("dp", 12), ("tp", 8))
    assert plan_replay(seats(24), mesh, suspects=("n3", "n5", "n20")) == plan_replay(seats(24), mesh)


def test_what_cannot_be_replayed() -> None:
    with pytest.raises(UnfitError, match="that takes 16"):
        plan_replay(seats(8), (("pp", 4), ("dp", 2), ("tp", 8)))
    *others, last = seats(3)
    assert plan_replay((*others, last), ()).n == 3
    with pytest.raises(UnfitError, match=r"^nodes .* ranks "):
        plan_replay((*others, msgspec.structs.replace(last, nproc=4)), ())


def test_a_mesh_of_another_size_tells_nothing() -> None:
    assert plan_replay(seats(6), (("pp", 64), ("tp", 8))) == plan_replay(seats(6), ())


def work(launch: GroupLaunch, bad: str = "") -> GroupResult:
    """Every rank signs what follows from its number alone, but for the bad node's group."""
    wrong = 1 if bad in launch.group.nodes else 0
    return GroupResult(
        marks={(step, rank): 100 * step + rank + wrong for step in (1, 2) for rank in range(launch.world_size)}
    )


def asked_of(session: GroupSession) -> tuple[GroupLaunch, ...]:
    asked = session.next_launches()
    assert not isinstance(asked, ReplayRuling)
    return asked


@pytest.mark.parametrize("count", [9, 12, 13])
def test_a_session_names_every_node(count: int) -> None:
    for bad in (f"n{x}" for x in range(count)):
        session = GroupSession(ReplayRequest(seats=seats(count), seeded=True), ReplayLimits(q=1.0))
        while not isinstance(asked := session.next_launches(), ReplayRuling):
            for launch in asked:
                session.on_group_result(launch.replay.name, work(launch, bad))
        assert (asked.how, asked.nodes) == (RulingKind.ONE, (bad,))


def test_a_session_waits_for_all_of_a_wave() -> None:
    session = GroupSession(ReplayRequest(seats=seats(12), seeded=True), ReplayLimits(q=1.0))
    first = asked_of(session)
    assert [launch.replay.name for launch in first] == ["1-1-h0", "1-1-h1", "1-1-h2", "1-1-h3"]
    session.on_group_result("1-1-h0", work(first[0], "n4"))
    session.on_group_result("1-1-h0", GroupResult(failed=True))  # it has been told already
    session.on_group_result("1-7-h0", GroupResult(failed=True))  # nobody asked
    assert asked_of(session) == first[1:]
    session.on_group_result("1-1-h1", work(first[1], "n4"))
    session.on_group_result("1-1-h2", None)
    session.on_group_result("1-1-h3", work(first[3], "n4"))
    again = asked_of(session)
    assert [launch.replay.name for launch in again] == ["1-1-h2-2"], "its folder is another one"
    session.on_group_result("1-1-h2", work(first[2], "n4"))  # late, by the old name
    session.on_group_result("1-1-h2-2", work(again[0], "n4"))
    assert [launch.group.phase for launch in asked_of(session)] == [2, 2, 2, 2]


def test_two_that_differ_are_run_again() -> None:
    session = GroupSession(ReplayRequest(seats=seats(9), seeded=True), ReplayLimits(q=1.0))
    for launch, told in zip(first := asked_of(session), (True, True, False), strict=True):
        session.on_group_result(launch.replay.name, work(launch, "n4") if told else None)
    assert [launch.group for launch in asked_of(session)] == [launch.group for launch in first]


def test_without_a_seed_only_failures_count() -> None:
    def rule(told: GroupResult) -> ReplayRuling:
        session = GroupSession(ReplayRequest(seats=seats(9)), ReplayLimits(most=2))
        while not isinstance(asked := session.next_launches(), ReplayRuling):
            for launch in asked:
                session.on_group_result(launch.replay.name, told if "n5" in launch.group.nodes else GroupResult())
        return asked

    assert rule(GroupResult(marks={(1, 0): 9})).how is RulingKind.NOBODY
    for told in (GroupResult(failed=True), GroupResult(bad_step=3)):
        assert rule(told).nodes == ("n5",)


def test_work_that_is_not_the_same_twice_is_not_compared_for_long() -> None:
    session = GroupSession(ReplayRequest(seats=seats(9), seeded=True), ReplayLimits(most=2))
    runs = 0
    while not isinstance(asked := session.next_launches(), ReplayRuling):
        for launch in asked:
            runs += 1
            failed = "n5" in launch.group.nodes and runs > 3
            session.on_group_result(launch.replay.name, GroupResult(failed=failed, marks={(1, 0): runs}))
    assert session.unlike and asked.nodes == ("n5",)
    assert runs == 9, "two repeats of the first phase, one of the second"
