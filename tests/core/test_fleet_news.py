"""What the fleet says of its nodes: queues are waited for, who is gone is replaced, who will go is replaced ahead."""

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.decide.node_roles import NodeRole
from holdfast.core.detect.silence import gone_alarm
from holdfast.core.membership.fleet_states import FleetStates
from holdfast.core.membership.standbys import LONGEST_RETRY_S, RETRY_S
from holdfast.model.action import Action, Block, Dismiss, Finish, Launch, Probe, Say, Stop
from holdfast.model.decider_events import Begin, Event, Outcome, Progress, Ready, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.fleet_node_reports import FleetNode, FleetReport, FleetState
from holdfast.model.job_and_seats import HostIdentity, Job
from holdfast.model.job_phase import Phase

GONE = FleetNode(state=FleetState.GONE, reason="NODE_FAIL", failed=True)
LIMITS = Limits(ready_s=100.0, wait_s=600.0, leave_s=120.0)


def queued(reason: str) -> FleetNode:
    return FleetNode(state=FleetState.QUEUED, reason=reason)


def up(**known: object) -> FleetNode:
    return FleetNode(state=FleetState.UP, **known)  # type: ignore[arg-type]


class Play:
    """A job of two nodes on a fleet that brings nodes."""

    def __init__(
        self,
        *,
        standbys: int = 0,
        min_nodes: int = 2,
        max_nodes: int = 2,
        limits: Limits = LIMITS,
        checks: bool = False,
    ) -> None:
        self.decider = Decider()
        self.view = self.decider.view
        self.actions: list[Action] = []
        self.wake_at: float | None = None
        job = Job(run_id="r", min_nodes=min_nodes, max_nodes=max_nodes, standbys=standbys, blocks=True, checks=checks)
        self.hear(0.0, Begin(job=job, limits=limits, fence_s=130.0))

    def phase(self) -> Phase:
        return self.view.phase

    def hear(self, now: float, event: Event) -> list[Action]:
        decision = self.decider.step(now, event)
        self.actions, self.wake_at = list(decision.actions), decision.wake_at
        return self.actions

    def survey(self, now: float, **nodes: FleetNode) -> list[Action]:
        return self.hear(now, FleetReport(nodes=nodes))

    def said(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, Say)]

    def only(self, kind: type[Action]) -> Action:
        [found] = [action for action in self.actions if isinstance(action, kind)]
        return found

    def give(self, now: float, *nodes: str) -> None:
        """Answer the newest request for nodes."""
        [asked] = self.view_acquiring()
        self.hear(now, Outcome(action=asked, ok=True, nodes=nodes))

    def view_acquiring(self) -> list[int]:
        return list(self.decider._state.nodes.standbys.acquiring)

    def ready(self, now: float, *nodes: str) -> None:
        for node in nodes:
            self.hear(now, Ready(node=node, host=f"h-{node}", nproc=1, identity=HostIdentity(id=f"m-{node}")))

    def train(self, now: float, *nodes: str) -> None:
        self.give(now, *nodes)
        self.ready(now, *nodes)
        self.launched(now)

    def launched(self, now: float) -> None:
        assert self.phase() is Phase.LAUNCHING
        self.hear(now, Outcome(action=self.view.awaited, ok=True))
        self.step(now, 1)

    def step(self, now: float, step: int) -> None:
        generation = self.view.generation
        self.hear(now, Progress(generation=generation, step=step, at=now, first_step=1, first_at=now, counted=False))
        assert self.phase() is Phase.TRAINING

    def tick_until(self, now: float) -> None:
        """Wake it whenever it wants to be woken, up to a time."""
        while self.wake_at is not None and self.wake_at <= now:
            self.hear(self.wake_at, Tick())


def test_a_queue_may_be_as_long_as_it_likes_and_is_told_at_each_change() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(2.0, a=queued("Resources"), b=queued("Resources"))
    assert play.said() == ["waiting for 2 nodes: queued, Resources"]
    play.survey(3.0, a=queued("Resources"))
    assert play.said() == [], "nothing has changed"
    play.tick_until(90_000.0)
    assert play.phase() is Phase.WAITING and sorted(play.view.coming) == ["a", "b"], "nobody is late in a queue"
    assert play.view.queued == {"a": "Resources", "b": "Resources"}
    assert set(play.view.assign_roles(set()).values()) == {NodeRole.QUEUED}
    assert "queued, Resources" in play.view.describe_present(90_000.0, -1, "")
    play.survey(90_001.0, b=queued("Priority"))
    assert play.said() == ["waiting for 2 nodes: 1 queued, Priority; 1 queued, Resources"]
    play.survey(90_002.0, a=FleetNode(state=FleetState.STARTING), b=FleetNode(state=FleetState.STARTING))
    play.tick_until(90_101.0)
    assert sorted(play.view.coming) == ["a", "b"], "patience counts from the start"
    play.tick_until(90_103.0)
    assert sorted(play.view.gone) == ["a", "b"], "and from then on a node can be late"


def test_without_a_queue_the_wait_ends_as_before_and_after_one_it_begins_anew() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.ready(2.0, "a")
    play.survey(3.0, b=queued("Resources"))
    play.tick_until(5000.0)
    assert play.phase() is Phase.WAITING
    play.survey(5000.0, b=FleetNode(state=FleetState.UNKNOWN, reason="the fleet does not know it any more"))
    play.tick_until(5599.0)
    assert play.phase() is Phase.WAITING
    play.tick_until(5601.0)
    assert play.phase() is Phase.ENDING


def test_what_the_cluster_ends_at_once_is_asked_for_with_growing_pauses() -> None:
    play = Play(min_nodes=1, max_nodes=1, limits=Limits(wait_s=1e6))
    now, pauses = 1.0, []
    for number in range(8):
        play.give(now, f"n{number}")
        play.survey(now, **{f"n{number}": FleetNode(state=FleetState.GONE, reason="OutOfMemory")})
        assert play.said() == [f"n{number} ended before the job had it: OutOfMemory"]
        assert isinstance(play.only(Dismiss), Dismiss) and play.wake_at is not None
        asked_at = now
        while not play.view_acquiring():
            now = play.wake_at
            play.hear(now, Tick())
            assert play.wake_at is not None
        pauses.append(now - asked_at)
    assert pauses[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S] and pauses[-1] == LONGEST_RETRY_S
    play.give(now, "good")
    play.ready(now, "good")
    play.launched(now)
    play.survey(now, good=GONE)
    assert not any(isinstance(action, Dismiss) for action in play.actions), "a seated node is the alarm's matter"


def test_a_wait_that_ends_tells_the_fleet_s_last_word() -> None:
    play = Play(min_nodes=1, max_nodes=1)
    play.give(1.0, "a")
    play.survey(1.0, a=FleetNode(state=FleetState.GONE, reason="OutOfMemory"))
    play.hear(11.0, Tick())
    play.hear(12.0, Outcome(action=play.view_acquiring()[0], ok=False, detail="busy"))
    play.tick_until(5000.0)
    finish = play.only(Finish)
    assert isinstance(finish, Finish) and "the fleet: OutOfMemory" in finish.reason and finish.code == 93


def test_a_standby_that_is_gone_is_lost_and_replaced_and_its_bad_host_blocked() -> None:
    play = Play(standbys=1)
    play.train(1.0, "a", "b", "c")
    [spare] = play.view.pool
    play.survey(5.0, **{spare: GONE})
    assert play.said() == [f"standby {spare} lost: NODE_FAIL"] and spare in play.view.gone
    assert isinstance(play.only(Block), Block) and not play.view_acquiring()
    play.tick_until(5.0 + RETRY_S)
    assert play.view_acquiring()


@pytest.mark.parametrize("failed", [True, False])
def test_a_seated_node_that_is_gone_is_evicted_at_once_and_needs_no_fence(failed: bool) -> None:
    play = Play()
    play.train(1.0, "a", "b")
    gone = FleetNode(state=FleetState.GONE, reason="why", failed=failed)
    play.survey(5.0, a=gone, b=gone)
    play.hear(5.0, gone_alarm(4.5, "a", gone))
    assert play.phase() is Phase.STOPPING
    play.hear(5.0, gone_alarm(4.5, "b", gone))
    actions = play.hear(5.1, Outcome(action=play.view.awaited, ok=False, failed={"b": "it fell silent"}))
    assert not play.view.fenced, "it is proven that nothing runs there"
    assert {"a", "b"} <= set(play.view.gone)
    assert any(isinstance(action, Block) for action in actions) is failed


def test_the_same_without_proof_waits_behind_the_fence() -> None:
    play = Play()
    play.train(1.0, "a", "b")
    unknown = FleetNode(state=FleetState.UNKNOWN, reason="not responding")
    play.survey(5.0, a=unknown, b=unknown)
    for node in "ab":
        play.hear(5.0, gone_alarm(4.5, node, unknown))
    play.hear(5.1, Outcome(action=play.view.awaited, ok=False, failed={"b": "it fell silent"}))
    assert play.view.fenced == {"a", "b"}
    stop = [action.id for action in play.actions if isinstance(action, Dismiss)]
    play.hear(6.0, Outcome(action=stop[0], ok=False, detail="no answer"))
    play.give(6.0, "c", "d")
    play.ready(7.0, "c", "d")
    assert play.phase() is Phase.WAITING


def test_proof_that_comes_late_takes_the_fence_down() -> None:
    play = Play()
    play.train(1.0, "a", "b")
    for node in "ab":
        play.hear(5.0, gone_alarm(4.5, node, GONE))
    play.hear(5.1, Outcome(action=play.view.awaited, ok=False, failed={"b": "it fell silent"}))
    play.give(6.0, "c", "d")
    play.ready(7.0, "c", "d")
    assert play.phase() is Phase.WAITING and play.view.fenced == {"a", "b"}
    play.survey(8.0, a=GONE, b=GONE)
    assert play.phase() is Phase.LAUNCHING


def test_a_refusal_for_good_ends_a_job_that_has_never_trained() -> None:
    play = Play()
    play.hear(1.0, Outcome(action=play.view_acquiring()[0], ok=False, detail="invalid partition", refused=True))
    finish = play.only(Finish)
    assert isinstance(finish, Finish)
    assert (finish.code, finish.reason) == (2, "the fleet refuses nodes: invalid partition")


def test_a_refusal_for_good_is_told_once_to_a_job_that_trains() -> None:
    play = Play(standbys=1)
    play.train(1.0, "a", "b")
    play.tick_until(20.0)
    for now, told in ((20.0, 1), (60.0, 0)):
        play.hear(now, Outcome(action=play.view_acquiring()[0], ok=False, detail="no quota", refused=True))
        assert len(play.said()) == told and play.view.phase is Phase.TRAINING
        play.tick_until(now + 30.0)


def test_a_node_that_will_be_taken_away_is_replaced_ahead() -> None:
    play = Play(min_nodes=2)
    play.train(1.0, "a", "b")
    play.survey(2.0, a=up(), b=up())
    play.survey(10.0, a=up(ends_at=130.0, reason="Preempted"))
    assert play.said() == ["the fleet takes a away in 120 s (Preempted): another is asked for"]
    play.give(11.0, "c")
    play.ready(30.0, "c")
    assert play.phase() is Phase.PAUSING and isinstance(play.only(Stop), Stop)
    play.hear(31.0, Outcome(action=play.view.awaited, ok=True))
    launch = play.only(Launch)
    assert isinstance(launch, Launch) and [seat.node for seat in launch.seats] == ["c", "b"]
    assert "a" in play.view.gone
    play.launched(32.0)
    assert not play.view.draining


def test_a_standby_that_will_be_taken_away_is_told_and_another_asked_for() -> None:
    play = Play(standbys=1)
    play.train(1.0, "a", "b", "c")
    [spare] = play.view.pool
    play.survey(2.0, a=up(), b=up(), c=up())
    play.survey(10.0, **{spare: up(ends_at=50.0, reason="job 7 was cancelled by ann")})
    assert play.said() == [
        f"the fleet takes standby {spare} away in 40 s (job 7 was cancelled by ann): another is asked for"
    ]
    assert play.view_acquiring() and spare in play.view.gone and play.phase() is Phase.TRAINING
    play.give(11.0, "d", "e")
    play.ready(12.0, "d", "e")
    play.survey(13.0, d=up(), e=up())
    play.survey(14.0, e=up(ends_at=400.0))
    assert play.said() == ["the fleet takes standby e away in 6 min"], "there is one more than the job wants"
    assert not play.view_acquiring()


def test_a_time_limit_that_was_known_is_no_reason_to_hurry() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(ends_at=3600.0), b=up())
    play.ready(2.0, "a", "b")
    play.launched(3.0)
    assert not play.view.draining and play.wake_at == pytest.approx(3600.0 - 120.0 - 100.0)
    play.tick_until(3390.0)
    assert set(play.view.draining) == {"a"} and play.view_acquiring()
    play.survey(3400.0, a=up(ends_at=9000.0))
    assert not play.view.draining, "it may stay for longer"


def test_a_job_whose_nodes_all_end_together_ends_before_them_and_says_so() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(ends_at=3600.0), b=up(ends_at=3600.0))
    play.ready(2.0, "a", "b")
    play.launched(3.0)
    play.tick_until(3400.0)
    assert play.phase() is Phase.TRAINING and set(play.view.draining) == {"a", "b"}
    play.tick_until(3480.0)
    finish = play.only(Finish)
    assert isinstance(finish, Finish) and finish.code == OUT_OF_TIME
    assert finish.reason == (
        "time limit: the fleet takes all nodes away in 120 s, and too few others have come;"
        " the job can go on from its last checkpoint"
    )
    assert finish.last_s == 60.0, "storage gets half of the time that is left"


@pytest.mark.parametrize(("reason", "said"), [("job 7 was cancelled by me", "job 7 was cancelled by me: "), ("", "")])
def test_an_end_ahead_of_its_time_is_no_time_limit(reason: str, said: str) -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(ends_at=3600.0), b=up(ends_at=3600.0))
    play.ready(2.0, "a", "b")
    play.launched(3.0)
    ends = up(ends_at=10.0, reason=reason)
    play.survey(10.0, a=ends, b=ends)
    finish = play.only(Finish)
    assert isinstance(finish, Finish) and finish.code == OUT_OF_TIME
    assert finish.reason.startswith(f"{said}the fleet ") and " 0 s, " in finish.reason


def test_a_successor_takes_the_seats_of_all() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(ends_at=3600.0), b=up(ends_at=3600.0))
    play.ready(2.0, "a", "b")
    play.launched(3.0)
    play.tick_until(3400.0)
    play.give(3400.0, "c", "d")
    play.survey(3401.0, c=up(ends_at=9000.0), d=up(ends_at=9000.0))
    play.ready(3410.0, "c", "d")
    assert play.phase() is Phase.PAUSING
    play.hear(3411.0, Outcome(action=play.view.awaited, ok=True))
    launch = play.only(Launch)
    assert isinstance(launch, Launch) and {seat.node for seat in launch.seats} == {"c", "d"}


def test_a_node_without_replacement_leaves_before_its_end_only_if_the_job_can_shrink() -> None:
    for min_nodes, phase in ((1, Phase.PAUSING), (2, Phase.TRAINING)):
        play = Play(min_nodes=min_nodes)
        play.train(1.0, "a", "b")
        play.survey(2.0, a=up(), b=up())
        play.survey(10.0, a=up(ends_at=110.0))
        play.tick_until(59.0)
        assert play.phase() is Phase.TRAINING
        play.tick_until(60.0)
        assert play.phase() is phase


def test_seats_carry_where_their_machines_are() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(1.0, a=up(near=("rack", "s1")))
    play.ready(2.0, "a", "b")
    assert {seat.node: seat.near for seat in play.view.seats} == {"a": ("rack", "s1"), "b": ()}


def test_nodes_that_are_lost_together_are_told_with_what_they_share() -> None:
    play = Play(min_nodes=3, max_nodes=3)
    play.give(1.0, "a", "b", "c")
    play.survey(1.0, a=up(near=("row", "s1")), b=up(near=("row", "s1")), c=up(near=("row", "s2")))
    play.ready(2.0, "a", "b", "c")
    play.launched(3.0)
    gone = FleetNode(state=FleetState.GONE)
    play.survey(5.0, a=gone, b=gone)
    for node in "ab":
        play.hear(5.0, gone_alarm(4.5, node, gone))
    play.hear(5.1, Outcome(action=play.view.awaited, ok=True))
    assert play.said() == ["a, b fell silent at once, all of s1: a switch, a cable or their power; evicted"]
    assert {action.node for action in play.actions if isinstance(action, Dismiss)} == {"a", "b"}


def test_what_is_due_is_computed_anew_only_when_something_changes() -> None:
    """Every event asks, and a large job has thousands of nodes with a time limit."""
    states = FleetStates(leave_s=60.0)
    told = {node: FleetNode(state=FleetState.UP, ends_at=at) for node, at in (("a", 1000.0), ("b", 2000.0))}
    states.take_report(0.0, told)
    none, a = states.due_nodes(1.0, 100.0), frozenset({"a"})
    assert (none, states.wake_at) == ((frozenset(), frozenset()), 840.0)
    assert states.due_nodes(839.0, 100.0)[0] is none[0]
    assert states.due_nodes(840.0, 100.0) == (a, frozenset()) and states.wake_at == 940.0
    assert states.due_nodes(940.0, 100.0) == (a, a) and states.wake_at == 1840.0
    assert states.due_nodes(941.0, 1000.0) == (a, a) and states.wake_at == 1000.0, "b: half of its time"
    states.forget_node("a")
    assert states.due_nodes(942.0, 1000.0) == (frozenset(), frozenset())
    states.take_report(943.0, {"b": FleetNode(state=FleetState.UP, ends_at=1100.0)})
    assert states.due_nodes(943.0, 1000.0)[0] == {"b"}, "earlier than was known"


def test_a_job_is_not_given_up_while_the_node_that_it_waits_for_is_checked() -> None:
    play = Play(min_nodes=1, max_nodes=1, limits=msgspec.structs.replace(LIMITS, wait_s=20.0), checks=True)
    play.train(1.0, "a")
    play.survey(10.0, a=GONE)
    play.hear(10.0, gone_alarm(10.0, "a", GONE))
    play.hear(11.0, Outcome(action=play.view.awaited, ok=True))
    play.give(12.0, "b")
    play.ready(13.0, "b")
    probe = play.only(Probe)
    assert isinstance(probe, Probe) and probe.nodes == ("b",)
    play.tick_until(70.0)
    assert play.phase() is Phase.WAITING
    play.hear(71.0, Outcome(action=probe.id, ok=True))
    assert play.phase() is Phase.LAUNCHING
