"""Maps a checkpoint id to a step and to a checkpoint, in the same way for writer and reader."""

import os
import re

from holdfast.checkpoint import storage_opener
from holdfast.checkpoint.manifest import MANIFEST, METADATA
from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.stored_checkpoints import find_checkpoints

_NAMED = re.compile(r"(?:.*step[-_=]?|\D*)(\d{1,18})", re.ASCII)  # step-10, 10, epoch=1-step=50; not gpt2-v3


def named_step(checkpoint_id: str, url: str) -> int | None:
    """Return the step that an id names under `url`; None if it is `url` itself. Raises StateError for other ids."""
    if same_place(checkpoint_id, url):
        return None
    step = step_under(checkpoint_id, url)
    if step is None and _is_under(checkpoint_id, url):
        raise StateError(f"the checkpoint id {checkpoint_id!r} names no step; end it with a number, as in step-10")
    if step is None:
        raise StateError(f"the checkpoint id {checkpoint_id!r} is outside {url}, where this writer writes")
    return step


def step_under(checkpoint_id: str, url: str) -> int | None:
    """Return the step that an id names, if the id is a name under `url`, else None."""
    found = _NAMED.fullmatch(_split_id(checkpoint_id)[1])
    return int(found[1]) if found and _is_under(checkpoint_id, url) else None


def locate_checkpoint(url: str, checkpoint_id: str = "") -> str:
    """Return the URL of the checkpoint with this id.

    Without an id, return `url` itself if it is a checkpoint, else the URL of the newest good checkpoint in the folder
    `url`. Raises StorageError if no checkpoint has this id, or if it is not known which checkpoints are in doubt.
    """
    if not checkpoint_id or same_place(checkpoint_id, url):
        if storage_opener.open_storage(url).read(MANIFEST):
            return url
        found = find_checkpoints(url)
        if unvouched := [one.why for one in found if one.unvouched]:
            raise StorageError(unvouched[0])
        return next((one.url for one in found if one.ok), url)
    step = step_under(checkpoint_id, url)
    found = tuple(one for one in find_checkpoints(url) if one.step == step) if step is not None else ()
    if good := [one.url for one in found if one.ok]:
        return good[0]
    inside = [f"{url.rstrip('/')}/{checkpoint_id}"] if not _split_id(checkpoint_id)[0] else []
    for place in (*inside, checkpoint_id):
        if any(storage_opener.open_storage(place).file_size(name) for name in (MANIFEST, METADATA)):
            return place
    why = f": {found[0].why}" if found else ""
    raise StorageError(f"there is no checkpoint {checkpoint_id!r} under {url}{why}")


def newest_step(url: str) -> int:
    """Return the newest step of all finished checkpoints; -1 if there is none. Unfinished checkpoints do not count: one
    rank may already be writing the next step, and all ranks must get the same answer."""
    return max((one.step for one in find_checkpoints(url)), default=-1)


def same_place(one: str, other: str) -> bool:
    return _full_path(one) == _full_path(other)


def _is_under(checkpoint_id: str, url: str) -> bool:
    folder = _split_id(checkpoint_id)[0]
    return not folder or same_place(folder, url)


def _split_id(checkpoint_id: str) -> tuple[str, str]:
    folder, slash, name = checkpoint_id.rstrip("/").rpartition("/")
    return folder or slash, name


def _full_path(url: str) -> str:
    path = re.sub("^(file|local)://", "", url)
    return path.rstrip("/") if "://" in path else os.path.realpath(path)
