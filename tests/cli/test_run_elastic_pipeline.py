"""Elastic pipelines: a rank fails at a point of a step, and the others go on with the state in their processes."""

import signal

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.elastic_job import STRUCK, TRAIN, losses, strike_at, struck
from tests.cli.rungs import CALM, said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
slow = pytest.mark.slow

TWO = ("--nnodes", "2", "--nproc-per-node", "2")


def digests(job: Job) -> set[str]:
    return {words[0] for words in said(job, "digest")}


@pytest.fixture(scope="module")
def calm(start_shared: Start) -> tuple[set[str], dict[int, float]]:
    job = start_shared(*TWO, *CALM, script=TRAIN, name="calm")
    job.ends(0)
    return digests(job), losses(job.folder)


def test_a_killed_rank_is_replaced(start: Start, calm: tuple[set[str], dict[int, float]]) -> None:
    strikes = strike_at((2, 1, STRUCK, "backward", signal.SIGKILL))
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strikes)
    job.ends(0)
    assert struck(job) == {"2-1": "backward"}
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    assert (digests(job), losses(job.folder)) == calm
    job.check_replay()
