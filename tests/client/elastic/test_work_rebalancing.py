"""A worker becomes slow and nobody fails: work moves away from it between two steps, and bits stay. Real processes over
gloo, in which one worker really takes ten times as long for each layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.elastic.recovery_settlement import RankReport, SettledStep, describe_situation
from holdfast.client.elastic.work_rebalancing import WorkMove, describe_move, describe_steps_since
from holdfast.model.pipeline_routes import RoutePlan, RouteSegment, Semantics
from tests.client.conftest import ROOT, Zygote

JOB = str(Path(__file__).with_name("rebalancing_job.py"))
EVEN = [8, 8, 8, 8]


def train(warm: Zygote, envs: list[dict[str, str]], slow: str, **asked: Any) -> tuple[list[Any], str]:
    """Train with four workers; return what each says at the end, and what the first one said meanwhile."""
    env = [one | {"WORLD_SIZE": "4", "PYTHONPATH": str(ROOT)} for one in envs[:4]]
    ended = [warm.wait(rank) for rank in warm.forks(env, JOB, slow, json.dumps(asked))]
    assert [one.code for one in ended] == [0] * 4, [one.err[-3000:] for one in ended]
    return [json.loads(one.out) for one in ended], ended[0].err


@pytest.mark.e2e
@pytest.mark.slow
def test_work_moves_away_from_a_worker_that_becomes_slow(
    warm: Zygote, group: Callable[[], list[dict[str, str]]]
) -> None:
    calm, _ = train(warm, group(), slow="none")
    assert all(one[0] == [] for one in calm), "workers that are alike keep their shares"
    told, said = train(warm, group(), slow="3")
    moves, _, losses, digest, recoveries = told[0]
    assert moves, said
    first = moves[0]
    assert first["step"] > 8 and first["shares_before"] == EVEN
    assert sum(first["shares"]) == sum(EVEN), "each microbatch passes each layer"
    assert first["shares"][3] <= EVEN[3] / 2
    assert first["speeds"][:3] == [1, 1, 1] and first["speeds"][3] < 0.6
    assert first["layers"] == 0, "without capacity= nobody gets more layers"
    assert first["expected_step_s"] < first["before_step_s"]
    assert any(0 < move["took_step_s"] < first["before_step_s"] for move in moves), said
    assert recoveries == 0
    lines = said.splitlines()
    told_of = [WorkMove(**move | {"semantics": Semantics(move["semantics"])}) for move in moves]
    assert f"holdfast: pipeline: {describe_steps_since(told_of[0])}" in lines
    assert (losses, digest) == tuple(calm[0][2:4])
    assert all(len(one[0]) == len(moves) and one[0][0]["shares"] == first["shares"] for one in told)
    held = [one[1] for one in told]
    assert sorted({layer for mine in held for layer in mine}) == [0, 1, 2, 3]
    assert max(map(len, held)) == 2


@pytest.mark.e2e
@pytest.mark.slow
def test_nothing_moves_if_the_user_does_not_name_it(warm: Zygote, group: Callable[[], list[dict[str, str]]]) -> None:
    told, _ = train(warm, group(), slow="3", policies=["reroute"])
    assert told[0][0] == []


@pytest.mark.e2e
@pytest.mark.slow
def test_sums_in_another_order_are_refused_where_results_must_be_exact(
    warm: Zygote, group: Callable[[], list[dict[str, str]]]
) -> None:
    told, _ = train(warm, group(), slow="3", reduction="float")
    assert told[0][0] == [], "microbatches on other routes would be summed in other heaps"


def test_after_a_failure_amid_a_move_the_newest_plan_counts() -> None:
    """One worker has come out of the comparison and follows the new plan; another one holds what that gives it."""
    old, new = (
        RoutePlan(
            held=(tuple(range(cut)), tuple(range(cut, 4))),
            routes=((RouteSegment(0, 0, cut), RouteSegment(1, cut, 4)),) * 2,
        )
        for cut in (2, 3)
    )
    reports = [
        RankReport(meeting=1, worker=0, changes=0, plan=old, layers=((0, 5), (1, 5), (2, 5))),
        RankReport(meeting=1, worker=1, changes=1, plan=new, layers=((3, 5),)),
    ]
    found = describe_situation(reports, SettledStep(5, ((0, 1, 2), (3,)), ()))
    assert found.held == ((0, 1, 2), (3,)) and found.shadows == ((), ())
    assert found.earlier is not None and found.earlier.routes == new.routes and found.lost == ()


def test_a_move_is_told_with_what_was_expected_of_it() -> None:
    move = WorkMove(
        step=24,
        layers=2,
        speeds=(1.0, 0.25),
        shares_before=(8, 8),
        shares=(12, 4),
        semantics=Semantics.EXACT,
        expected_s=0.3,
        took_s=0.25,
        phases={},
        before_step_s=0.4,
        expected_step_s=0.2,
        took_step_s=0.21,
    )
    assert describe_move(move) == (
        "work moves after step 24 (slow workers, by speed: 1 (0.25)): 2 layers were sent, and workers make 12/4 "
        "passes of a step instead of 8/8; EXACT; 0.25 s, 0.30 s expected"
    )
    assert describe_steps_since(move) == "a step takes 0.210 s since work has moved, 0.200 s expected, 0.400 s before"
