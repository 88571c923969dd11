"""Workers time their layers while they train, and the next plan spares a slow one. Real processes over gloo."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.conftest import ROOT, Zygote

pytestmark = pytest.mark.e2e
JOB = str(Path(__file__).with_name("speeds_job.py"))
Told = tuple[list[int], tuple[float, float, float], dict[str, tuple[float, float]], str]


def train(warm: Zygote, envs: list[dict[str, str]], slow: str) -> tuple[list[Told], str]:
    """Train with four workers; return what each says at the end, and what the first one said meanwhile."""
    env = [one | {"WORLD_SIZE": "4", "PYTHONPATH": str(ROOT)} for one in envs[:4]]
    ended = [warm.wait(rank) for rank in warm.forks(env, JOB, slow)]
    assert [one.code for one in ended] == [0] * 4, [one.err[-3000:] for one in ended]
    return [tuple(json.loads(one.out)) for one in ended], ended[0].err


def test_a_slow_worker_gets_less_to_do(warm: Zygote, group: Callable[[], list[dict[str, str]]]) -> None:
    told, _ = train(warm, group(), slow="3")
    shares, (before_s, expected_s, took_s), phases, digest = told[0]
    assert sum(shares) == 8 * 4, "each microbatch passes each layer"
    assert shares[3] <= shares[1] / 2 and shares[3] < 8
    assert expected_s < before_s and took_s < before_s
    assert expected_s / 3 < took_s < expected_s * 3, "on a machine that may be busy"
    assert {"agree", "plan", "rebuild"} <= phases.keys() and all(took > 0 for _, took in [phases["agree"]])
    calm, _ = train(warm, group(), slow="none")
    assert calm[0][0] == [8] * 4, "workers that are alike keep their shares"
    assert {one[3] for one in told + calm} == {digest}
