"""Checkpoints of a pipeline on storage: a folder for each step, with a file for each layer.

A checkpoint is whole once it has the files of all layers. The first worker that holds a layer writes the layer's file;
any set of workers can read the files. Several generations may make the same step, so a folder's name has the step and a
name for the generation. A file ends with its digest.
"""

import contextlib
import os
import re
import shutil
from hashlib import blake2b
from pathlib import Path

import torch

_DIGEST_BYTES = 16
_KEPT = 2  # whole checkpoints
_FOLDER = re.compile(r"step-(\d+)-(\w+)")


class LayerFileError(Exception):
    """Raised if a layer's file is damaged or cannot be read."""


class LayerFiles:
    def __init__(self, path: Path | None, layers: int) -> None:
        self._path, self._layers = path, layers

    @property
    def is_there(self) -> bool:
        """Whether layers can be written."""
        return self._path is not None

    def newest_whole(self) -> int:
        """Return the newest step that has the files of all layers; -1 if there is none."""
        return max((step for step, _, _ in self._list_whole()), default=-1)

    def write(self, layer: int, step: int, line: str, packed: torch.Tensor) -> None:
        assert self._path is not None
        folder = self._path / f"step-{step}-{line}"
        folder.mkdir(parents=True, exist_ok=True)
        content = packed.numpy().data
        new = folder / f".layer-{layer}.{os.getpid()}"
        with new.open("wb") as file:
            file.write(content)
            file.write(blake2b(content, digest_size=_DIGEST_BYTES).digest())
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / f"layer-{layer}")

    def read(self, layer: int, step: int) -> torch.Tensor:
        """Return a layer, packed, from the whole checkpoint of this step. Raise LayerFileError if the file is missing
        or damaged. A damaged checkpoint is first renamed, so that the next start of the job uses an older one."""
        found = [(line, folder) for at, line, folder in self._list_whole() if at == step]
        if not found:
            raise LayerFileError(f"step {step} is not whole in {self._path} any more")
        folder = max(found)[1]
        path = folder / f"layer-{layer}"
        try:
            content = bytearray(path.read_bytes())
        except OSError as e:
            raise LayerFileError(f"{path} cannot be read: {e.strerror}") from None
        body = memoryview(content)[:-_DIGEST_BYTES]
        if blake2b(body, digest_size=_DIGEST_BYTES).digest() != content[-_DIGEST_BYTES:]:
            aside = folder.with_name(f"damaged-{folder.name}")
            with contextlib.suppress(OSError):  # another rank may have done it
                folder.rename(aside)
            raise LayerFileError(f"{path} is damaged; its checkpoint is set aside as {aside.name}")
        return torch.frombuffer(content, dtype=torch.uint8)[:-_DIGEST_BYTES].clone()

    def drop_old(self) -> None:
        """Keep the two newest whole checkpoints; delete the older folders, whole or not."""
        steps = sorted({step for step, _, _ in self._list_whole()})
        if len(steps) <= _KEPT:
            return
        for step, _, folder in self._list_folders():
            if step < steps[-_KEPT]:
                shutil.rmtree(folder, ignore_errors=True)

    def _list_whole(self) -> list[tuple[int, str, Path]]:
        wanted = {f"layer-{layer}" for layer in range(self._layers)}
        return [one for one in self._list_folders() if wanted <= {path.name for path in one[2].iterdir()}]

    def _list_folders(self) -> list[tuple[int, str, Path]]:
        if self._path is None or not self._path.is_dir():
            return []
        found = [(match, path) for path in self._path.iterdir() if (match := _FOLDER.fullmatch(path.name))]
        return [(int(match[1]), match[2], path) for match, path in found]
