"""Elastic pipelines whose backward passes are made in two halves: a rank fails, and no bit changes."""

import json
import signal

import pytest

from tests.cli.conftest import Start
from tests.cli.elastic_job import POINTS, STRUCK, TRAIN, losses, recoveries, strike_at, struck, train_alone
from tests.cli.rungs import CALM, said
from tests.cli.test_run_elastic_pipeline import HANGS, SIGNALS, TWO

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Calm = tuple[str, list[float]]  # the digest of its state, and its losses


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """What one process comes to, with whole passes and without failures."""
    folder = tmp_path_factory.mktemp("alone")
    digest = train_alone(folder, HOLDFAST_JOB=json.dumps({"halves": "off"}))
    return digest, [*losses(folder).values()]


# Each pass forward, each input half and each weights half of a layer takes some time without a processor.
SLOW = {
    '        strike("forward")\n': '        strike("forward")\n        time.sleep(0.02)\n',
    '        strike("backward")\n': '        strike("backward")\n        time.sleep(0.02)\n',
    "self.linear(x)": "nn.functional.linear(x, Late.apply(self.linear.weight), self.linear.bias)",
    "class Residual": """class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient

class Residual""",
}


def check_strike(start: Start, calm: Calm, point: str, how: str, **asked: object) -> None:
    words = json.dumps({"halves": "on", **asked})
    strikes = strike_at((1, 1, STRUCK, point, SIGNALS[how]))
    job = start(*TWO, *(CALM if how == "kill" else HANGS), script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=words)
    job.ends(0)
    assert struck(job) == {"1-1": point}
    assert {digest for [digest] in said(job, "digest")} == {calm[0]}
    assert [*losses(job.folder).values()] == calm[1]
    [recovery] = recoveries(job)
    assert recovery["policy"] == asked.get("policies", ["replace"])[0]  # type: ignore[index]
    assert "stay whole" not in job.text()


def test_a_rank_is_killed_between_the_halves_of_its_passes(start: Start, calm: Calm) -> None:
    check_strike(start, calm, "weights", "kill", policies=["reroute"])


@pytest.mark.slow
@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("point", [*POINTS, "weights"])
@pytest.mark.parametrize("policy", ["replace", "reroute", "memory rollback"])
def test_halves_at_every_point(start: Start, calm: Calm, policy: str, point: str, how: str) -> None:
    check_strike(start, calm, point, how, policies=[policy])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_job_takes_halves_by_itself_while_a_rank_does_the_work_of_a_lost_one(
    start: Start, *, recompute: bool
) -> None:
    """Its layers take long enough for that. Whole passes before the failure, and after it those of the peers."""
    slow = TRAIN
    for before, after in SLOW.items():
        assert before in slow
        slow = slow.replace(before, after)
    slow = slow.replace('print("holds"', 'print("halves", pipeline._held.plan.halves, flush=True)\nprint("holds"')
    words = json.dumps({"policies": ["reroute"], "recompute": recompute})
    strikes = strike_at((1, 1, 12, "backward", signal.SIGKILL))
    job = start(*TWO, *CALM, script=slow, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=words, HOLDFAST_STEPS="16")
    job.ends(0)
    assert struck(job) == {"1-1": "backward"}
    assert {tuple(words) for words in said(job, "halves")} == {("True",)}
    assert {digest for [digest] in said(job, "digest")} == {train_alone(job.folder, HOLDFAST_STEPS="16")}
