"""The checks see what they are there to see: a decider with a planted bug does not pass."""

from collections.abc import Callable
from itertools import count

import msgspec
import pytest

from holdfast.core import generation, healing
from holdfast.core.decider import Decider
from holdfast.core.diagnose.case import Case
from holdfast.core.standby import Standbys
from holdfast.core.triage import Incident
from holdfast.model.action import Action, Dismiss, Launch, Stop
from holdfast.model.event import Entry, Tick
from holdfast.model.topology import Seat
from holdfast.sim.checks import Unsafe, Watch
from holdfast.sim.faults import HARSH, Loss, Rates
from holdfast.sim.run import simulate
from holdfast.sim.world import Setup
from tests.core.transcript import Scenario

SMALL = Setup(seed=3, nodes=4, standbys=1, days=1.0, rates=HARSH)


def test_without_a_bug_it_passes() -> None:
    simulate(SMALL)


def planted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: object) -> str:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(Unsafe) as caught:
        simulate(SMALL)
    return str(caught.value)


def test_a_launch_on_a_lost_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(decider: Decider, now: float, nodes: object, silent: object, *, examine: bool = True) -> str:
        return "nobody"

    assert "known as lost" in planted(monkeypatch, generation, "evict", nobody)


def test_ranks_that_are_not_stopped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = healing.trouble

    def spares_one(decider: Decider, now: float, alarm: object) -> str:
        reason = trouble(decider, now, alarm)  # type: ignore[arg-type]
        last = decider.actions[-1]
        assert isinstance(last, Stop)
        decider.actions[-1] = msgspec.structs.replace(last, nodes=last.nodes[:1])
        return reason

    assert "ranks of an older generation live on" in planted(monkeypatch, healing, "trouble", spares_one)


def test_a_launch_without_a_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def restarts_at_once(decider: Decider, now: float, alarm: object) -> str:
        return generation.next_generation(decider, now)

    assert "is stopped before" in planted(monkeypatch, healing, "trouble", restarts_at_once)


def test_a_job_that_never_comes_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "stopped", lambda decider, now, event: "and now?")
    with pytest.raises(Unsafe, match="what is awaited can come"):
        simulate(SMALL)


def test_a_pool_that_is_not_refilled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    refill = Standbys.refill

    def only_once(self: Standbys, active: int) -> object:
        return () if self.gone else refill(self, active)

    assert "whoever is missing has been asked for" in planted(monkeypatch, Standbys, "refill", only_once)


def test_training_that_does_not_come_back_in_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sim.run.CALM_S", 30.0)  # less than a launch takes
    lost = Setup(seed=3, nodes=4, standbys=0, days=0.04, rates=Rates(loss=0.0, crash=0.0), script=((3450.0, Loss()),))
    with pytest.raises(Unsafe, match="30 s after the last fault"):
        simulate(lost)


def test_giving_up_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "fruitless", 99)
    with pytest.raises(Unsafe, match="gave up too early"):
        simulate(SMALL)


def test_an_action_id_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = generation.begin

    def forgets(decider: Decider, now: float, event: object) -> str:
        reason = begin(decider, now, event)  # type: ignore[arg-type]
        decider.nodes.standbys._ids = count(1)
        return reason

    assert "action ids grow" in planted(monkeypatch, generation, "begin", forgets)


def test_an_incident_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Incident.record

    def miscounts(self: Incident, *args: object) -> object:
        return msgspec.structs.replace(record(self, *args), number=self.number + 1)  # type: ignore[arg-type]

    assert "every incident is closed once" in planted(monkeypatch, Incident, "record", miscounts)


def doctored(change: Callable[[Action], Action | None], scenario: str = "silence_after_echoes") -> str:
    """A journal that was tampered with, as the watch sees it."""
    played = Scenario(scenario)
    played.play()
    with pytest.raises(Unsafe) as caught:
        _watch(played.entries, change)
    return str(caught.value)


def _watch(entries: list[Entry], change: Callable[[Action], Action | None]) -> None:
    decider, watch = Decider(), Watch()
    for entry in entries:
        decider.step(entry.at, entry.event)
        actions = tuple(a for action in entry.decision.actions if (a := change(action)) is not None)
        watch.look(_with(entry, actions), decider)


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


def test_a_tick_that_asks_for_itself_is_seen() -> None:
    played = Scenario("acquire_fails_and_is_retried")
    played.play()
    decider, watch = Decider(), Watch()
    for entry in played.entries:
        decider.step(entry.at, entry.event)
        if isinstance(entry.event, Tick):
            entry = msgspec.structs.replace(entry, decision=msgspec.structs.replace(entry.decision, wake_at=entry.at))
            with pytest.raises(Unsafe, match="same tick"):
                watch.look(entry, decider)
            return
        watch.look(entry, decider)
    pytest.fail("the scenario has no tick")
