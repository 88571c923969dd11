"""Looks at the state that a Checkpointer will restore, before there is a model to restore it into."""

import os
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.checkpoint import checkpoint_reader, dcp
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import EXTRA
from holdfast.checkpoint.keeper_client import KeeperClient, current_generation
from holdfast.checkpoint.snapshot_metadata_record import ImageMetadata, find_metadata, unpack_metadata
from holdfast.checkpoint.state_image import bytes_of, decode_value
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.stored_checkpoints import apply_doubts, find_checkpoints
from holdfast.client.checkpointing.checkpointer_args import storage_of
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.wire.rank_keeper_messages import StateGrant, StateRequest

_NO_STATE = StateGrant(source="none")


class PeekedState(NamedTuple):
    """The state that `Checkpointer.restore` will find. With `is_chosen`, the keeper allows no other state."""

    step: int = 0
    extra: dict[str, Any] = {}
    is_chosen: bool = False  # by the keeper: no other state will do


def peek_state(path: str | os.PathLike[str] | None) -> PeekedState:
    """Return what a Checkpointer with this `path` will restore; its step is 0 if there is nothing. A collective."""
    world, link = RankWorld(), KeeperClient.for_this_rank()
    asked = StateRequest(rank=world.rank, generation=current_generation())
    grant = link.request_state(asked) if link else _NO_STATE
    if grant.arena:
        return _tell_extras(find_metadata(Arena.open(grant.arena).slot_image(grant.slot)), is_chosen=True)
    storage = storage_of(path, None, 0, None)
    url = grant.url or world.broadcast_first(
        _newest_whole(storage.url, grant) if storage and not world.rank else "", str
    )
    if not url:
        return PeekedState()
    rows = _read_rows(url)
    if not rows:
        return PeekedState()
    return _tell_extras(rows[world.rank if len(rows) == world.size else 0], is_chosen=bool(grant.url))


def _newest_whole(base: str, grant: StateGrant) -> str:
    """Return the URL of the newest checkpoint that passes the verification of a restore; "" if none does."""
    for one in apply_doubts(find_checkpoints(base), grant.run, grant.doubts):
        try:
            if one.ok and not checkpoint_reader.verify_checkpoint(one.url):
                return one.url
        except StorageError:
            continue
    return ""


def _read_rows(url: str) -> list[ImageMetadata]:
    """Return the extra state of all ranks in a checkpoint."""
    metadata = dcp.decode_metadata(checkpoint_reader.read_metadata(url))
    extra = metadata.state_dict_metadata.get(EXTRA)
    if not isinstance(extra, TensorStorageMetadata):
        return []
    rows = torch.zeros(extra.size, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        torch_dcp.load({EXTRA: rows}, storage_reader=dcp.Reader(url), planner=dcp.Planner(), no_dist=True)
    return [unpack_metadata(bytes_of(row)) for row in rows]


def _tell_extras(told: ImageMetadata, *, is_chosen: bool) -> PeekedState:
    extra = decode_value(told.extra) if told.extra else {}
    return PeekedState(told.step, extra if isinstance(extra, dict) else {}, is_chosen)
