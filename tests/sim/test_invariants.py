"""The checks see what they are there to see: a decider with a planted bug does not pass."""

from collections.abc import Callable, Set
from itertools import count

import msgspec
import pytest

from holdfast.core.decide import incident_course, launching
from holdfast.core.decide.decider import Decider
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.incident.incident_case import IncidentCase
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.incident.open_incident import Incident
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.membership.standbys import Standbys
from holdfast.model.action import Action, Dismiss, Finish, Launch, Stop
from holdfast.model.decider_events import Begin, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job, Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import HARSH, FaultRates, NodeLoss
from holdfast.sim.invariants import Invariant, InvariantWatch, RecoveryEffort, UnsafeError
from holdfast.sim.job_world import SimSetup
from tests.core.transcript import Scenario

SMALL = SimSetup(seed=3, nodes=4, standbys=1, days=1.0, rates=HARSH)


def test_without_a_bug_it_passes() -> None:
    simulate(SMALL)


def planted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: object) -> Invariant:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(UnsafeError) as caught:
        simulate(SMALL)
    return caught.value.invariant


def test_a_launch_on_a_lost_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **flags: object) -> str:
        return "nobody"

    assert planted(monkeypatch, launching, "evict_nodes", nobody) is Invariant.NO_LOST_NODE


def test_ranks_that_are_not_stopped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = incident_course.open_trouble

    def spares_one(state: JobState, now: float, alarm: object) -> str:
        reason = trouble(state, now, alarm)  # type: ignore[arg-type]
        last = state.actions[-1]
        assert isinstance(last, Stop)
        state.actions[-1] = msgspec.structs.replace(last, nodes=last.nodes[:1])
        return reason

    assert planted(monkeypatch, incident_course, "open_trouble", spares_one) is Invariant.OLD_RANKS_UNREACHABLE


def test_a_launch_without_a_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def restarts_at_once(state: JobState, now: float, alarm: object) -> str:
        state.phase = Phase.WAITING  # as if all ranks were down
        return launching.launch_or_wait(state, now)

    assert planted(monkeypatch, incident_course, "open_trouble", restarts_at_once) is Invariant.STOPPED_BEFORE_LAUNCH


def test_a_job_that_never_comes_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_course, "on_stopped", lambda state, now, event: "and now?")
    with pytest.raises(UnsafeError) as caught:
        simulate(SMALL)
    assert caught.value.invariant is Invariant.AWAITED_CAN_COME


def test_a_pool_that_is_not_refilled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    refill = Standbys.request_missing

    def only_once(self: Standbys, active: int, without_links: Set[str]) -> object:
        return () if self.gone else refill(self, active, without_links)

    assert planted(monkeypatch, Standbys, "request_missing", only_once) is Invariant.MISSING_IS_REQUESTED


def test_training_that_does_not_come_back_in_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sim.checked_seed_run.CALM_S", 30.0)  # less than a launch takes
    lost = SimSetup(
        seed=3, nodes=4, standbys=0, days=0.04, rates=FaultRates(loss=0.0, crash=0.0), script=((3450.0, NodeLoss()),)
    )
    with pytest.raises(UnsafeError) as caught:
        simulate(lost)
    assert caught.value.invariant is Invariant.TRAINS_AGAIN


def test_giving_up_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncidentCase, "fruitless_restarts", 99)
    with pytest.raises(UnsafeError) as caught:
        simulate(SMALL)
    assert caught.value.invariant is Invariant.GIVES_UP_LATE


def gives_up(*codes: int) -> Invariant | None:
    """What is broken by a job that gives up when its ranks have ended with these codes, before any step."""
    begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1, can_acquire=False), limits=Limits())
    effort, finish = RecoveryEffort(), Finish(id=9, code=GAVE_UP, grace_s=1.0, reason="in vain")
    effort.on_entry(Entry(seq=1, at=1.0, event=begin, decision=Decision()))
    for seq, code in enumerate(codes, 2):
        alarm = Alarm(kind=Kind.CRASH, at=2.0, suspects=("n0",), reason=f"exited with code {code}", code=code)
        effort.on_entry(Entry(seq=seq, at=2.0, event=alarm, decision=Decision()))
    try:
        effort.on_entry(Entry(seq=99, at=3.0, event=Tick(), decision=Decision(actions=(finish,))))
    except UnsafeError as e:
        return e.invariant
    return None


def test_a_script_that_ends_itself_again_before_any_step_may_be_given_up() -> None:
    assert gives_up(1, 1) is None
    assert gives_up(1) is Invariant.GIVES_UP_LATE
    assert gives_up(-9, -9) is Invariant.GIVES_UP_LATE, "which a machine may well do"


def test_an_action_id_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = launching.on_begin

    def forgets(state: JobState, now: float, event: object) -> str:
        reason = begin(state, now, event)  # type: ignore[arg-type]
        state.nodes.standbys._ids = count(1)
        return reason

    assert planted(monkeypatch, launching, "on_begin", forgets) is Invariant.ACTION_IDS_GROW


def test_an_incident_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Incident.make_record

    def miscounts(self: Incident, *args: object) -> object:
        return msgspec.structs.replace(record(self, *args), number=self.number + 1)  # type: ignore[arg-type]

    assert planted(monkeypatch, Incident, "make_record", miscounts) is Invariant.INCIDENT_CLOSED_ONCE


def doctored(change: Callable[[Action], Action | None], scenario: str = "silence_after_echoes") -> Invariant:
    """A journal that was tampered with, as the watch sees it."""
    played = Scenario(scenario)
    played.play()
    with pytest.raises(UnsafeError) as caught:
        _watch(played.entries, change)
    return caught.value.invariant


def _watch(entries: list[Entry], change: Callable[[Action], Action | None]) -> None:
    decider, watch = Decider(), InvariantWatch()
    for entry in entries:
        decider.step(entry.at, entry.event)
        actions = tuple(a for action in entry.decision.actions if (a := change(action)) is not None)
        watch.check_entry(_with(entry, actions), decider.view)


def _with(entry: Entry, actions: tuple[Action, ...]) -> Entry:
    return msgspec.structs.replace(entry, decision=msgspec.structs.replace(entry.decision, actions=actions))


def relaunched(**changes: object) -> Callable[[Action], Action]:
    return lambda a: msgspec.structs.replace(a, **changes) if isinstance(a, Launch) else a


def test_generations_that_do_not_count_by_one_are_seen() -> None:
    assert doctored(relaunched(generation=7)) is Invariant.GENERATIONS_GROW


def test_seats_that_do_not_fit_are_seen() -> None:
    twice = tuple(Seat(node="n0", group_rank=i, first_rank=2 * i, nproc=2) for i in range(2))
    assert doctored(relaunched(seats=twice)) is Invariant.ONE_SEAT_PER_NODE
    gap = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=3 * i, nproc=2) for i in range(2))
    assert doctored(relaunched(seats=gap)) is Invariant.RANKS_WITHOUT_GAPS


def test_an_awaited_action_that_was_never_issued_is_seen() -> None:
    assert doctored(lambda a: None if isinstance(a, Stop) else a) is Invariant.AWAITED_CAN_COME


def test_a_launch_on_a_released_node_is_seen() -> None:
    def releases_another(action: Action) -> Action:
        return msgspec.structs.replace(action, node="n0") if isinstance(action, Dismiss) else action

    assert doctored(releases_another) is Invariant.NO_LOST_NODE


def test_a_launch_beside_ranks_that_nobody_has_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Scenario("nobody_confirms_and_nobody_knows")
    monkeypatch.setattr(Fence, "raise_fence", lambda self, now, nodes: [])
    played.play()
    decider, watch = Decider(), InvariantWatch()

    def looks() -> None:
        for entry in played.entries:
            decider.step(entry.at, entry.event)
            watch.check_entry(entry, decider.view)

    with pytest.raises(UnsafeError) as caught:
        looks()
    assert caught.value.invariant is Invariant.NO_RANKS_LEFT and caught.value.detail == "n0 at generation 2"


def test_an_eviction_for_a_standby_without_a_link_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(JobNodes, "can_do_without", lambda self, nodes: True)
        assert doctored(lambda action: action, "standbys_without_links") is Invariant.EVICTS_REPLACEABLE
    monkeypatch.setattr(JobNodes, "usable_pool", property(lambda self: self.pool))
    assert doctored(lambda action: action, "standbys_without_links") is Invariant.ADMITTED_HAS_LINKS


def test_a_job_that_has_enough_nodes_and_gives_up_for_want_of_them_is_seen() -> None:
    played = Scenario("switch_amid_a_wait_for_nodes")
    played.play()
    decider, watch = Decider(), InvariantWatch()
    for entry in played.entries:
        decider.step(entry.at, entry.event)
        if entry.at == 911.0:
            entry = _with(entry, (Finish(id=3, code=GAVE_UP, grace_s=1.0, reason="not enough nodes"),))
            with pytest.raises(UnsafeError) as caught:
                watch.check_entry(entry, decider.view)
            assert caught.value.invariant is Invariant.ENOUGH_IS_ENOUGH
            return
        watch.check_entry(entry, decider.view)


def test_a_tick_that_asks_for_itself_is_seen() -> None:
    played = Scenario("acquire_fails_and_is_retried")
    played.play()
    decider, watch = Decider(), InvariantWatch()
    for entry in played.entries:
        decider.step(entry.at, entry.event)
        if isinstance(entry.event, Tick):
            entry = msgspec.structs.replace(entry, decision=msgspec.structs.replace(entry.decision, wake_at=entry.at))
            with pytest.raises(UnsafeError) as caught:
                watch.check_entry(entry, decider.view)
            assert caught.value.invariant is Invariant.TICK_MOVES_ON
            return
        watch.check_entry(entry, decider.view)
    pytest.fail("the scenario has no tick")
