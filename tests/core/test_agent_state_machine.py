"""One node: links break, errands repeat, ranks end; nothing is lost and nothing is done twice."""

import pytest

from holdfast.core.agent_state_machine import (
    AgentProtocol,
    AlarmNoticed,
    CarryOut,
    ClockTick,
    Deed,
    ErrandDone,
    ErrandReceived,
    ExitJudged,
    JudgeExit,
    LinkLost,
    LinkOpened,
    NodeLimits,
    Post,
    PostAcknowledged,
    RankExited,
    RememberDone,
    RememberLeaving,
    SendPost,
)
from holdfast.core.detect.crash import alarm_of
from holdfast.logs import catalog_files
from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import Done, Errand, LaunchHere, Leave, StopHere
from holdfast.model.observation import Exit

CATALOG = catalog_files.load_failures()


def life(*, linked: bool = True) -> AgentProtocol:
    node = AgentProtocol("n0", NodeLimits(lost_s=60.0), 0.0)
    if linked:
        node.step(0.0, LinkOpened())
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


def exited(rank: int, code: int, generation: int = 1) -> RankExited:
    return RankExited(Exit(node="n0", generation=generation, rank=rank, code=code, at=1.0))


def do(node: AgentProtocol, errand: Errand) -> tuple[Deed, ...]:
    assert node.step(1.0, ErrandReceived(errand)) == (CarryOut(errand),)
    return node.step(1.0, ErrandDone(errand, True))


def end(node: AgentProtocol, rank: int, code: int, generation: int = 1) -> tuple[Deed, ...]:
    """A rank ends, and what it said is judged at once."""
    deeds = node.step(2.0, exited(rank, code, generation))
    return tuple(more for deed in deeds for more in (judged(node, deed) if isinstance(deed, JudgeExit) else (deed,)))


def judged(node: AgentProtocol, asked: JudgeExit) -> tuple[Deed, ...]:
    return node.step(2.0, ExitJudged(asked.exit, alarm_of(asked.exit, CATALOG)))


def bodies(deeds: tuple[Deed, ...]) -> list[Alarm | Ended | Done]:
    return [deed.post.body for deed in deeds if isinstance(deed, SendPost)]


def test_an_errand_is_carried_remembered_and_answered() -> None:
    done = Done(id=1, node="n0", ok=True)
    assert do(life(), launch(1, 1)) == (RememberDone(done), SendPost(Post(seq=1, body=done)))


def test_a_failed_errand_says_why() -> None:
    node, errand = life(), launch(1, 1)
    node.step(1.0, ErrandReceived(errand))
    assert bodies(node.step(1.0, ErrandDone(errand, False, "no memory"))) == [
        Done(id=1, node="n0", ok=False, detail="no memory")
    ]


def test_an_errand_told_again_while_it_is_being_carried_is_not_begun_again() -> None:
    node = life()
    node.step(1.0, ErrandReceived(launch(1, 1)))
    assert node.step(1.1, ErrandReceived(launch(1, 1))) == ()


def test_an_errand_told_again_afterwards_is_answered_not_redone() -> None:
    node = life()
    do(node, launch(1, 1))
    assert bodies(node.step(2.0, ErrandReceived(launch(1, 1)))) == [Done(id=1, node="n0", ok=True)]


def test_the_next_agent_knows_what_the_last_one_did() -> None:
    node = life()
    node.restore_state((Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=True)), 1, (2, 3), 1)
    assert bodies(node.step(2.0, ErrandReceived(stop(2, 1)))) == [Done(id=2, node="n0", ok=True)]
    assert node.step(2.0, exited(2, -9)) == ()  # we stopped that generation


def test_the_next_agent_watches_on() -> None:
    node = life()
    node.restore_state((Done(id=1, node="n0", ok=True),), 1, (2, 3), 0)
    assert node.step(2.0, exited(2, 0)) == ()
    assert bodies(node.step(2.0, exited(3, 0))) == [Ended(node="n0", generation=1)]


def test_a_stop_is_answered_with_who_had_ended_well() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(2.0, exited(2, 0))
    node.step(2.1, ErrandReceived(stop(2, 1)))
    (answer,) = bodies(node.step(2.2, ErrandDone(stop(2, 1), True)))
    assert answer == Done(id=2, node="n0", ok=True, departed=(2,))
    do(node, launch(3, 2))
    node.step(3.0, ErrandReceived(stop(4, 2)))
    (answer,) = bodies(node.step(3.1, ErrandDone(stop(4, 2), True)))
    assert answer == Done(id=4, node="n0", ok=True), "of this generation"


def test_a_generation_that_is_over_is_not_launched() -> None:
    node = life()
    do(node, launch(1, 2))
    for late in (1, 2):
        (answer,) = bodies(node.step(2.0, ErrandReceived(launch(10 + late, late))))
        assert isinstance(answer, Done)
        assert (answer.ok, answer.detail) == (False, f"generation {late} is over here")


def test_a_stop_that_overtakes_its_launch_wins() -> None:
    node = life()
    do(node, stop(2, 1))
    (answer,) = bodies(node.step(2.0, ErrandReceived(launch(1, 1))))
    assert isinstance(answer, Done)
    assert not answer.ok
    assert node.step(2.0, ErrandReceived(launch(3, 2))) == (CarryOut(launch(3, 2)),)


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
    assert isinstance(first, JudgeExit) and isinstance(second, JudgeExit)
    assert bodies(do(node, stop(2, 1))) == [], "it was ended before it could be stopped, and that is told first"
    assert bodies(judged(node, second)) == []
    assert bodies(node.step(2.1, LinkOpened())) == [Done(id=1, node="n0", ok=True)]
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
    node.step(2.0, ErrandReceived(stop(2, 1)))
    assert node.step(2.1, exited(2, -15)) == ()
    assert node.step(2.1, exited(3, 0)) == ()


def late(latched: str, failed_at: float | None, code: int = 1) -> RankExited:
    """Rank 3 ends after the stop was heard at 2.0; rank 2 is the first to fail."""
    return RankExited(Exit(node="n0", generation=1, rank=3, code=code, at=2.2, latched=latched), failed_at)


def test_an_error_from_before_the_stop_is_told_before_the_stop_is_done() -> None:
    """The process takes longer to end than the first failure takes to stop the job."""
    node = life()
    do(node, launch(1, 1))
    assert len(bodies(end(node, 2, 1))) == 1
    node.step(2.0, ErrandReceived(stop(2, 1)))
    node.step(2.1, ErrandReceived(stop(2, 1)))  # told again, which changes nothing
    (asked,) = node.step(2.2, late("KeyError: 'tokens'", 1.9))
    assert isinstance(asked, JudgeExit)
    assert bodies(node.step(2.3, ErrandDone(stop(2, 1), True))) == []
    alarm, done = bodies(judged(node, asked))
    assert isinstance(alarm, Alarm) and (alarm.ranks, alarm.code) == ((3,), 1) and "KeyError" in alarm.reason
    assert isinstance(done, Done) and done.id == 2
    assert node.step(2.4, late("KeyError: 'tokens'", 1.9)) == (), "once"


@pytest.mark.parametrize(
    "news",
    [
        late("KeyError: 'tokens'", 2.0),
        late("KeyError: 'tokens'", None),
        late("", None, code=-15),
        late("", 2.1, code=-15),
        late("RuntimeError: Connection closed by peer [127.0.0.1]:4711", 1.9),
        late("", 1.9, code=0),
    ],
)
def test_what_the_stop_or_the_first_failure_may_have_brought_about_is_no_news(news: RankExited) -> None:
    node = life()
    do(node, launch(1, 1))
    end(node, 2, 1)
    node.step(2.0, ErrandReceived(stop(2, 1)))
    assert node.step(2.2, news) == ()


def test_whoever_leaves_the_job_tells_of_no_late_error() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(2.0, ErrandReceived(stop(2, 1)))
    node.step(2.1, ErrandReceived(leave(3)))
    assert node.step(2.2, late("KeyError: 'tokens'", 1.9)) == ()


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
    node.step(2.1, PostAcknowledged(2))
    node.step(2.2, LinkLost())
    posts = [deed.post.seq for deed in node.step(2.3, LinkOpened()) if isinstance(deed, SendPost)]
    assert posts == [1, 3]
    for seq in (1, 3, 3, 99):
        assert node.step(2.4, PostAcknowledged(seq)) == ()
    assert node.step(2.5, LinkOpened()) == ()


def test_without_a_link_posts_wait() -> None:
    node = life(linked=False)
    node.restore_state((), 1, (2, 3), 0)
    assert end(node, 2, 1) == ()
    assert len(node.step(2.0, LinkOpened())) == 1


def test_a_node_without_a_controller_leaves_after_a_while() -> None:
    node = life()
    do(node, launch(1, 1))
    node.step(100.0, LinkLost())
    node.step(130.0, LinkLost())  # a dial that failed does not start the clock anew
    assert node.step(159.9, ClockTick()) == ()
    intends, deed = node.step(160.0, ClockTick())
    assert isinstance(deed, CarryOut) and isinstance(deed.errand, Leave)
    assert intends == RememberLeaving(deed.errand), "on disk before ranks are ended for it"
    assert (deed.errand.code, deed.errand.reason) == (1, "no controller for 60 s")
    assert node.step(161.0, ClockTick()) == ()
    assert node.step(161.0, exited(2, -15)) == ()


def test_a_controller_that_is_back_in_time_changes_nothing() -> None:
    node = life()
    node.step(100.0, LinkLost())
    node.step(150.0, LinkOpened())
    assert node.step(170.0, ClockTick()) == ()
    node.step(180.0, LinkLost())
    assert node.step(239.0, ClockTick()) == ()


def test_a_node_that_never_found_a_controller_leaves_too() -> None:
    node = life(linked=False)
    assert node.step(59.0, ClockTick()) == ()
    assert len(node.step(60.0, ClockTick())) == 2


@pytest.mark.parametrize("stopped", [0, 1])
def test_who_is_killed_amid_leaving_has_a_successor_who_leaves(stopped: int) -> None:
    """A controller that is there by then knows nothing of it: nobody would ever tell of the ranks that were ended."""
    first = life()
    do(first, launch(1, 1))
    first.step(100.0, LinkLost())
    intends, _ = first.step(160.0, ClockTick())
    assert isinstance(intends, RememberLeaving)
    node = life()
    assert node.restore_state((), 1, (2, 3), stopped, intends.errand) == (intends, CarryOut(intends.errand))
    assert node.step(161.0, ErrandReceived(launch(2, 2))) == ()
    assert node.step(161.0, exited(2, -15)) == (), "ended for it, by the agent before"


def test_what_nobody_has_sent_is_not_answered_and_may_come_again() -> None:
    node, own = life(), leave(0)
    assert node.step(2.0, ErrandReceived(own)) == (RememberLeaving(own), CarryOut(own))
    assert node.step(2.1, ErrandDone(own, True)) == ()


def test_who_leaves_takes_no_more_errands() -> None:
    node = life()
    do(node, launch(1, 1))
    assert node.step(2.0, ErrandReceived(leave(2))) == (RememberLeaving(leave(2)), CarryOut(leave(2)))
    assert node.step(2.1, ErrandReceived(launch(3, 2))) == ()
    assert node.step(2.1, exited(2, -15)) == ()
    assert bodies(node.step(2.2, ErrandDone(leave(2), True))) == [Done(id=2, node="n0", ok=True)]


def test_a_launch_that_an_earlier_agent_left_half_done_is_finished() -> None:
    node = life()
    first = launch(5, 2).seat.first_rank
    node.restore_state((), generation=2, ranks=(first,), stopped=1)
    node.step(1.0, exited(first, 0, generation=2))  # of its two ranks one was started, and has ended well
    (deed,) = node.step(1.0, ErrandReceived(launch(5, 2)))
    assert isinstance(deed, CarryOut)
    assert node.expected == {first + 1}
    (answer,) = bodies(node.step(2.0, ErrandReceived(launch(6, 2))))
    assert isinstance(answer, Done) and not answer.ok, "once is enough"


def test_what_a_detector_notices_is_posted_with_the_generation_that_runs() -> None:
    node = life()
    alarm = Alarm(kind=Kind.HEALTH, at=1.0, suspects=("n0",), reason="has lost GPU 3", hard=True)
    do(node, launch(1, 4))
    [told] = bodies(node.step(2.0, AlarmNoticed(alarm)))
    assert isinstance(told, Alarm) and (told.generation, told.hard) == (4, True)
    node.step(3.0, LinkLost())
    assert node.step(3.5, AlarmNoticed(alarm)) == ()
    assert len(bodies(node.step(4.0, LinkOpened()))) == 3, "what is not acknowledged is told again"
    node.step(5.0, ErrandReceived(leave(9)))
    assert node.step(6.0, AlarmNoticed(alarm)) == ()


def test_a_launch_under_way_counts_as_ranks_until_it_was_stopped() -> None:
    node = life()
    assert node.occupied_by(0) == 0
    node.step(1.0, ErrandReceived(launch(1, 3)))
    assert node.occupied_by(0) == 3, "no rank runs yet, but some will"
    node.step(2.0, ErrandReceived(stop(2, 3)))
    assert node.occupied_by(3) == 3, "they are being ended"
    assert node.occupied_by(0) == 0
