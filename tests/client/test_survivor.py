"""The function that survives: without an agent it is called once, and what it cannot outlive is named."""

import gc
import os
import re
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.snapshot.seal_fence import SEAL_FENCE, SealFence
from holdfast.client.survival import survivor, torch_groups
from holdfast.client.survival.survival_refusal import find_fixed_size, find_refusal
from holdfast.client.survival.survivor import Here, _is_broken_group
from holdfast.client.survival.torch_groups import GroupHolders, find_holders
from holdfast.client.training.optimizer_step_count import StepCount
from holdfast.client.training.process_group_replay import GROUP_CALLS, GroupCall, GroupCalls
from holdfast.client.training.progress import RankProgress
from holdfast.wire.progress_environment import PATIENCE, REHEARSAL


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
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1."), True),
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
    assert "Checkpointer" in find_refusal(None, [], [])
    monkeypatch.setattr(RankWorld, "count", 0)
    assert find_refusal(nn.Linear(2, 1), [], []) == ""
    assert find_refusal(None, [], []) == ""
    assert "SyncBatchNorm" in find_refusal(nn.Sequential(nn.SyncBatchNorm(3)), [], [])
    assert " on meta, " in find_refusal(nn.Linear(2, 1, device="meta"), [], [])
    assert find_refusal(None, ["my.Holder"], []).startswith("my.Holder ")


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([((), {}), ((), {"timeout": None})], ""),
        ([(("gloo",), {})], ""),
        ([((), {"rank": 0, "world_size": 2})], "init_process_group was told the rank"),
        ([((), {}), (([0, 1],), {})], "it has process groups of some ranks"),
        ([((), {}), ((), {"ranks": [0]})], "it has process groups of some ranks"),
    ],
)
def test_why_a_script_is_for_one_number_of_ranks(calls: list[tuple[Any, dict[str, Any]]], why: str) -> None:
    made = [GroupCall(len, args, kwargs, None) for args, kwargs in calls]
    found = find_fixed_size(nn.Linear(2, 1), made)
    assert found.startswith(why) and bool(found) is bool(why)


def test_what_must_hold_is_one_of_two() -> None:
    with pytest.raises(ValueError, match='must be "exact" or "fp_order"'):
        survivor.survive(semantics="any")  # type: ignore[arg-type]


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


def test_arguments_of_a_call_that_another_thread_is_in_are_no_holder() -> None:
    group = Group()
    kept = [(group, 1)]  # as those of a call
    thread = threading.Timer(0.05, kept.clear)
    thread.start()
    assert not find_holders([group]).unknown
    thread.join()
    kept.append((group, 1))
    assert find_holders([group]).unknown == ["builtins.tuple"]


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


def test_nothing_is_sealed_once_groups_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SEAL_FENCE.make_pass()
    seen: list[bool] = []
    monkeypatch.setattr(torch_groups, "abort_groups", lambda: seen.append(before.is_valid))
    survivor._break_off()
    SEAL_FENCE.lower()
    assert seen == [False] and not before.is_valid and SEAL_FENCE.make_pass().is_valid


def test_a_gpu_is_not_waited_for_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_groups.await_gpus(None, 60.0) == "", "nothing has used one"
    stands = threading.Event()

    def assert_(device: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert torch_groups.await_gpus(None, 60.0) == ""
    monkeypatch.setattr(torch.cuda, "synchronize", assert_)
    assert torch_groups.await_gpus(None, 60.0) == "its GPU failed: CUDA error: device-side assert triggered"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: stands.wait())
    assert re.search(r"\bGPU .*, 0\.05 s ", torch_groups.await_gpus(None, 0.05))
    stands.set()


class _OnSecondGpu(torch.nn.Module):
    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        played = SimpleNamespace(device=torch.device("cuda", 1))
        yield cast(torch.nn.Parameter, played)


def test_the_gpu_that_is_waited_for_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script need not say `set_device`: the current one is then the first, whichever has the model."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    torch_groups.await_gpus(_OnSecondGpu(), 60.0)
    assert waited == [1]


def test_a_fence_amid_the_making_of_a_source_finds_none_that_is_not_whole() -> None:
    seen: list[object] = []

    class Source:
        def void_seals(self) -> None:
            seen.append(self)

    fence = SealFence()
    early, source = fence.make_pass(), Source()
    fence.raise_fence()
    assert not early.is_valid and not seen
    fence.add_source(source)
    fence.raise_fence()
    assert seen == [source]


class Script:
    """A script that names what marks its function, as `holdfast.survive`, after it has made its groups."""

    survive = staticmethod(lambda function: function)

    def run(self, calls: GroupCalls) -> None:
        self.set_up(calls)
        self.survive(len)

    def set_up(self, calls: GroupCalls) -> None:
        calls.init_group(lambda *args: None, (), {})


@pytest.mark.parametrize(("patience", "lenient"), [("5.0", True), ("0", False)])
def test_torch_lets_ranks_live_whose_script_survives(
    monkeypatch: pytest.MonkeyPatch, patience: str, lenient: bool
) -> None:
    names = ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT")
    for name in (*names, "WAIT_TIMEOUT_DUMP_MILSEC"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "1")
    monkeypatch.setenv(PATIENCE, patience)
    calls = GroupCalls()
    Script().set_up(calls)
    assert not calls.lenient and os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1", "as torch would have it"
    Script().run(calls)
    told = {os.environ[f"TORCH_NCCL_{name}"] for name in (*names, "WAIT_TIMEOUT_DUMP_MILSEC")}
    assert (told, calls.lenient) == ({"0" if lenient else "1"}, lenient)


class Leaving:
    """Stands for a Survivor whose groups were made again meanwhile."""

    def __init__(self, *args: object) -> None:
        self.group = weakref.ref(GROUP_CALLS.made[0].group)

    def run(self, function: object, slot: object) -> bool:
        GROUP_CALLS.made.clear()
        gc.collect()
        return self.group() is None

    def hang_up(self) -> None: ...

    def retire(self) -> None: ...


def test_groups_that_were_left_end_while_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GROUP_CALLS, "made", [GroupCall(len, (), {}, Owner(None))])
    monkeypatch.setattr(survivor, "Survivor", Leaving)
    monkeypatch.setattr(survivor, "find_refusal", lambda *args: "")
    monkeypatch.setattr("holdfast.client.survival.survivor.progress.find_slot", object)
    monkeypatch.setenv(PATIENCE, "5.0")
    assert survivor.run_surviving(survivor.Script(None, []), lambda here: False), (
        "torch's threads of a group live as long as it does"
    )


def test_groups_over_nccl_must_be_lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankWorld, "count", 0)
    backends = {1: "cpu:gloo,cuda:nccl", 2: "cuda:nccl", 3: "cpu:mpi"}
    monkeypatch.setattr(torch.distributed, "get_backend_config", backends.__getitem__)
    for lenient in (True, False):
        monkeypatch.setattr(GROUP_CALLS, "lenient", lenient)
        refused = [find_refusal(None, [], [group]) for group in (1, 2)]
        assert [bool(why) for why in refused] == [not lenient] * 2
        assert all("init_process_group" in why for why in refused if why)
        assert " of mpi " in find_refusal(None, [], [3])
