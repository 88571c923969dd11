"""The checks see what they are there to see: a decider with a planted bug does not pass."""

from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from holdfast.core.decide import launching, recovery
from holdfast.core.decide.decider import Decider
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.incident.first_cause import Incident
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.incident.ladder_case import IncidentCase
from holdfast.core.membership.standbys import Standbys
from holdfast.model.action import Action, Dismiss, Finish, Launch, Stop
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Begin, Decision, Entry, Limits, Phase, Tick
from holdfast.model.job_and_seats import Job, Seat
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import HARSH, FaultRates, NodeLoss
from holdfast.sim.invariants import InvariantWatch, RecoveryEffort, UnsafeError
from holdfast.sim.job_world import SimSetup
from tests.core.transcript import Scenario

SMALL = SimSetup(seed=3, nodes=4, standbys=1, days=1.0, rates=HARSH)


def test_without_a_bug_it_passes() -> None:
    simulate(SMALL)


def planted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: object) -> str:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(UnsafeError) as caught:
        simulate(SMALL)
    return str(caught.value)


def test_a_launch_on_a_lost_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(state: JobState, now: float, nodes: object, silent: object, *, examine: bool = True) -> str:
        return "nobody"

    assert "known as lost" in planted(monkeypatch, launching, "evict_nodes", nobody)


def test_ranks_that_are_not_stopped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = recovery.open_trouble

    def spares_one(state: JobState, now: float, alarm: object) -> str:
        reason = trouble(state, now, alarm)  # type: ignore[arg-type]
        last = state.actions[-1]
        assert isinstance(last, Stop)
        state.actions[-1] = msgspec.structs.replace(last, nodes=last.nodes[:1])
        return reason

    assert "ranks of an older generation live on" in planted(monkeypatch, recovery, "open_trouble", spares_one)


def test_a_launch_without_a_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def restarts_at_once(state: JobState, now: float, alarm: object) -> str:
        state.phase = Phase.WAITING  # as if all ranks were down
        return launching.launch_or_wait(state, now)

    assert "is stopped before" in planted(monkeypatch, recovery, "open_trouble", restarts_at_once)


def test_a_job_that_never_comes_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "on_stopped", lambda state, now, event: "and now?")
    with pytest.raises(UnsafeError, match="what is awaited can come"):
        simulate(SMALL)


def test_a_pool_that_is_not_refilled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    refill = Standbys.request_missing

    def only_once(self: Standbys, active: int) -> object:
        return () if self.gone else refill(self, active)

    assert "whoever is missing has been asked for" in planted(monkeypatch, Standbys, "request_missing", only_once)


def test_training_that_does_not_come_back_in_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sim.checked_seed_run.CALM_S", 30.0)  # less than a launch takes
    lost = SimSetup(
        seed=3, nodes=4, standbys=0, days=0.04, rates=FaultRates(loss=0.0, crash=0.0), script=((3450.0, NodeLoss()),)
    )
    with pytest.raises(UnsafeError, match="30 s after the last fault"):
        simulate(lost)


def test_giving_up_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncidentCase, "fruitless_restarts", 99)
    with pytest.raises(UnsafeError, match="gave up too early"):
        simulate(SMALL)


def gives_up(*codes: int) -> str:
    """What is said of a job that gives up when its ranks have ended with these codes, before any step."""
    begin = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=1, can_acquire=False), limits=Limits())
    effort, finish = RecoveryEffort(), Finish(id=9, code=GAVE_UP, grace_s=1.0, reason="in vain")
    effort.on_entry(Entry(seq=1, at=1.0, event=begin, decision=Decision()))
    for seq, code in enumerate(codes, 2):
        alarm = Alarm(kind=Kind.CRASH, at=2.0, suspects=("n0",), reason=f"exited with code {code}", code=code)
        effort.on_entry(Entry(seq=seq, at=2.0, event=alarm, decision=Decision()))
    try:
        effort.on_entry(Entry(seq=99, at=3.0, event=Tick(), decision=Decision(actions=(finish,))))
    except UnsafeError as e:
        return str(e)
    return ""


def test_a_script_that_ends_itself_again_before_any_step_may_be_given_up() -> None:
    assert gives_up(1, 1) == ""
    assert "too early" in gives_up(1)
    assert "too early" in gives_up(-9, -9), "which a machine may well do"


def test_an_action_id_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = launching.on_begin

    def forgets(state: JobState, now: float, event: object) -> str:
        reason = begin(state, now, event)  # type: ignore[arg-type]
        state.nodes.standbys._ids = count(1)
        return reason

    assert "action ids grow" in planted(monkeypatch, launching, "on_begin", forgets)


def test_an_incident_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Incident.make_record

    def miscounts(self: Incident, *args: object) -> object:
        return msgspec.structs.replace(record(self, *args), number=self.number + 1)  # type: ignore[arg-type]

    assert "every incident is closed once" in planted(monkeypatch, Incident, "make_record", miscounts)


def doctored(change: Callable[[Action], Action | None], scenario: str = "silence_after_echoes") -> str:
    """A journal that was tampered with, as the watch sees it."""
    played = Scenario(scenario)
    played.play()
    with pytest.raises(UnsafeError) as caught:
        _watch(played.entries, change)
    return str(caught.value)


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
    assert "generations grow by one" in doctored(relaunched(generation=7))


def test_seats_that_do_not_fit_are_seen() -> None:
    twice = tuple(Seat(node="n0", group_rank=i, first_rank=2 * i, nproc=2) for i in range(2))
    assert "a node has one seat" in doctored(relaunched(seats=twice))
    gap = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=3 * i, nproc=2) for i in range(2))
    assert "ranks are numbered without gaps" in doctored(relaunched(seats=gap))


def test_an_awaited_action_that_was_never_issued_is_seen() -> None:
    assert "what is awaited can come" in doctored(lambda a: None if isinstance(a, Stop) else a)


def test_a_launch_on_a_released_node_is_seen() -> None:
    def releases_another(action: Action) -> Action:
        return msgspec.structs.replace(action, node="n0") if isinstance(action, Dismiss) else action

    assert "known as lost" in doctored(releases_another)


def test_a_launch_beside_ranks_that_nobody_has_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Scenario("nobody_confirms_and_nobody_knows")
    monkeypatch.setattr(Fence, "raise_fence", lambda self, now, nodes: [])
    played.play()
    decider, watch = Decider(), InvariantWatch()

    def looks() -> None:
        for entry in played.entries:
            decider.step(entry.at, entry.event)
            watch.check_entry(entry, decider.view)

    with pytest.raises(UnsafeError, match="n0 may have ranks when 2 is launched"):
        looks()


def test_a_tick_that_asks_for_itself_is_seen() -> None:
    played = Scenario("acquire_fails_and_is_retried")
    played.play()
    decider, watch = Decider(), InvariantWatch()
    for entry in played.entries:
        decider.step(entry.at, entry.event)
        if isinstance(entry.event, Tick):
            entry = msgspec.structs.replace(entry, decision=msgspec.structs.replace(entry.decision, wake_at=entry.at))
            with pytest.raises(UnsafeError, match="same tick"):
                watch.check_entry(entry, decider.view)
            return
        watch.check_entry(entry, decider.view)
    pytest.fail("the scenario has no tick")
