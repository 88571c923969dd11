"""The same bits, whoever computes which layers of which microbatches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.conftest import ROOT, Zygote

pytestmark = pytest.mark.e2e
JOB = str(Path(__file__).with_name("placement_job.py"))
Train = Callable[..., list[tuple[list[float], str, list[int]]]]


@pytest.fixture
def train(warm: Zygote, group: Callable[[], list[dict[str, str]]]) -> Train:
    """So many workers train with what a pipeline is asked; by worker, the losses, the digest and its layers."""

    def trained(world: int, *more: str, code: int = 0, **asked: object) -> list[tuple[list[float], str, list[int]]]:
        envs = [env | {"WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT)} for env in group()[:world]]
        ended = [warm.wait(rank) for rank in warm.forks(envs, JOB, json.dumps(asked), *more)]
        assert [one.code for one in ended] == [code] * world, [one.err[-3000:] for one in ended]
        return [tuple(json.loads(one.out)) if not code else ([], one.err, []) for one in ended]

    return trained


def test_placements_change_no_bit(train: Train) -> None:
    [alone] = train(1)
    two = train(2, stages=2, recompute=True, halves="on")
    four = train(4, stages=2)
    assert [layers for _, _, layers in four] == [[0, 1, 2], [3, 4, 5]] * 2
    odd = train(4, stages=3, halves="on")
    assert odd[3][2] == [], "a worker that is left over holds nothing, and takes part"
    assert {(str(losses), digest) for losses, digest, _ in [alone, *two, *four, *odd]} == {(str(alone[0]), alone[1])}


def test_float_sums_are_the_same_on_all_replicas_and_close(train: Train) -> None:
    [alone] = train(1)
    told = train(3, stages=1, reduction="float")
    assert len({(str(losses), digest) for losses, digest, _ in told}) == 1
    assert told[0][1] != alone[1], "the sums have another order"
    assert told[0][0] == pytest.approx(alone[0], abs=1e-5)


def test_a_buffer_that_moves_is_refused(train: Train) -> None:
    [(_, told, _)] = train(1, "moving", code=1)
    assert told.rstrip().endswith(
        "RuntimeError: a layer changed a buffer in its forward pass, which replicas would not do alike"
    )
