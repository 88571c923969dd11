"""Recovery in kept processes at scale: the plans are those of core/elastic, and what they cost is in the book."""

import msgspec
import pytest

from holdfast.core.elastic.first_plan import first_plan
from holdfast.model.pipeline_routes import PipelineJob
from holdfast.sim.scale import failure_mixes, policy_study, price_sheet
from holdfast.sim.scale.elastic_recovery import ELASTIC, SINGLE, ElasticRecovery, policies_of, situation_of
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.holdfast_policy import NAME, HoldfastPolicy
from holdfast.sim.scale.survivor_recovery import SURVIVORS

SMALL = ScaleSetup(gpus=64 * 8, days=10.0, rate=0.02, seed=3)
SHEET = price_sheet.load_sheet()
MIX = failure_mixes.load_mix("llama3")


def played(name: str, **changes: object) -> HoldfastPolicy:
    world = HoldfastPolicy(msgspec.structs.replace(SMALL, **changes), MIX, SHEET, name)
    world.result = world.play_job()  # type: ignore[attr-defined]
    return world


def ettr(world: HoldfastPolicy) -> float:
    return float(world.result.ettr)  # type: ignore[attr-defined]


def choices(world: HoldfastPolicy) -> dict[str, int]:
    assert isinstance(world.recovery, ElasticRecovery)
    return world.recovery.choices


def test_kept_processes_are_worth_something_and_live_state_more() -> None:
    restarts, survivors, elastic = (played(name) for name in (NAME, SURVIVORS, ELASTIC))
    assert restarts.recovery is None and ettr(restarts) < ettr(survivors) < ettr(elastic)
    assert elastic.state.tally.restored["live_state"] > 5
    assert "live_state" not in survivors.state.tally.restored
    assert elastic.state.tally.incidents == restarts.state.tally.incidents


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_policy_does_what_it_is_called(name: str) -> None:
    world = played(name)
    assert choices(world)[name] > 3
    assert set(choices(world)) <= {name, "retemplate"}, "the latter where nobody is lost"
    assert world.state.book.wall_s == pytest.approx(SMALL.end_at, abs=1.0)


def test_without_standbys_a_job_goes_on_slower_until_a_node_comes() -> None:
    waits, goes_on = played(SURVIVORS, standbys=0), played(ELASTIC, standbys=0)
    slow = [drag for drag in goes_on.state.book.drags if "fewer" in drag.cause]
    assert slow and max(drag.end_at - drag.start_at for drag in slow) > 120
    assert all(0 < drag.part <= 1 for drag in slow)
    assert ettr(goes_on) > ettr(waits)
    assert goes_on.result.lost_by_use.get("wait", 0.0) < waits.result.lost_by_use["wait"]  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_result() -> None:
    one, same = played(ELASTIC), played(ELASTIC)
    assert one.result == same.result and choices(one) == choices(same)  # type: ignore[attr-defined]


def test_ours_as_it_was_is_not_touched() -> None:
    """What restarts all processes neither asks for a plan nor draws another number."""
    setup = ScaleSetup(gpus=9600, days=3.0)
    found, _ = policy_study.play_policy(NAME, setup, failure_mixes.load_mix("byterobust"))
    assert found.policy == NAME and "live_state" not in found.tally.restored


def test_a_situation_is_in_the_numbers_of_those_that_sit() -> None:
    plan = first_plan(PipelineJob(layers=4, microbatches=4, stages=2), 4)
    situation = situation_of(plan, ["a", "b", "c", "d"], ["c", "e", "a", "d"], 5, forked=False)
    assert situation.held == ((0, 1), (), (0, 1), (2, 3)) and situation.lost == ((2, 3),)
    assert situation.earlier is not None
    assert [[segment.worker for segment in route] for route in situation.earlier.routes[1:3]] == [[2, -1], [0, 3]]
    forked = situation_of(plan, ["a", "b", "c", "d"], ["a", "b", "c", "d"], 5, forked=True)
    assert forked.held[0] == () and not forked.lost and forked.earlier is not None
    assert forked.earlier.held[0] == (0, 1)


def test_what_may_be_chosen() -> None:
    assert {"replace", "hybrid", "disk rollback"} < set(policies_of(ELASTIC, lost=True))
    assert next(iter(policies_of("reroute", lost=True))) == "reroute"
    assert next(iter(policies_of("reroute", lost=False))) == "retemplate"
