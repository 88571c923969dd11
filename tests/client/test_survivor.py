"""The function that survives: without an agent it is called once, and what it cannot outlive is named."""

import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.survival.survival_refusal import find_refusal
from holdfast.client.survival.survivor import Here, _is_broken_group
from holdfast.client.survival.torch_groups import GroupHolders
from holdfast.client.training.optimizer_step_count import StepCount
from holdfast.client.training.progress import RankProgress
from holdfast.wire.progress_environment import REHEARSAL


def test_without_an_agent_it_is_called_once() -> None:
    places = []

    @holdfast.survive(model=nn.Linear(2, 1))
    def train(here: Here) -> str:
        places.append((here.rank, here.world, here.generation))
        return "done"

    assert train() == "done" and places == [(0, 1, 0)]


@pytest.mark.parametrize(
    ("failure", "broken"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (torch.distributed.DistNetworkError("recvValue failed"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of the script's own
    ],
)
def test_what_broken_groups_raise(failure: Exception, broken: bool) -> None:
    assert _is_broken_group(failure) is broken
    wrapped = ValueError("the trainer failed")
    wrapped.__cause__ = failure
    assert _is_broken_group(wrapped) is broken


def test_what_cannot_be_bound_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankWorld, "count", 1)
    assert "make it inside" in find_refusal(None, [], [])
    monkeypatch.setattr(RankWorld, "count", 0)
    assert find_refusal(nn.Linear(2, 1), [], []) == ""
    assert find_refusal(None, [], []) == ""
    assert "SyncBatchNorm" in find_refusal(nn.Sequential(nn.SyncBatchNorm(3)), [], [])
    assert "not on the CPU" in find_refusal(nn.Linear(2, 1, device="meta"), [], [])
    assert "my.Holder holds a process group" in find_refusal(None, ["my.Holder"], [])


class Group:
    """Stands for a process group, or for what holds one."""

    __slots__ = ("group",)
    group: object


class Owner:
    def __init__(self, group: object) -> None:
        self.group = group


def test_groups_are_replaced_wherever_they_are_held() -> None:
    old, new = Group(), Group()
    listed, named, owner = [1, old], {"a": old}, Owner(old)
    enclosed = old
    places, between = GroupHolders([old]), Group()
    places.replace_groups({old: between})
    places.replace_groups({between: new})  # each time that a rank survives
    assert (listed[1], named["a"], owner.group) == (new, new, new)
    assert (lambda: enclosed)() is new and not places.unknown


def test_a_holder_of_another_kind_is_named() -> None:
    group, holder = Group(), Group()
    holder.group = group
    assert GroupHolders([group]).unknown == [f"{__name__}.Group"]


def test_a_rank_whose_groups_are_fake_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL, "1")
    with pytest.raises(RuntimeError, match="steps outside"):
        StepCount(RankProgress()).on_optimizer_step(torch.optim.SGD([torch.zeros(1)]), (), {})


def test_steps_are_counted_anew_in_another_generation() -> None:
    told: list[int] = []

    class Told(RankProgress):
        def count_steps(self, steps: int) -> None:
            told.append(steps)

    progress = Told()
    counts, optimizer = StepCount(progress), torch.optim.SGD([torch.zeros(1)])
    for life in (0, 0, 1, 1):
        progress.life = life
        counts.on_optimizer_step(optimizer, (), {})
    assert told == [1, 2, 1, 2]
