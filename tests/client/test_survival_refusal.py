"""Communication that would go on with groups that are gone: it is refused by name, before the function begins."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._symmetric_memory import get_symm_mem_workspace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.survival import torch_groups
from holdfast.client.survival.survival_refusal import find_refusal
from tests.client.one_rank_group import one_rank_group

PACKAGE = Path(torch_groups.__file__).parent
SYMMETRIC = sys.modules[get_symm_mem_workspace.__module__]


@pytest.fixture(autouse=True)
def _no_checkpointer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankWorld, "count", 0)  # other tests of this process have made some


def make_fsdp() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    inner: Any = model[1]
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(inner, FSDPModule)
    return inner


class OwnGather:
    """Stands for a user's way to gather."""


def own_gather(inner: Any) -> None:
    inner.set_custom_all_gather(OwnGather())


def hook(inner: Any) -> None:
    inner.set_all_reduce_hook(lambda sums: None)


def symmetric(inner: Any) -> None:
    """As `set_symm_mem_for_comm` does, which takes NCCL."""
    kind = _fsdp_collectives.SymmMemAllGather
    inner._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm = kind.__new__(kind)


def second_of_two(inner: Any) -> None:
    """As with parameters on different meshes."""
    groups = inner._get_fsdp_state()._fsdp_param_groups
    groups.append(type("Group", (), {"_all_gather_comm": OwnGather()})())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (own_gather, "its FSDP communicates by a way of its own"),
        (hook, "its FSDP communicates by a hook of its own"),
        (symmetric, "its FSDP communicates by symmetric memory"),
        (second_of_two, "its FSDP communicates by a way of its own"),
    ],
)
def test_what_fsdp_communicates_by_is_named(change: Callable[[Any], None], why: str) -> None:
    with one_rank_group():
        inner = make_fsdp()
        assert find_refusal(inner, [], []) == ""
        change(inner)
        assert find_refusal(inner, [], []) == why


@pytest.mark.parametrize("built_in", [True, False])
def test_a_hook_of_ddp_is_named(*, built_in: bool) -> None:
    with one_rank_group():
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        assert find_refusal(ddp, [], []) == ""
        if built_in:
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        assert find_refusal(ddp, [], []) == "its DistributedDataParallel has a communication hook"


def test_symmetric_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_refusal(nn.Linear(2, 2), [], []) == ""
    monkeypatch.setitem(SYMMETRIC._group_name_to_workspace_tensor, "0", torch.zeros(1))
    why = "it uses symmetric memory, which belongs to its process groups"
    assert find_refusal(nn.Linear(2, 2), [], []) == why
    assert find_refusal(None, [], []) == why


# What one module of ours uses of torch without a promise. A torch that has lost one of these cannot be survived with.
PRIVATE: dict[object, tuple[str, ...]] = {
    c10d: ("_world", "_abort_process_group", "ProcessGroupGloo"),
    c10d._world: ("pg_map",),
    dist.ProcessGroup: ("_get_backend",),
    dist.Reducer: ("_remove_autograd_hooks",),
    dist.Logger: ("_get_ddp_logging_data",),
    DistributedDataParallel: (
        "_build_params_for_reducer",
        "_build_debug_param_to_name_mapping",
        "_ddp_init_helper",
    ),
    FSDPModule: ("_get_fsdp_state",),
}
_SET_BY_INSTANCES = {"_has_rebuilt_buckets", "_is_root", "_fsdp_param_group"}  # the tests above have them
_OF_SOME_VERSIONS = {"_reset_iter_state"}  # FSDP2 is refused without


def test_private_names_of_torch_are_used_in_one_module_and_are_there() -> None:
    used = {path.name: _private_names(path) for path in PACKAGE.glob("*.py")}
    assert {name for name, found in used.items() if found} == {"torch_groups.py"}
    known = {name for names in PRIVATE.values() for name in names if name.startswith("_")}
    assert used["torch_groups.py"] == known | _SET_BY_INSTANCES | _OF_SOME_VERSIONS
    lost = [name for owner, names in PRIVATE.items() for name in names if not hasattr(owner, name)]
    assert not lost, f"torch {torch.__version__} has no {', '.join(lost)}"


def _private_names(path: Path) -> set[str]:
    """The attributes with a leading underscore that are taken of what is not our own."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls", "os", "ctypes"):
                found.add(node.attr)
    return found
