"""Nodes beside the seats: who is asked for, who is taken, who is sent away."""

from itertools import count

from holdfast.core.membership.standbys import RETRY_S, Standbys
from holdfast.model.action import Acquire, Dismiss, Dismissal, Probe, Say
from holdfast.model.decider_events import Outcome, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Kind
from holdfast.model.job_and_seats import Job


def standbys(*, can_acquire: bool = True) -> Standbys:
    job = Job(run_id="r", min_nodes=2, max_nodes=2, standbys=1, can_acquire=can_acquire)
    return Standbys(job, Limits(ready_s=100.0), count(1))


def ready(node: str) -> Ready:
    return Ready(node=node, host=node, nproc=1)


def test_it_asks_for_what_is_missing_and_only_once() -> None:
    beside = standbys()
    assert beside.request_missing(0) == (Acquire(id=1, count=3),)
    assert beside.request_missing(0) == ()
    assert beside.on_acquired(5.0, Outcome(action=1, ok=True, nodes=("a", "b", "c")), set()) == (
        "the fleet gave 3 of 3, a, b, c will come"
    )
    assert beside.request_missing(0) == ()
    for node in "abc":
        assert beside.on_ready(ready(node), 0) == ()
    assert (sorted(beside.pool), beside.coming, beside.wake_at()) == (["a", "b", "c"], {}, None)
    assert beside.request_missing(0) == ()


def test_a_fleet_that_cannot_acquire_is_not_asked() -> None:
    assert standbys(can_acquire=False).request_missing(0) == ()


def test_too_few_are_asked_for_again_after_a_while() -> None:
    for outcome in (
        Outcome(action=1, ok=False, detail="no quota"),
        Outcome(action=1, ok=True),
        Outcome(action=1, ok=True, nodes=("a", "b")),
    ):
        beside = standbys()
        beside.request_missing(0)
        beside.on_acquired(5.0, outcome, set())
        assert beside.request_missing(0) == ()
        assert beside.wake_at() == 5.0 + RETRY_S
        beside.tick(5.0 + RETRY_S - 1)
        assert beside.request_missing(0) == ()
        beside.tick(5.0 + RETRY_S)
        assert beside.request_missing(0) == (Acquire(id=2, count=3 - len(outcome.nodes)),)


def test_nodes_known_before_the_outcome_are_not_waited_for() -> None:
    beside = standbys()
    beside.request_missing(0)
    beside.on_ready(ready("a"), 0)
    beside.on_ready(ready("lost"), 0)
    beside.dismiss_node("lost", Kind.SILENCE, "silent", Dismissal.EVICTED)
    beside.on_acquired(5.0, Outcome(action=1, ok=True, nodes=("a", "seated", "lost")), {"seated"})
    assert beside.coming == {}


def test_who_does_not_report_in_time_is_given_back() -> None:
    beside = standbys()
    beside.request_missing(0)
    beside.on_acquired(5.0, Outcome(action=1, ok=True, nodes=("a", "b", "c")), set())
    beside.on_ready(ready("a"), 0)
    assert beside.wake_at() == 105.0
    assert beside.tick(104.0) == ()
    assert [action.node for action in beside.tick(105.0)] == ["b", "c"]
    assert beside.request_missing(0) == (Acquire(id=4, count=2),)
    assert [type(action) for action in beside.on_ready(ready("b"), 0)] == [Dismiss, Say]  # too late
    assert sorted(beside.pool) == ["a"]


def test_who_left_is_not_taken_back() -> None:
    for kind in (Kind.SILENCE, Kind.CRASH, None):
        beside = standbys()
        assert len(beside.dismiss_node("a", kind, "evicted", Dismissal.EVICTED)) == 1
        assert [type(action) for action in beside.on_ready(ready("a"), 0)] == [Dismiss, Say]
        assert [type(action) for action in beside.on_ready(ready("a"), 0)] == [Dismiss], "it is told once"
        assert beside.pool == {}


def test_who_is_back_and_who_came_too_late_are_told_apart() -> None:
    beside = standbys()
    beside.on_ready(ready("a"), 0)
    for node in ("a", "late"):
        beside.dismiss_node(node, None, "not ready within 100 s", Dismissal.LATE)
    said = [
        action.text for node in ("a", "late") for action in beside.on_ready(ready(node), 0) if isinstance(action, Say)
    ]
    assert said == [
        "a is back, and is not taken again: it had left the job before",
        "late came after it had been given back, and is not taken",
    ]


def test_a_node_that_was_silent_is_told_when_it_is_back_and_when_it_has_passed_its_check() -> None:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, can_acquire=False, checks=True)
    for failed, told in (({}, "a passed its check and is a standby"), ({"a": "no GPU"}, "a failed its check: no GPU")):
        beside = Standbys(job, Limits(), count(1))
        beside.on_ready(ready("a"), 0)
        beside.dismiss_node("a", Kind.SILENCE, "evicted", Dismissal.EVICTED)
        said, probe = beside.on_ready(ready("a"), 2)
        assert isinstance(probe, Probe)
        assert said == Say(text="a is back, and is checked before it may have ranks again")
        _, actions = beside.on_checked(9.0, Outcome(action=probe.id, ok=True, failed=failed))
        end = "; it gets no ranks" if failed else ""
        said = Say(text=f"after its return: {told}{end}", standbys=("a",) if failed else ())
        assert actions[-1] == said
        assert sorted(beside.pool) == ([] if failed else ["a"])


def test_checks_of_standbys_that_were_never_away_are_not_told() -> None:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, checks=True)
    beside = Standbys(job, Limits(recheck_s=10.0), count(1))
    [probe] = beside.on_ready(ready("a"), 2)
    assert isinstance(probe, Probe)
    assert beside.on_checked(1.0, Outcome(action=probe.id, ok=True))[1] == ()
    [again] = beside.recheck_due(11.0)
    assert beside.on_checked(12.0, Outcome(action=again.id, ok=True))[1] == ()


def test_who_fails_its_check_had_no_seat_and_everybody_is_told_why() -> None:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, checks=True)
    beside = Standbys(job, Limits(), count(1))
    [probe] = beside.on_ready(ready("a"), 2)
    assert isinstance(probe, Probe)
    _, actions = beside.on_checked(9.0, Outcome(action=probe.id, ok=True, failed={"a": "no GPU"}))
    assert actions[-1] == Say(text="a failed its check: no GPU; it gets no ranks", standbys=("a",))
    assert (beside.unseated, beside.departures) == ({"a"}, {"a": "failed its check: no GPU"})


def test_a_check_that_had_no_processor_costs_no_standby_and_clears_no_suspect() -> None:
    job, late = (
        Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, checks=True, probes=True),
        "the probe did not finish",
    )
    beside = Standbys(job, Limits(), count(1))
    [probe] = beside.on_ready(ready("a"), 2)
    assert isinstance(probe, Probe)
    _, actions = beside.on_checked(9.0, Outcome(action=probe.id, ok=True, untested=("a",), detail=late))
    assert actions == (Say(text=f"a is a standby, unchecked: {late}"),) and list(beside.pool) == ["a"]
    beside.admit_node("a")
    beside.evict_node("a", Kind.CRASH, 1, examine=True)
    [examine] = beside.examine_evicted(set())
    _, actions = beside.on_examined(19.0, Outcome(action=examine.id, ok=True, untested=("a",), detail=late))
    assert actions[-1] == Say(text=f"after its eviction: whether a is bad is not known: {late}")
    assert not beside.pool and beside.departures == {"a": f"not examined: {late}"}


def test_unless_nobody_else_will_come() -> None:
    beside = standbys(can_acquire=False)
    assert (
        beside.dismiss_node("a", Kind.SILENCE, "evicted", Dismissal.EVICTED) == ()
    )  # releasing it would tell it to leave when it is back
    assert beside.on_ready(ready("a"), 0) == (Say(text="a is back, and may have ranks again"),)
    assert (sorted(beside.pool), beside.gone) == (["a"], {})
    assert len(beside.dismiss_node("a", Kind.CRASH, "evicted", Dismissal.EVICTED)) == 1
    assert [type(action) for action in beside.on_ready(ready("a"), 0)] == [Dismiss, Say]


def test_lost_names_those_that_are_here() -> None:
    beside = standbys()
    beside.request_missing(0)
    beside.on_acquired(5.0, Outcome(action=1, ok=True, nodes=("a", "b", "c")), set())
    beside.on_ready(ready("a"), 0)
    assert beside.beside_job(("x", "b", "a")) == ("b", "a")


def test_one_that_is_checked_before_its_outcome_is_heard_is_not_expected_again() -> None:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, standbys=1, checks=True)
    beside = Standbys(job, Limits(ready_s=100.0), count(1))
    assert beside.request_missing(1) == (Acquire(id=1, count=1),)
    [probe] = beside.on_ready(ready("a"), 2)
    assert isinstance(probe, Probe)
    assert beside.checking == {probe.id: "a"}
    beside.on_acquired(5.0, Outcome(action=1, ok=True, nodes=("a",)), set())
    assert beside.coming == {}, "it is here, and must not be given back for never having come"


def asked(beside: Standbys, now: float, active: int = 2) -> str:
    (action,) = beside.request_missing(active)
    beside.on_acquired(now, Outcome(action=action.id, ok=True, nodes=(f"m{action.id}",)), {"a", "b"})
    return f"m{action.id}"


def late(beside: Standbys, now: float, *, standing: bool = False) -> float:
    """The next node is asked for and does not come: when it is given back."""
    node = asked(beside, now)
    until = beside.wake_at(standing=standing)
    assert until is not None and beside.tick(until - 1, standing=standing) == ()
    (given_back,) = beside.tick(until, standing=standing)
    assert given_back.node == node
    return until


def comes(beside: Standbys, now: float, node: str) -> None:
    beside.on_arrival(now, node)
    beside.on_ready(ready(node), 0)
    beside.dismiss_node(node, None, "another needs it", Dismissal.SPARE)


def test_a_fleet_that_brings_nobody_in_time_is_given_longer() -> None:
    beside = standbys()
    now, took = 0.0, []
    for _ in range(7):
        now, since = late(beside, now), now
        took.append(now - since)
    assert took == [100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 3200.0]
    comes(beside, now + 900.0, asked(beside, now))
    assert late(beside, 0.0) == 1800.0, "twice what one took"
    comes(beside, 20.0, asked(beside, 0.0))
    assert late(beside, 0.0) == 100.0, "the fleet is fast again"


def test_nodes_that_are_late_together_are_late_once() -> None:
    beside = standbys()
    for now in (0.0, 10.0, 20.0):  # each time it gives one of those that are missing
        beside.tick(now)
        asked(beside, now, active=0)
    assert len(beside.tick(100.0)) == 1
    assert beside.wake_at() == 210.0 and beside.tick(209.0) == ()


def test_a_job_that_stands_does_not_wait_for_one_node_alone() -> None:
    beside = standbys()
    beside.limits = Limits(ready_s=100.0, wait_s=600.0)
    took = [late(beside, 0.0, standing=True) for _ in range(4)]
    assert took == [100.0, 200.0, 300.0, 300.0]
    assert late(beside, 0.0) == 600.0, "what is asked for in the background has its time"


def test_a_late_node_among_others_that_came_is_no_slow_fleet() -> None:
    beside = standbys()
    now = 0.0
    for other in "cdefg":
        now, since = late(beside, now), now
        assert now - since == 100.0
        comes(beside, now, other)


def test_who_comes_after_it_was_given_back_tells_of_a_slow_fleet() -> None:
    beside = standbys()
    for expected in (100.0, 200.0, 400.0):
        assert late(beside, 0.0) == expected
        gone = [*beside.gone][-1]
        beside.on_arrival(expected, gone)
        assert [type(action) for action in beside.on_ready(ready(gone), 0)] == [Dismiss, Say]


def test_pauses_between_requests_grow_until_a_node_comes() -> None:
    beside = standbys()
    assert [beside.pause_requests(0.0) for _ in range(3)] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    beside.on_arrival(1.0, "a")
    assert beside.pause_requests(1.0) == RETRY_S
