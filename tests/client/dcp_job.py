"""One rank that saves and loads by torch.distributed.checkpoint; as a script: what to do, where, by whose means."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.checkpoint.dcp import Reader, Writer
from holdfast.checkpoint.state_image import StateError

State = dict[str, Any]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def sharded(seed: int) -> State:
    """Sharded by rows and by columns, replicated, empty, nested, and plain values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    state: State = {"seed": seed, "deep": {"list": [{"k": seed / 3}], "empty": torch.zeros(0, 3)}}
    for dtype in DTYPES:
        whole = torch.randint(0, 100, (10, 6)).to(dtype)
        name = str(dtype).removeprefix("torch.")
        state[name] = {"whole": whole, "rows": distribute_tensor(whole, mesh, [Shard(0)])}
        state[name]["columns"] = distribute_tensor(whole, mesh, [Shard(1)])
    return state


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    found = {k: v for name, inner in pairs for k, v in leaves(inner, f"{path}.{name}").items()}
    return found if isinstance(state, dict | list) else {path: state}


def check(found: State, wanted: State) -> None:
    mine, theirs = leaves(found), leaves(wanted)
    assert mine.keys() == theirs.keys()
    for name, thing in mine.items():
        local = [one.to_local() if isinstance(one, DTensor) else one for one in (thing, theirs[name])]
        same = torch.equal(*local) if isinstance(thing, torch.Tensor) else local[0] == local[1]
        assert same, (name, *local)


def small(number: int) -> State:
    return {"x": torch.full((3,), number), "n": number, f"rank{dist.get_rank()}": torch.full((2,), number)}


def loaded(path: Path, **where: Any) -> int:
    """What was saved last by all that save, this rank's own included."""
    state = small(-1)
    dcp.load(state, storage_reader=Reader(path), **where)
    check(state, small(state["n"]))
    return int(state["n"])


def failures(act: Callable[[], object]) -> list[BaseException]:
    """What went wrong on any rank; torch gathers it."""
    try:
        act()
    except CheckpointException as e:
        return [one for one, _ in e.failures.values()]
    except Exception as e:
        return [e]
    return []


def save(path: Path, how: str) -> None:
    kind, _, planner = how.partition(",")
    writer = Writer(path) if kind == "ours" else FileSystemWriter(path)
    planners = {"lowest": DefaultSavePlanner(dedup_save_to_lowest_rank=True)}
    more: dict[str, Any] = {"storage_writer": writer, "planner": planners.get(planner)}
    if planner in ("thread", "process"):
        kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
        saved: Any = dcp.async_save(sharded(3), async_checkpointer_type=kinds[planner], **more)
        saved.result()
    else:
        dcp.save(sharded(3), **more)


def load(path: Path, how: str) -> None:
    state = sharded(4)
    if how == "torch":
        path = next(path.glob("step-*"), path)
    dcp.load(state, storage_reader=Reader(path) if how == "ours" else FileSystemReader(path))
    check(state, sharded(3))


def caching(path: Path, _: str) -> None:
    """Saves whose plans are kept, by two writers; then the plan of one rank changes."""
    writers = [Writer(path), Writer(path)]
    for number in range(4):
        dcp.save(
            small(number), storage_writer=writers[number // 2], planner=DefaultSavePlanner(enable_plan_caching=True)
        )
        assert loaded(path) == number
    mine = {"more": torch.ones(2)} if dist.get_rank() == 1 else {}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(small(4) | mine, storage_writer=Writer(path), planner=planner)
    assert loaded(path) == 4


def silent(path: Path, _: str) -> None:
    [refused] = failures(lambda: dcp.save(small(1), storage_writer=Writer(path), use_collectives=False))
    assert isinstance(refused, StateError) and "use_collectives=False" in str(refused), refused
    assert not path.exists()
    dist.barrier()  # all have looked
    # Torch describes what each rank wrote apart.
    dcp.save(small(2), storage_writer=FileSystemWriter(path), use_collectives=False)
    assert loaded(path) == 2


def some(path: Path, _: str) -> None:
    """Two of three ranks save together, and then each of them alone."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    for number in (1, 2):
        dcp.save(small(number), storage_writer=Writer(path / "both"), process_group=group)
        assert loaded(path / "both", process_group=group) == number
    own = path / str(rank)
    dcp.save(small(5), storage_writer=Writer(own), no_dist=True)
    assert loaded(own, no_dist=True) == 5
    assert loaded(path / "both", no_dist=True) == 2, "by one rank alone"


def rivals(path: Path, _: str) -> None:
    """Groups and single ranks of one job save the same step at one path: the first one's stays."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank < 2:
        dcp.save(small(1), checkpoint_id="step-1", storage_writer=Writer(path), process_group=first)
    dist.barrier()

    def save_again(**way: Any) -> None:
        dcp.save(small(2), checkpoint_id="step-1", storage_writer=Writer(path), **way)

    found = [failures(lambda: save_again(process_group=second))] if rank else []
    found.append(failures(lambda: save_again(no_dist=True)))
    for errors in found:
        assert errors and all(isinstance(e, StateError) and f" step 1 in {path}: " in str(e) for e in errors), errors
    dist.barrier()
    assert [one.name for one in path.glob("*step-*")] == ["step-00000001"]
    if rank < 2:
        assert loaded(path, process_group=first) == 1


class Failing(DefaultSavePlanner):
    def set_up_planner(self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        if dist.get_rank() == 1:
            raise ValueError(1)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def failed(path: Path, _: str) -> None:
    writer = Writer(path)
    [error] = failures(lambda: dcp.save(small(1), storage_writer=writer, planner=Failing()))
    assert (type(error), error.args) == (ValueError, (1,))
    for number in (2, 3):
        dcp.save(small(number), storage_writer=writer)
        assert loaded(path) == number


def main(what: str, path: str, how: str = "") -> None:
    dist.init_process_group("gloo")
    acts = (save, load, caching, silent, some, rivals, failed)
    next(act for act in acts if act.__name__ == what)(Path(path), how)
    dist.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    for child in multiprocessing.active_children():  # torch's process that saves; nothing else would end it
        child.terminate()
        child.join()
    os._exit(0)
