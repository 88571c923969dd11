"""When ranks are parked and not ended, and when parked ranks go on."""

from typing import Literal, TypeVar

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.incident.incident_text import describe_kept, describe_stop
from holdfast.core.record.incident_story import describe_action
from holdfast.core.record.page_view import PageFold
from holdfast.model.action import Launch, Probe, Say, Stage, Stop
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Event, Order, Outcome, Progress, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry

CRASH = Alarm(kind=Kind.CRASH, at=9.0, suspects=("a",), ranks=(1,), reason="was killed", code=-9, signature="killed")
SILENCE = Alarm(kind=Kind.SILENCE, at=9.0, suspects=("a",), reason="is silent", signature="silence a")
PROGRESS = Progress(generation=1, step=10, at=8.0, first_step=1, first_at=3.0, counted=False, survives=True)
LIMITS = Limits()
T = TypeVar("T")


class Play:
    """A job of two nodes that trains; events come a second apart."""

    def __init__(
        self, limits: Limits = LIMITS, progress: Progress = PROGRESS, standbys: int = 0, least: int = 2
    ) -> None:
        self.decider, self.now, self.page = Decider(), 0.0, PageFold()
        job = Job(run_id="r", min_nodes=least, max_nodes=2, standbys=standbys, can_acquire=False, probes=True)
        self.hear(Begin(job=job, limits=limits))
        told = [self.hear(Ready(node=node, host=node, nproc=2)) for node in "abc"[: 2 + standbys]]
        self.launch = self.find(Launch, told[1])
        self.hear(Outcome(action=self.launch.id, ok=True))
        self.hear(progress)
        assert self.decider.view.phase is Phase.TRAINING

    def hear(self, event: Event) -> Decision:
        self.now += 1.0
        if isinstance(event, Alarm):
            event = msgspec.structs.replace(event, at=self.now, generation=self.decider.view.generation)
        decision = self.decider.step(self.now, event)
        self.page.add(Entry(seq=self.page.seq + 1, at=self.now, event=event, decision=decision))
        return decision

    def present(self) -> str:
        return self.decider.view.describe_present(self.now, 7, "")

    @staticmethod
    def find(kind: type[T], decision: Decision) -> T:
        [found] = [action for action in decision.actions if isinstance(action, kind)]
        return found

    def fail(self, alarm: Alarm) -> Stop:
        return self.find(Stop, self.hear(alarm))

    def relaunch(self, stop: Stop) -> Launch:
        return self.find(Launch, self.hear(Outcome(action=stop.id, ok=True)))

    def step_on(self, launch: Launch, kept: int) -> Decision:
        self.hear(Outcome(action=launch.id, ok=True, kept=kept))
        made = {"step": 11 * launch.generation, "first_step": 11, "at": self.now, "first_at": self.now}
        return self.hear(msgspec.structs.replace(PROGRESS, generation=launch.generation, **made))


def test_survivors_are_parked_and_go_on() -> None:
    play = Play(Limits(survive_s=3.0))
    assert not play.launch.keep
    stop = play.fail(CRASH)
    assert stop.park_s == 3.0
    launch = play.relaunch(stop)
    assert launch.keep and launch.generation == 2
    closed = play.step_on(launch, kept=3).closed
    assert closed and (closed.kept, closed.renewed) == (3, 1)
    assert describe_kept(closed) == ", 3 ranks in the processes they had and 1 new"
    assert describe_kept(closed) in closed.sentence


def test_a_rank_that_hangs_is_ended_at_once() -> None:
    hang = Alarm(kind=Kind.HANG, at=9.0, suspects=("a",), ranks=(1,), reason="keeps the others waiting", hard=True)
    stop = Play(Limits(survive_s=3.0)).fail(hang)
    assert (stop.park_s, stop.parking, stop.standing) == (3.0, 3, (1,))
    assert Play(Limits(survive_s=3.0)).fail(CRASH).standing == ()


def test_what_is_said_of_them() -> None:
    play = Play()
    failed = play.hear(CRASH)
    stop = play.find(Stop, failed)
    assert describe_stop(failed.actions) == "telling 3 ranks to leave the step and stay"
    assert describe_action(stop) == ("tell 3 ranks to leave generation 1 and stay, and end what does not, on a and b")
    assert play.present() == (
        "ranks leave the step and stay, and those that cannot are being stopped, as rank 1 on a was killed"
    )
    launch = play.relaunch(stop)
    assert describe_action(launch) == "launch generation 2 on a and b, and let ranks that stayed go on"
    play.hear(Outcome(action=launch.id, ok=True, kept=3))
    assert play.present().startswith("the ranks of generation 2 run, 3 of them in the processes from before; no step")


def test_nobody_is_said_to_stay_where_all_are_ended() -> None:
    play = Play(Limits(survive_s=0.0))
    failed = play.hear(CRASH)
    assert describe_stop(failed.actions) == "stopping all ranks"
    assert describe_action(play.find(Stop, failed)) == "stop all ranks of generation 1 on a and b"
    launch = play.relaunch(play.find(Stop, failed))
    assert describe_action(launch) == "launch generation 2 on a and b"
    closed = play.step_on(launch, kept=0).closed
    assert closed and (closed.kept, closed.renewed, describe_kept(closed)) == (0, 0, "")


def test_they_go_on_each_time() -> None:
    play = Play()
    for number in range(2):
        launch = play.relaunch(play.fail(msgspec.structs.replace(CRASH, signature=f"killed {number}")))
        assert launch.keep
        play.step_on(launch, kept=3)


@pytest.mark.parametrize(
    ("limits", "progress"),
    [(Limits(survive_s=0.0), PROGRESS), (Limits(), msgspec.structs.replace(PROGRESS, survives=False))],
)
def test_others_are_ended(limits: Limits, progress: Progress) -> None:
    play = Play(limits, progress)
    stop = play.fail(CRASH)
    assert stop.park_s == 0.0 and not play.relaunch(stop).keep


@pytest.mark.parametrize("kind", [Kind.LOSS, Kind.REPLICA])
def test_what_ranks_compute_is_no_matter_for_survivors(kind: Kind) -> None:
    play = Play()
    alarm = msgspec.structs.replace(CRASH, kind=kind, code=None, not_after=5)
    assert play.fail(alarm).park_s == 0.0


def test_a_failure_amid_the_recovery_is_an_ordinary_one() -> None:
    play = Play()
    launch = play.relaunch(play.fail(CRASH))
    play.hear(Outcome(action=launch.id, ok=True, kept=3))
    stop = play.fail(CRASH)
    assert stop.park_s == 0.0
    again = play.relaunch(stop)
    assert not again.keep
    closed = play.step_on(again, kept=0).closed
    assert closed and (closed.failures, closed.kept) == (2, 0)


def test_ranks_that_could_not_go_on_twice_are_not_tried_again() -> None:
    play = Play()
    for number in range(2):
        killed = msgspec.structs.replace(CRASH, signature=f"killed {number}")
        launch = play.relaunch(play.fail(killed))
        assert launch.keep
        play.hear(Outcome(action=launch.id, ok=True, kept=3))
        again = play.relaunch(play.fail(msgspec.structs.replace(killed, signature=f"amid it {number}")))
        play.step_on(again, kept=0)
    assert play.fail(CRASH).park_s == 0.0


def test_so_is_a_launch_that_fails() -> None:
    play = Play()
    launch = play.relaunch(play.fail(CRASH))
    failed = Outcome(action=launch.id, ok=False, failed={"b": "no room"})
    assert play.find(Stop, play.hear(failed)).park_s == 0.0


def test_a_standby_takes_the_seat_of_a_lost_node() -> None:
    play = Play(standbys=1)
    stop = play.fail(SILENCE)
    assert stop.park_s > 0 and stop.nodes == ("b",)
    launch = play.relaunch(stop)
    assert launch.keep and {seat.node for seat in launch.seats} == {"b", "c"}


def test_nodes_are_tried_without_anybody_on_them() -> None:
    play = Play()
    launch = play.relaunch(play.fail(CRASH))
    play.hear(Outcome(action=launch.id, ok=True, kept=3))
    play.hear(msgspec.structs.replace(PROGRESS, generation=2, at=play.now))
    stop = play.fail(CRASH)  # the same again, and no further: nodes are tried for it
    assert stop.park_s > 0
    probe = play.find(Probe, play.hear(Outcome(action=stop.id, ok=True)))
    launch = play.find(Launch, play.hear(Outcome(action=probe.id, ok=True)))
    assert not launch.keep


def test_new_code_has_new_processes() -> None:
    play = Play()
    decision = play.hear(Order(verb="update", who="ann", release=Release(number=0, digest="t"), window_s=1000.0))
    play.hear(Outcome(action=play.find(Stage, decision).id, ok=True))
    launch = play.relaunch(play.fail(CRASH))
    assert launch.release.number == 2 and not launch.keep


RESIZES = msgspec.structs.replace(PROGRESS, resizes=True)
GROWING = Limits(last_call_s=1.0)


def shrunk() -> Play:
    """A job whose node `a` was lost, and that trains on with the other one."""
    play = Play(GROWING, RESIZES, least=1)
    launch = play.relaunch(play.fail(SILENCE))
    assert launch.keep and launch.resizes and [seat.node for seat in launch.seats] == ["b"]
    play.hear(Outcome(action=launch.id, ok=True, kept=2))
    made = {"generation": 2, "step": 11, "first_step": 11, "at": play.now, "first_at": play.now}
    closed = play.hear(msgspec.structs.replace(RESIZES, **made)).closed
    assert closed and (closed.kept, closed.short) == (2, "1 of 2 nodes, same batch")
    assert closed.sentence == (
        "a is silent at step 10; evicted a and resumed on 1 of 2 nodes, same batch, 2 ranks in the processes they had, "
        "from step 10, lost 0 steps and 2.0 s (detect 0.0, stop 1.0, launch 1.0, first step 0.0)"
    )
    return play


def test_ranks_that_may_be_fewer_go_on_without_the_lost_node() -> None:
    play = shrunk()
    assert play.present().startswith("training on 1 of 2 nodes, same batch; every rank has made step 7")


def test_fewer_nodes_are_told_when_they_are_launched() -> None:
    play = Play(GROWING, RESIZES, least=1)
    decision = play.hear(Outcome(action=play.fail(SILENCE).id, ok=True))
    assert play.find(Say, decision).text == "going on with 1 of 2 nodes, same batch"


WHOLE = msgspec.structs.replace(PROGRESS, survives=False, replicated=True)


def test_fewer_ranks_restore_what_each_of_more_had() -> None:
    play = Play(GROWING, WHOLE, least=1)
    again = play.relaunch(play.fail(CRASH))
    assert not again.keep and not again.resizes, "as many ranks get their own states, and their own random numbers"
    play.hear(Outcome(action=again.id, ok=True))
    play.hear(msgspec.structs.replace(WHOLE, generation=2, step=11, first_step=11, at=play.now, first_at=play.now))
    fewer = play.relaunch(play.fail(msgspec.structs.replace(SILENCE, generation=2)))
    assert not fewer.keep and fewer.resizes and [seat.node for seat in fewer.seats] == ["b"]


def test_it_is_not_forgotten_when_fewer_ranks_fail_at_once() -> None:
    play = Play(GROWING, WHOLE, least=1)
    fewer = play.relaunch(play.fail(SILENCE))
    play.hear(Outcome(action=fewer.id, ok=True))
    again = play.relaunch(play.fail(msgspec.structs.replace(CRASH, generation=2)))
    assert again.resizes


def test_they_stay_when_a_node_comes() -> None:
    play = shrunk()
    paused = play.hear(Ready(node="c", host="c", nproc=2))
    probes = [action for action in paused.actions if isinstance(action, Probe)]
    stop = play.find(Stop, play.hear(Outcome(action=probes[0].id, ok=True)) if probes else paused)
    assert (stop.park_s, stop.parking, stop.nodes) == (LIMITS.survive_s, 2, ("b",))
    assert play.present().startswith("ranks leave the step and stay: 1 more node is there")
    launch = play.relaunch(stop)
    assert launch.keep and launch.resizes and [seat.node for seat in launch.seats] == ["b", "c"]
    play.hear(Outcome(action=launch.id, ok=True, kept=2))
    made = {"generation": 3, "step": 12, "first_step": 12, "at": play.now, "first_at": play.now}
    changed = play.hear(msgspec.structs.replace(RESIZES, **made)).changed
    assert changed and (changed.kept, changed.renewed, changed.short) == (2, 2, "")
    assert changed.sentence == (
        "1 more node is there: restarted from step 11, 2 ranks in the processes they had and 2 new; c admitted, "
        "lost 4.0 s"
    )
    view = play.page.make_view(None)
    [lost], [grown] = view.incidents, view.changes
    assert (lost.stayed, lost.short) == ("2 ranks in the processes they had", "1 of 2 nodes, same batch")
    assert (grown.stayed, grown.short) == ("2 ranks in the processes they had and 2 new", "")


def test_without_the_floor_another_number_of_ranks_has_new_processes() -> None:
    play = Play(GROWING, least=1)
    launch = play.relaunch(play.fail(SILENCE))
    assert not launch.keep and not launch.resizes
    closed = play.step_on(launch, kept=0).closed
    assert closed and not closed.short
    paused = play.hear(Ready(node="c", host="c", nproc=2))
    probes = [action for action in paused.actions if isinstance(action, Probe)]
    assert play.find(Stop, play.hear(Outcome(action=probes[0].id, ok=True)) if probes else paused).park_s == 0.0


def test_a_newer_release_says_anew_whether_ranks_may_be_fewer() -> None:
    play = Play(GROWING, RESIZES, least=1)
    decision = play.hear(Order(verb="update", who="ann", release=Release(number=0, digest="t"), window_s=1000.0))
    play.hear(Outcome(action=play.find(Stage, decision).id, ok=True))
    launch = play.relaunch(play.fail(SILENCE))
    assert launch.release.number == 2 and not launch.resizes and not launch.keep


CARRIES = msgspec.structs.replace(RESIZES, carries=True)


def test_ranks_with_their_state_are_kept_with_none_to_restore() -> None:
    play = Play(progress=CARRIES)
    launch = play.relaunch(play.fail(CRASH))
    assert launch.keep and launch.carries
    play = Play()
    assert not play.relaunch(play.fail(CRASH)).carries


def test_ranks_with_their_state_are_parked_amid_a_recovery_too() -> None:
    play = Play(progress=CARRIES)
    launch = play.relaunch(play.fail(CRASH))
    play.hear(Outcome(action=launch.id, ok=True, kept=3))
    stop = play.fail(CRASH)
    assert stop.park_s > 0
    play = Play(progress=RESIZES)
    launch = play.relaunch(play.fail(CRASH))
    play.hear(Outcome(action=launch.id, ok=True, kept=3))
    assert play.fail(CRASH).park_s == 0.0, "others restore their state: all of them anew"


def test_ranks_that_twice_failed_to_go_on_are_ended_with_their_state() -> None:
    play = Play(progress=CARRIES)
    stops = []
    for _ in range(3):
        stops.append(play.fail(CRASH))
        decision = play.hear(Outcome(action=stops[-1].id, ok=True))
        for action in decision.actions:
            if isinstance(action, Probe):
                decision = play.hear(Outcome(action=action.id, ok=True))
        play.hear(Outcome(action=play.find(Launch, decision).id, ok=True, kept=3))
    assert [stop.park_s > 0 for stop in stops] == [True, True, False]


def test_a_newer_release_says_anew_where_its_state_lives() -> None:
    play = Play(GROWING, CARRIES)
    decision = play.hear(Order(verb="update", who="ann", release=Release(number=0, digest="t"), window_s=1000.0))
    play.hear(Outcome(action=play.find(Stage, decision).id, ok=True))
    launch = play.relaunch(play.fail(CRASH))
    assert launch.release.number == 2 and not launch.carries and not launch.keep


@pytest.mark.parametrize("verb", ["drain", "evict"])
def test_they_stay_when_a_node_leaves_by_order(verb: Literal["drain", "evict"]) -> None:
    play = Play(standbys=1)
    stop = play.find(Stop, play.hear(Order(verb=verb, who="ann", node="a")))
    assert (stop.park_s, stop.parking, stop.hand_over) == (LIMITS.survive_s, 4, None)
    launch = play.relaunch(stop)
    assert launch.keep and {seat.node for seat in launch.seats} == {"b", "c"}
    play.hear(Outcome(action=launch.id, ok=True, kept=2))
    made = {"generation": 2, "step": 11, "first_step": 11, "at": play.now, "first_at": play.now}
    changed = play.hear(msgspec.structs.replace(PROGRESS, **made)).changed
    assert changed and (changed.kept, changed.renewed, changed.evicted) == (2, 2, ("a",))


def test_ranks_that_hold_the_state_hand_it_over_first() -> None:
    play = Play(standbys=1, progress=CARRIES)
    stop = play.find(Stop, play.hear(Order(verb="drain", who="ann", node="a")))
    assert stop.hand_over is not None
    assert (stop.hand_over.leaving, stop.hand_over.within_s) == ((0, 1), LIMITS.leave_s / 2)
    launch = play.relaunch(stop)
    assert launch.keep and launch.carries


def test_they_are_ended_when_a_node_leaves_that_nobody_replaces() -> None:
    play = Play(least=1)
    stop = play.find(Stop, play.hear(Order(verb="evict", who="ann", node="a")))
    assert stop.park_s == 0.0 and stop.hand_over is None
    fewer = Play(progress=CARRIES, least=1)
    stop = fewer.find(Stop, fewer.hear(Order(verb="evict", who="ann", node="a")))
    assert stop.park_s > 0 and stop.hand_over is not None
    assert fewer.relaunch(stop).keep, "ranks that may be fewer go on"
