"""Elastic pipelines: of a step that breaks off, what the others have finished is not computed again."""

import json
import signal

import pytest

from tests.cli.conftest import Start
from tests.cli.elastic_job import STRUCK, TRAIN, losses, recoveries, strike_at, struck
from tests.cli.rungs import CALM, said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
TWO = ("--nnodes", "2", "--nproc-per-node", "2")

# The others have the time to come as far as they can. What each computes of the struck step is counted.
COUNTED = (
    TRAIN.replace(
        "            os.kill(os.getpid(), number)",
        "            time.sleep(2)\n            os.kill(os.getpid(), number)",
    )
    .replace('strike("forward")\n', 'strike("forward")\n        passes.append(now["step"])\n')
    .replace("class Residual", "passes = []\n\nclass Residual")
    .replace("again=r.again,", "again=r.again, kept=r.kept,")
    .replace('print("holds"', f'print("passes", now["rank"], passes.count({STRUCK}), flush=True)\nprint("holds"')
)


Calm = tuple[list[str], dict[int, float]]  # the digest of its state, and its losses


@pytest.fixture(scope="module")
def calm(start_shared: Start) -> Calm:
    job = start_shared(*TWO, *CALM, script=TRAIN, name="calm")
    job.ends(0)
    return said(job, "digest")[0], losses(job.folder)


@pytest.mark.parametrize(
    ("point", "asked", "kept"),
    [
        ("sums", ("ordered", "replace"), 3),
        pytest.param("vote", ("ordered", "reroute"), 3, marks=pytest.mark.slow),
        pytest.param("sums", ("ordered", "memory rollback"), 0, marks=pytest.mark.slow),
        pytest.param("sums", ("float", "replace"), 0, marks=pytest.mark.slow),
    ],
)
def test_the_other_pipelines_microbatches_are_kept(
    start: Start, calm: Calm, point: str, asked: tuple[str, str], kept: int
) -> None:
    reduction, policy = asked
    words = json.dumps({"policies": [policy], "reduction": reduction})
    strikes = strike_at((1, 1, STRUCK, point, signal.SIGKILL))
    job = start(*TWO, *CALM, script=COUNTED, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=words)
    job.ends(0)
    assert struck(job) == {"1-1": point}
    if reduction == "ordered":
        assert (said(job, "digest")[0], losses(job.folder)) == calm
    [recovery] = recoveries(job)
    assert (recovery["policy"], recovery["kept"]) == (policy, kept)
    if policy == "replace":
        made = {int(rank): int(count) for rank, count in said(job, "passes")}
        pipeline = 3 * 3  # microbatches of one pipeline, through three layers
        again = 0 if kept else pipeline
        assert made == {0: 2 * pipeline, 1: pipeline, 2: pipeline + again, 3: pipeline + again}
