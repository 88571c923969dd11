"""Elastic pipelines whose ranks make steps before the vote: a rank fails, and whoever was ahead takes its step back."""

import json

import pytest

from tests.cli.conftest import Start
from tests.cli.elastic_job import POINTS, STRUCK, TRAIN, losses, recoveries, strike_at, struck, train_alone
from tests.cli.rungs import CALM, said
from tests.cli.test_run_elastic_pipeline import HANGS, SIGNALS, TWO

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Calm = tuple[str, list[float]]  # the digest of its state, and its losses


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """What one process comes to that waits for each vote, without failures. No gradient is scaled."""
    folder = tmp_path_factory.mktemp("alone")
    digest = train_alone(folder, HOLDFAST_JOB=json.dumps({"clip_norm": None}))
    return digest, [*losses(folder).values()]


def check_strike(start: Start, calm: Calm, point: str, how: str, **asked: object) -> None:
    words = json.dumps({"early_step": True, "clip_norm": None, **asked})
    strikes = strike_at((1, 1, STRUCK, point, SIGNALS[how]))
    job = start(*TWO, *(CALM if how == "kill" else HANGS), script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=words)
    job.ends(0)
    assert struck(job) == {"1-1": point}
    assert {digest for [digest] in said(job, "digest")} == {calm[0]}
    assert [*losses(job.folder).values()] == calm[1]
    [recovery] = recoveries(job)
    committed = STRUCK if point in ("apply", "keep") else STRUCK - 1
    assert recovery["step"] == (3 if "rollback" in recovery["policy"] else committed)
    taken = f"takes back step {STRUCK}, made ahead of the vote" in job.text()
    if point in ("early", "vote"):
        assert taken, "the others were ahead"
    elif point in ("forward", "backward", "weights", "sums"):
        assert not taken or point == "sums", "the other stage may come through its sums alone"


def test_a_rank_is_killed_before_the_vote_on_a_step_that_all_have_made(start: Start, calm: Calm) -> None:
    check_strike(start, calm, "vote", "kill", policies=["replace"])


@pytest.mark.slow
@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("point", [*POINTS, "early"])
@pytest.mark.parametrize("policy", ["replace", "reroute", "memory rollback"])
def test_early_steps_at_every_point(start: Start, calm: Calm, policy: str, point: str, how: str) -> None:
    check_strike(start, calm, point, how, policies=[policy])


@pytest.mark.slow
@pytest.mark.parametrize("point", [*POINTS, "early", "weights"])
def test_early_steps_with_passes_in_halves(start: Start, calm: Calm, point: str) -> None:
    check_strike(start, calm, point, "kill", policies=["reroute"], halves="on")
