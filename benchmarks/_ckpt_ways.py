"""Ways to save a state, ours and others', each in the configuration in which it holds training up least."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from benchmarks._ckpt_state import State

OTHERS = Path(sys.prefix, "peers")  # where `make bench-ckpt` puts other libraries


class Way(NamedTuple):
    """One way: what training waits for, and what goes on behind it and must end before the next is measured."""

    save: Callable[[], object]
    settle: Callable[[], object] = lambda: None


def ours(state: State, folder: Path) -> Way:
    checkpointer, steps = holdfast.Checkpointer(model=state.model, optimizer=state.optimizer), count(1)

    def save() -> None:
        assert checkpointer.save(next(steps)), "a save was skipped"

    return Way(save)


def torch_save(state: State, folder: Path) -> Way:
    path = folder / f"torch-{dist.get_rank()}.pt"
    return Way(lambda: torch.save(state.own(), path), lambda: path.unlink())


def dcp_save(state: State, folder: Path) -> Way:
    path = folder / "dcp"
    return Way(lambda: dcp.save(state.nested(), checkpoint_id=path), lambda: _remove(path))


def dcp_async_thread(state: State, folder: Path) -> Way:
    """The stager keeps its memory, which is what makes it fast; staging in this thread, or it would not be a copy."""
    return _dcp_async(state, folder, AsyncCheckpointerType.THREAD, shared=False)


def dcp_async_process(state: State, folder: Path) -> Way:
    return _dcp_async(state, folder, AsyncCheckpointerType.PROCESS, shared=True)


def _dcp_async(state: State, folder: Path, kind: AsyncCheckpointerType, *, shared: bool) -> Way:
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
    )
    stager, path = DefaultStager(options), folder / "async"
    under_way: list[Any] = []

    def save() -> None:
        under_way.append(
            dcp.async_save(state.nested(), checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager)
        )

    def settle() -> None:
        found = under_way.pop()
        getattr(found, "upload_completion", found).result()
        _remove(path)

    return Way(save, settle)


def torchsnapshot(state: State, folder: Path) -> Way:
    from torchsnapshot import Snapshot, StateDict

    path, under_way = folder / "torchsnapshot", list[Any]()

    def save() -> None:
        under_way.append(Snapshot.async_take(str(path), {f"rank{dist.get_rank()}": StateDict(**state.own())}))

    def settle() -> None:
        under_way.pop().wait()
        _remove(path)

    return Way(save, settle)


def dlrover(state: State, folder: Path) -> Way:
    """Into memory that its agent would hold; nothing is written."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    logging.disable(logging.INFO)
    os.environ["TORCHELASTIC_RUN_ID"] = folder.name  # what it leaves behind is named after this
    shards = {"local_shard_num": dist.get_world_size(), "global_shard_num": dist.get_world_size()}
    checkpointer, steps = DdpCheckpointer(str(folder / "dlrover"), **shards), count(1)
    return Way(lambda: checkpointer.save_checkpoint(next(steps), state.own(), storage_type=StorageType.MEMORY))


def torch_checkpointing(state: State, folder: Path) -> Way:
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # with it, its writes fail on ext4
    manager = CheckpointManager.Config(storage_config=storage).build()
    numbers, under_way = count(1), list[tuple[Path, Any]]()

    def save() -> None:
        path = folder / f"torch_checkpointing-{next(numbers)}"
        under_way.append((path, manager.save(str(path), {"state": state.own()})))
        with manager.lock():  # as before an optimizer's step: until the copy is made
            pass

    def settle() -> None:
        path, write = under_way.pop()
        if write is not None:
            write.result()
        _remove(path)

    return Way(save, settle)


def nvidia_resiliency_ext(state: State, folder: Path) -> Way:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    saver, path = TorchAsyncCheckpoint(), folder / "nvrx.pt"
    return Way(lambda: saver.async_save(state.own(), path), lambda: saver.finalize_async_save(blocking=True))


WAYS: dict[str, Callable[[State, Path], Way]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "dcp.async_save, thread": dcp_async_thread,
    "dcp.async_save, process": dcp_async_process,
    "torchsnapshot": torchsnapshot,
    "dlrover": dlrover,
    "torch_checkpointing": torch_checkpointing,
    "nvidia-resiliency-ext": nvidia_resiliency_ext,
}


def sweep(folder: Path) -> None:
    """Remove what dlrover has left of a measurement in this folder."""
    for left in Path("/dev/shm").glob(f"{folder.name}_*"):
        left.unlink()
    shutil.rmtree(Path("/tmp/ckpt_sock", folder.name), ignore_errors=True)


def others_at_hand() -> None:
    """Other libraries come last on the path: what is installed here stays what it is."""
    sys.path.append(str(OTHERS))


def _remove(path: Path) -> None:
    dist.barrier()
    if not dist.get_rank():
        shutil.rmtree(path)
    dist.barrier()
