"""One node: links break, errands repeat, ranks end; nothing is lost and nothing is done twice."""

import pytest

from holdfast.core.detect.crash import alarm_of
from holdfast.core.node import (
    Acked,
    Carried,
    Carry,
    Clock,
    Deed,
    Exited,
    Intend,
    Judge,
    Judged,
    Linked,
    NodeLife,
    NodeLimits,
    Noticed,
    Post,
    Remember,
    Send,
    Told,
    Unlinked,
)
from holdfast.logs import catalog
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.errand import Done, Errand, LaunchHere, Leave, StopHere
from holdfast.model.event import Ended
from holdfast.model.signal import Exit
from holdfast.model.topology import Seat

CATALOG = catalog.load()


def life(*, linked: bool = True) -> NodeLife:
    node = NodeLife("n0", NodeLimits(lost_s=60.0), 0.0)
    if linked:
        node.step(0.0, Linked())
    return node


def launch(id: int, generation: int) -> LaunchHere:
    seat = Seat(node="n0", group_rank=0, first_rank=2, nproc=2)
    return LaunchHere(
        id=id, generation=generation, seat=seat, world_size=4, group_world_size=2, store_host="h", store_port=1,
        run_id="r", max_restarts=0,
    )  # fmt: skip


def stop(id: int, generation: int) -> StopHere:
    return StopHere(id=id, generation=generation, grace_s=1.0)


def leave(id: int) -> Leave:
    return Leave(id=id, code=0, grace_s=1.0, reason="done")


def exited(rank: int, code: int, generation: int = 1) -> Exited:
    return Exited(Exit(node="n0", generation=generation, rank=rank, code=code, at=1.0))


def do(node: NodeLife, errand: Errand) -> tuple[Deed, ...]:
    assert node.step(1.0, Told(errand)) == (Carry(errand),)
    return node.step(1.0, Carried(errand, True))


def end(node: NodeLife, rank: int, code: int, generation: int = 1) -> tuple[Deed, ...]:
    """A rank ends, and what it said is judged at once."""
    deeds = node.step(2.0, exited(rank, code, generation))
    return tuple(more for deed in deeds for more in (judged(node, deed) if isinstance(deed, Judge) else (deed,)))


def judged(node: NodeLife, asked: Judge) -> tuple[Deed, ...]:
    return node.step(2.0, Judged(asked.exit, alarm_of(asked.exit, CATALOG)))


def bodies(deeds: tuple[Deed, ...]) -> list[Alarm | Ended | Done]:
    return [deed.post.body for deed in deeds if isinstance(deed, Send)]


def test_an_errand_is_carried_remembered_and_answered() -> None:
    done = Done(id=1, node="n0", ok=True)
    assert do(life(), launch(1, 1)) == (Remember(done), Send(Post(seq=1, body=done)))


def test_a_failed_errand_says_why() -> None:
    node, errand = life(), launch(1, 1)
    node.step(1.0, Told(errand))
    assert bodies(node.step(1.0, Carried(errand, False, "no memory"))) == [
        Done(id=1, node="n0", ok=False, detail="no memory")
    ]


def test_an_errand_told_again_while_it_is_being_carried_is_not_begun_again() -> None:
    node = life()
    node.step(1.0, Told(launch(1, 1)))
    assert node.step(1.1, Told(launch(1, 1))) == ()


def test_an_errand_told_again_afterwards_is_answered_not_redone() -> None:
    node = life()
    do(node, launch(1, 1))
    assert bodies(node.step(2.0, Told(launch(1, 1)))) == [Done(id=1, node="n0", ok=True)]


def test_the_next_agent_knows_what_the_last_one_did() -> None:
    node = life()
    node.recall((Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=True)), 1, (2, 3), 1)
    assert bodies(node.step(2.0, Told(stop(2, 1)))) == [Done(id=2, node="n0", ok=True)]
    assert node.step(2.0, exited(2, -9)) == ()  # we stopped that generation


def test_the_next_agent_watches_on() -> None:
    node = life()
    node.recall((Done(id=1, node="n0", ok=True),), 1, (2, 3), 0)
    assert node.step(2.0, exited(2, 0)) == ()
    assert bodies(node.step(2.0, exited(3, 0))) == [Ended(node="n0", generation=1)]


def test_a_stop_is_answered_with_who_had_ended_well() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(2.0, exited(2, 0))
    node.step(2.1, Told(stop(2, 1)))
    (answer,) = bodies(node.step(2.2, Carried(stop(2, 1), True)))
    assert answer == Done(id=2, node="n0", ok=True, departed=(2,))
    do(node, launch(3, 2))
    node.step(3.0, Told(stop(4, 2)))
    (answer,) = bodies(node.step(3.1, Carried(stop(4, 2), True)))
    assert answer == Done(id=4, node="n0", ok=True), "of this generation"


def test_a_generation_that_is_over_is_not_launched() -> None:
    node = life()
    do(node, launch(1, 2))
    for late in (1, 2):
        (answer,) = bodies(node.step(2.0, Told(launch(10 + late, late))))
        assert isinstance(answer, Done)
        assert (answer.ok, answer.detail) == (False, f"generation {late} is over here")


def test_a_stop_that_overtakes_its_launch_wins() -> None:
    node = life()
    do(node, stop(2, 1))
    (answer,) = bodies(node.step(2.0, Told(launch(1, 1))))
    assert isinstance(answer, Done)
    assert not answer.ok
    assert node.step(2.0, Told(launch(3, 2))) == (Carry(launch(3, 2)),)


def test_a_late_stop_of_an_old_generation_leaves_the_new_one_alone() -> None:
    node = life()
    do(node, launch(1, 1))
    do(node, stop(2, 1))
    do(node, launch(3, 2))
    do(node, stop(4, 1))
    assert len(bodies(end(node, 2, -9, generation=2))) == 1


def test_a_rank_that_fails_is_told_once() -> None:
    node = life()
    do(node, launch(1, 1))
    (alarm,) = bodies(end(node, 3, -11))
    assert isinstance(alarm, Alarm)
    assert (alarm.ranks, alarm.klass) == ((3,), "process_crash_signal")
    assert node.step(2.1, exited(3, -11)) == ()


def test_words_that_take_long_to_judge_hold_up_what_came_after_them() -> None:
    """The ladder is climbed when every stop is done: by then it must have heard how each rank ended."""
    node = life()
    do(node, launch(1, 1))
    (first,) = node.step(2.0, exited(3, 1))
    (second,) = node.step(2.0, exited(2, 1))
    assert isinstance(first, Judge) and isinstance(second, Judge)
    assert bodies(do(node, stop(2, 1))) == [], "it was ended before it could be stopped, and that is told first"
    assert bodies(judged(node, second)) == []
    assert bodies(node.step(2.1, Linked())) == [Done(id=1, node="n0", ok=True)]
    ended, other, stopped = bodies(judged(node, first))
    assert isinstance(ended, Alarm) and isinstance(other, Alarm) and isinstance(stopped, Done)
    assert (ended.ranks, other.ranks, stopped.id) == ((3,), (2,), 2)


def test_all_ranks_ended_well() -> None:
    node = life()
    do(node, launch(1, 1))
    assert node.step(2.0, exited(2, 0)) == ()
    assert bodies(node.step(2.1, exited(3, 0))) == [Ended(node="n0", generation=1)]


@pytest.mark.parametrize("order", [((2, 1), (3, 0)), ((2, 0), (3, 1))])
def test_one_failed_rank_and_the_node_has_not_ended_well(order: tuple[tuple[int, int], ...]) -> None:
    node = life()
    do(node, launch(1, 1))
    told = [body for rank, code in order for body in bodies(end(node, rank, code))]
    assert [type(body) for body in told] == [Alarm]


def test_ranks_that_we_end_are_no_news() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(2.0, Told(stop(2, 1)))
    assert node.step(2.1, exited(2, -15)) == ()
    assert node.step(2.1, exited(3, 0)) == ()


def test_ranks_of_other_generations_or_nodes_are_no_news() -> None:
    node = life()
    do(node, launch(1, 2))
    assert node.step(2.0, exited(2, 1, generation=1)) == ()
    assert node.step(2.0, exited(2, 1, generation=3)) == ()
    assert node.step(2.0, exited(7, 1, generation=2)) == ()


def test_what_is_not_acknowledged_is_sent_again_in_order() -> None:
    node = life()
    do(node, launch(1, 1))
    end(node, 2, 1)
    end(node, 3, 1)
    node.step(2.1, Acked(2))
    node.step(2.2, Unlinked())
    posts = [deed.post.seq for deed in node.step(2.3, Linked()) if isinstance(deed, Send)]
    assert posts == [1, 3]
    for seq in (1, 3, 3, 99):
        assert node.step(2.4, Acked(seq)) == ()
    assert node.step(2.5, Linked()) == ()


def test_without_a_link_posts_wait() -> None:
    node = life(linked=False)
    node.recall((), 1, (2, 3), 0)
    assert end(node, 2, 1) == ()
    assert len(node.step(2.0, Linked())) == 1


def test_a_node_without_a_controller_leaves_after_a_while() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(100.0, Unlinked())
    node.step(130.0, Unlinked())  # a dial that failed does not start the clock anew
    assert node.step(159.9, Clock()) == ()
    intends, deed = node.step(160.0, Clock())
    assert isinstance(deed, Carry) and isinstance(deed.errand, Leave)
    assert intends == Intend(deed.errand), "on disk before ranks are ended for it"
    assert (deed.errand.code, deed.errand.reason) == (1, "no controller for 60 s")
    assert node.step(161.0, Clock()) == ()
    assert node.step(161.0, exited(2, -15)) == ()


def test_a_controller_that_is_back_in_time_changes_nothing() -> None:
    node = life()
    node.step(100.0, Unlinked())
    node.step(150.0, Linked())
    assert node.step(170.0, Clock()) == ()
    node.step(180.0, Unlinked())
    assert node.step(239.0, Clock()) == ()


def test_a_node_that_never_found_a_controller_leaves_too() -> None:
    node = life(linked=False)
    assert node.step(59.0, Clock()) == ()
    assert len(node.step(60.0, Clock())) == 2


@pytest.mark.parametrize("stopped", [0, 1])
def test_who_is_killed_amid_leaving_has_a_successor_who_leaves(stopped: int) -> None:
    """A controller that is there by then knows nothing of it: nobody would ever tell of the ranks that were ended."""
    first = life()
    do(first, launch(1, 1))
    first.step(100.0, Unlinked())
    intends, _ = first.step(160.0, Clock())
    assert isinstance(intends, Intend)
    node = life()
    assert node.recall((), 1, (2, 3), stopped, intends.errand) == (intends, Carry(intends.errand))
    assert node.step(161.0, Told(launch(2, 2))) == ()
    assert node.step(161.0, exited(2, -15)) == (), "ended for it, by the agent before"


def test_what_nobody_has_sent_is_not_answered_and_may_come_again() -> None:
    node, own = life(), leave(0)
    assert node.step(2.0, Told(own)) == (Intend(own), Carry(own))
    assert node.step(2.1, Carried(own, True)) == ()


def test_who_leaves_takes_no_more_errands() -> None:
    node = life()
    do(node, launch(1, 1))
    assert node.step(2.0, Told(leave(2))) == (Intend(leave(2)), Carry(leave(2)))
    assert node.step(2.1, Told(launch(3, 2))) == ()
    assert node.step(2.1, exited(2, -15)) == ()
    assert bodies(node.step(2.2, Carried(leave(2), True))) == [Done(id=2, node="n0", ok=True)]


def test_a_launch_that_an_earlier_agent_left_half_done_is_finished() -> None:
    node = life()
    first = launch(5, 2).seat.first_rank
    node.recall((), generation=2, ranks=(first,), stopped=1)
    node.step(1.0, exited(first, 0, generation=2))  # of its two ranks one was started, and has ended well
    (deed,) = node.step(1.0, Told(launch(5, 2)))
    assert isinstance(deed, Carry)
    assert node.expected == {first + 1}
    (answer,) = bodies(node.step(2.0, Told(launch(6, 2))))
    assert isinstance(answer, Done) and not answer.ok, "once is enough"


def test_what_a_detector_notices_is_posted_with_the_generation_that_runs() -> None:
    node = life()
    alarm = Alarm(kind=Kind.HEALTH, at=1.0, suspects=("n0",), reason="has lost GPU 3", hard=True)
    do(node, launch(1, 4))
    [told] = bodies(node.step(2.0, Noticed(alarm)))
    assert isinstance(told, Alarm) and (told.generation, told.hard) == (4, True)
    node.step(3.0, Unlinked())
    assert node.step(3.5, Noticed(alarm)) == ()
    assert len(bodies(node.step(4.0, Linked()))) == 3, "what is not acknowledged is told again"
    node.step(5.0, Told(leave(9)))
    assert node.step(6.0, Noticed(alarm)) == ()


def test_a_launch_under_way_counts_as_ranks_until_it_was_stopped() -> None:
    node = life()
    assert node.occupied(0) == 0
    node.step(1.0, Told(launch(1, 3)))
    assert node.occupied(0) == 3, "no rank runs yet, but some will"
    node.step(2.0, Told(stop(2, 3)))
    assert node.occupied(3) == 3, "they are being ended"
    assert node.occupied(0) == 0
