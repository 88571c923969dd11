"""What a pipeline refuses when it is made."""

import functools
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.elastic.rank_traffic import GroupsBrokenError
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.core.elastic.plan_choice import POLICIES
from holdfast.core.elastic.rebalanced_plans import REBALANCE
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
    'halves must be "auto", "on" or "off", not True': {"halves": True},
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_cannot_be_is_refused_in_a_sentence(sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        holdfast.ElasticPipeline(**GOOD | BAD[sentence])
    assert str(caught.value) == sentence


def test_only_policies_that_there_are_can_be_named() -> None:
    holdfast.ElasticPipeline(**GOOD, policies=["live migration", "just-in-time save", "rebalance"])
    with pytest.raises((TypeError, ValueError)) as caught:
        holdfast.ElasticPipeline(**GOOD, policies=["hope"])
    named = ", ".join((*POLICIES, REBALANCE))
    assert str(caught.value) == f"'hope' is no policy; these are: {named}"


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


class Counted(nn.Module):
    """A layer that draws, and counts its forward passes."""

    def __init__(self, passes: list[int]) -> None:
        super().__init__()
        self.passes, self.linear, self.dropout = passes, nn.Linear(2, 2), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.append(1)
        found: torch.Tensor = self.dropout(self.linear(x))
        return found


def train_counted(breaks_at: tuple[int, ...], **asked: Any) -> tuple[dict[int, float], str, list[int], int]:
    """Make four steps, whose losses break off at these calls. Return the losses by step, the digest, by recovery the
    number of microbatches that were kept, and the number of forward passes through all layers."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) in breaks_at:
            raise ConnectionError("a rank failed")
        return nn.functional.mse_loss(output, target)

    calls: list[int] = []
    passes: list[int] = []
    losses: dict[int, float] = {}
    layers = [functools.partial(Counted, passes), nn.Identity, functools.partial(Counted, passes)]
    asked = {"snapshot_every": 2, "clip_norm": 0.1} | asked
    pipeline = holdfast.ElasticPipeline(**GOOD | {"layers": layers, "loss": loss}, **asked)

    def make_steps() -> None:
        for step in pipeline.steps(4):
            losses[step] = pipeline.step(lambda step, m: (torch.full((3, 2), step + m / 4), torch.zeros(3, 2)))

    with one_rank_group():
        while max(losses, default=0) < 4:
            with suppress(ConnectionError):
                make_steps()
        return losses, pipeline.digest(), [one.kept for one in pipeline.recoveries], len(passes)


@pytest.mark.parametrize("halves", ["off", "on"])
@pytest.mark.parametrize("recompute", [False, True])
def test_finished_microbatches_of_a_broken_step_are_not_computed_again(*, recompute: bool, halves: str) -> None:
    losses, digest, _, calm = train_counted((), recompute=recompute)
    breaks_at = (7, 9)  # step 2 breaks off in its third microbatch, then in its last
    again = train_counted(breaks_at, recompute=recompute, halves=halves)
    assert again[:3] == (losses, digest, [2, 3])
    assert again[3] - calm == 2 * 2, "each of the two that broke off, through two layers"


def test_sums_in_another_order_keep_no_microbatch() -> None:
    assert train_counted((7,), reduction="float", semantics="fp_order")[2] == [0]


def test_what_was_finished_does_not_count_after_a_rollback() -> None:
    calm = train_counted(())
    again = train_counted((15,), policies=["memory rollback"])  # step 4, after a snapshot of step 2
    assert again[:3] == (*calm[:2], [0])
    assert again[3] - calm[3] == 2 * (4 + 3), "step 3, and what was made of step 4"


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_steps_that_are_made_before_the_vote_have_the_same_bits(clip_norm: float | None) -> None:
    """With clipping some steps are taken back, and some are not."""
    wanted = train_counted((), clip_norm=clip_norm)
    assert train_counted((), clip_norm=clip_norm, early_step=True) == wanted
    assert train_counted((7, 9), clip_norm=clip_norm, early_step=True)[:2] == wanted[:2]
