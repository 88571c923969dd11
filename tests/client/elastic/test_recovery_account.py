"""What is said of a recovery beside what was expected of it, and what the next choice learns from it."""

import pytest

from holdfast.client.elastic.recovery_account import (
    PhaseTimes,
    Recovery,
    StepWatch,
    compare_phases,
    describe_recovery,
    describe_slow,
    describe_steps,
    learn_costs,
)
from holdfast.core.elastic.proposal import Phase, PhaseCosts, Proposal
from holdfast.model.pipeline_routes import RoutePlan, Semantics

DOWN: dict[Phase, float] = {"detect": 0.5, "abort": 0.1, "agree": 0.1, "plan": 0.05, "rebuild": 1.0, "move": 0.4}
TOOK = {"rebuild": 0.6, "agree": 0.2, "plan": 0.01, "move": 0.8, "verify": 0.05}


def proposal(sources: tuple[int, ...] = (), **down: float) -> Proposal:
    return Proposal(
        policy="replace",
        plan=RoutePlan(held=(), routes=(), sources=sources),
        downtime_s={**DOWN, **down},  # type: ignore[dict-item]
        rate_after=1.0,
        semantics=Semantics.EXACT,
        reason="1 standbys take the places of those lost",
    )


def test_phases_have_what_was_expected_beside_what_they_took() -> None:
    found = compare_phases(proposal(), TOOK)
    assert found["rebuild"] == PhaseTimes(1.1, 0.6), "with the abort"
    assert found["move"] == PhaseTimes(0.4, 0.8)
    assert found["verify"] == PhaseTimes(0.0, 0.05), "it was not expected"
    assert "detect" not in found and "abort" not in found


def test_the_next_choice_expects_what_was_seen() -> None:
    before = PhaseCosts(weight=0.5)
    after = learn_costs(before, proposal(), compare_phases(proposal(), TOOK))
    assert after.rebuild_s == pytest.approx((1.0 + 0.5) / 2) and after.regroup_s == pytest.approx((0.5 + 0.5) / 2)
    assert (after.agree_s, after.plan_s) == pytest.approx((0.15, 0.03))
    assert after.transfer_s == pytest.approx((0.1 + 0.2) / 2), "layers took twice as long to move as expected"
    assert (after.memory_s, after.storage_s) == (before.memory_s, before.storage_s)


@pytest.mark.parametrize(("source", "name"), [(-1, "storage_s"), (2, "memory_s")])
def test_a_restore_is_learned_from_where_it_came(source: int, name: str) -> None:
    told = proposal((source, source), restore=2.0, restart=30.0)
    after = learn_costs(PhaseCosts(), told, compare_phases(told, {"restore": 4.0}))
    changed = {one for one in ("storage_s", "memory_s") if getattr(after, one) != getattr(PhaseCosts(), one)}
    assert changed == {name}
    assert after.restart_s < PhaseCosts().restart_s, "nobody started a process"


def test_steps_are_timed_once_they_are_typical() -> None:
    watch = StepWatch()
    assert watch.add_step(1.0) is None, "nothing to watch"
    watch.begin()
    assert [watch.add_step(s) for s in (9.0, 0.2, 0.2, 0.2, 0.3)] == [None] * 5
    assert watch.add_step(0.6) == pytest.approx(0.3)
    assert watch.add_step(0.6) is None
    watch.begin()
    watch.end()
    assert watch.add_step(0.6) is None


def test_what_rank_0_says() -> None:
    recovery = Recovery(
        policy="replace",
        step=4,
        again=0,
        workers=4,
        semantics=Semantics.EXACT,
        reason="1 standbys take the places of those lost",
        expected_s=1.6,
        took_s=2.1,
        phases={"rebuild": PhaseTimes(1.1, 1.5), "move": PhaseTimes(0.5, 0.6)},
        before_step_s=0.31,
        expected_step_s=0.405,
        took_step_s=0.4124,
    )
    assert describe_recovery(recovery) == (
        "replace on 4 workers after step 4: 1 standbys take the places of those lost; no step is made again; EXACT; "
        "2.10 s since a step broke off, 1.60 s expected (rebuild 1.50 for 1.10, move 0.60 for 0.50)"
    )
    assert describe_recovery(recovery._replace(kept=3)) == (
        "replace on 4 workers after step 4: 1 standbys take the places of those lost; no step is made again; of the "
        "next one 3 microbatches are there already; EXACT; 2.10 s since a step broke off, 1.60 s expected (rebuild "
        "1.50 for 1.10, move 0.60 for 0.50)"
    )
    assert describe_recovery(recovery._replace(halves=True)) == (
        "replace on 4 workers after step 4: 1 standbys take the places of those lost; no step is made again; backward "
        "passes are made in halves; EXACT; 2.10 s since a step broke off, 1.60 s expected (rebuild 1.50 for 1.10, "
        "move 0.60 for 0.50)"
    )
    assert describe_steps(recovery) == "a step takes 0.412 s after replace, 0.405 s expected, 0.310 s before"
    assert (
        describe_steps(recovery._replace(expected_step_s=0.0)) == "a step takes 0.412 s after replace, 0.310 s before"
    )
    assert describe_slow((1.0, 0.5, 1.0, 0.333)) == "slow workers, by speed: 1 (0.50), 3 (0.33)"
    assert describe_slow(()) == ""
