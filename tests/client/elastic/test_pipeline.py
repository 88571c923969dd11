"""What a pipeline refuses when it is made."""

import functools
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.elastic.rank_traffic import GroupsBrokenError
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from tests.client.one_rank_group import one_rank_group

GOOD: dict[str, Any] = {
    "layers": [functools.partial(nn.Linear, 2, 2)] * 4,
    "optimizer": torch.optim.SGD,
    "loss": nn.functional.mse_loss,
    "microbatches": 4,
}
BAD: dict[str, dict[str, Any]] = {
    "layers must be functions that each make a layer, such as functools.partial(nn.Linear, 8, 8)": {
        "layers": [nn.Linear(2, 2)]
    },
    "semantics must be one of exact, fp_order, batch_changed, not 'near'": {"semantics": "near"},
    'reduction must be "ordered" or "float", not \'fixed\'': {"reduction": "fixed"},
    "store_every needs a path": {"store_every": 3},
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_cannot_be_is_refused_in_a_sentence(sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        holdfast.ElasticPipeline(**GOOD | BAD[sentence])
    assert str(caught.value) == sentence


def test_policies_that_are_not_carried_out_are_refused() -> None:
    with pytest.raises(ValueError, match="just-in-time save"):
        holdfast.ElasticPipeline(**GOOD, policies=["just-in-time save"])


def test_it_needs_a_group() -> None:
    with pytest.raises(RuntimeError) as caught:
        next(holdfast.ElasticPipeline(**GOOD).steps(1))
    wanted = 'an ElasticPipeline needs init_process_group("gloo") or init_process_group("nccl")'
    assert str(caught.value) == wanted


def test_a_rehearsed_step_leaves_nothing() -> None:
    made: list[int] = []

    def make() -> nn.Module:
        made.append(1)
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    pipeline = holdfast.ElasticPipeline(**GOOD | {"layers": [make] * 4})
    with one_rank_group():
        before = torch.get_rng_state()
        pipeline.rehearse(lambda step, m: (torch.ones(3, 2), torch.zeros(3, 2)))
        assert torch.equal(torch.get_rng_state(), before)
        assert len(made) >= 4 and pipeline.layers == {} and pipeline.recoveries == []


def test_gradients_count_only_if_no_abort_had_begun() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if aborts:
            SEAL_FENCE.raise_fence()
        return nn.functional.mse_loss(output, target)

    aborts: list[int] = []
    pipeline = holdfast.ElasticPipeline(**GOOD | {"loss": loss}, snapshot_every=0)
    with one_rank_group(), ExitStack() as after:
        after.callback(SEAL_FENCE.lower)
        for step in pipeline.steps(2):
            aborts += [step] if step == 2 else []
            with nullcontext() if step == 1 else pytest.raises(GroupsBrokenError):
                pipeline.step(lambda step, m: (torch.ones(3, 2), torch.zeros(3, 2)))
            if step == 2:
                break
        report = pipeline._held.make_report(0.0, 0.0)
        assert (report.voted, report.ready, report.layers) == (1, 1, ((0, 1), (1, 1), (2, 1), (3, 1)))
