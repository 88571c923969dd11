"""Lightning's own checkpoints as `ckpt_path` finds them: each is verified before it is loaded, and written so that a
kill leaves no half of one."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

import holdfast
from holdfast.checkpoint.foreign_file_faults import distcp_fault, first_fault
from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.trainer_checkpoints import verify_trainer_checkpoint
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.trainers.newest_trainer_checkpoint import OwnCheckpoint, find_first_whole

_PATTERN = "*.ckpt"
_META = "meta.pt"  # in the folders of strategies that shard the state
_OF_DEEPSPEED = "checkpoint"  # in the folders of its strategy
FilePath = str | os.PathLike[str]


class HoldfastPlugin(TorchCheckpointIO):  # type: ignore[misc]  # of a library that may be missing
    """Verifies a Trainer's checkpoints when they are loaded. If the newest one of a run is not whole, the newest whole
    one is loaded in its place.

    >>> from holdfast.trainers.lightning import HoldfastPlugin
    >>> trainer = Trainer(plugins=[HoldfastPlugin("checkpoints")])  # doctest: +SKIP
    >>> trainer.fit(model, loader, ckpt_path="last")  # doctest: +SKIP
    """

    def __init__(self, folder: FilePath) -> None:
        """`folder` has this run's checkpoints, and no others: they alone may replace one another."""
        super().__init__()
        self._folder = Path(os.path.realpath(folder))

    def is_own(self, path: FilePath) -> bool:
        """Return whether a checkpoint lies in the folder of this run's checkpoints."""
        return self._folder in Path(os.path.realpath(path)).parents

    def save_checkpoint(self, checkpoint: dict[str, Any], path: FilePath, storage_options: Any = None) -> None:
        is_main = threading.current_thread() is threading.main_thread()  # else it is saved beside training
        with holdfast.phase("save") if is_main else nullcontext():
            if _is_local(path) and storage_options is None:
                _write_file(checkpoint, Path(path))
            else:
                super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: FilePath, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load this checkpoint. If it is not whole, and was the newest of this run, load the newest whole one in its
        place; refuse any other that is not whole, since whoever names it wants no other. All ranks must call this."""
        whole = self._find_whole(Path(path)) if _is_local(path) else path
        loaded: dict[str, Any] = super().load_checkpoint(whole, map_location=map_location, weights_only=weights_only)
        return loaded

    def _find_whole(self, asked: Path) -> Path:
        world = RankWorld()
        looks = os.environ.get("LOCAL_RANK", "0") == "0"
        faults = [fault for fault in world.gather_all(find_lightning_fault(asked) if looks else "", str) if fault]
        if not faults:
            return asked
        if not all(world.gather_all(self.is_own(asked) and _is_newest(asked), bool)):
            raise StateError(f"the checkpoint {asked} is refused: {faults[0]}")
        others = [one for one in list_lightning_checkpoints(asked.parent) if one.path != str(asked)]
        found = find_first_whole(lambda: others, find_lightning_fault, left_out={str(asked): faults[0]})
        if found is None:
            raise StateError(f"the checkpoint {asked} is refused: {faults[0]}; no whole one is beside it")
        return Path(found.path)


def list_lightning_checkpoints(folder: Path) -> list[OwnCheckpoint]:
    """Return all of Lightning's checkpoints in a folder, newest first. Their names may be any, so they are ordered by
    the time when they were written, which also is their number here."""
    found = [OwnCheckpoint(changed, str(path)) for path in folder.glob(_PATTERN) if (changed := _changed_at(path))]
    return sorted(found, reverse=True)


def find_lightning_fault(path: Path) -> str:
    """Return what is wrong with a checkpoint, which may be a file or a folder with parts; "" if it is whole."""
    if not path.is_dir():
        return first_fault([path])
    if (path / _OF_DEEPSPEED).is_dir():
        return verify_trainer_checkpoint(str(path / _OF_DEEPSPEED)).fault
    return first_fault([path / _META]) or distcp_fault(path)


def _is_newest(asked: Path) -> bool:
    """Return whether whoever asks for this wants the newest: by its name, or because nothing beside it is newer. One
    that is missing was the newest, if it ever was."""
    if asked.name.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST) or not (changed := _changed_at(asked)):
        return True
    return all(one.step <= changed for one in list_lightning_checkpoints(asked.parent))


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it is gone, or a link to one that is
        return 0


def _is_local(path: FilePath) -> bool:
    return "://" not in os.fspath(path)


def _write_file(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint to its folder's own storage under another name, and give it its name once it is on the disk.
    Lightning writes it to the folder of temporary files, from where it is copied if that is another file system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
