"""A storage writer for `dcp.save`: writes to the node's memory if there is an agent, else directly to storage."""

import dataclasses
import mmap
import os
import pickle  # noqa: TID251 what we write torch reads so
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import torch
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.distributed_c10d import _get_default_store
from torch.futures import Future

from holdfast.checkpoint import checkpoint_publication
from holdfast.checkpoint.arena import DUE, Arena, SnapshotSlot
from holdfast.checkpoint.dcp.checkpoint_ids import named_step, newest_step
from holdfast.checkpoint.dcp.plan_layout import (
    Things,
    arrange_plan,
    check_items,
    is_quantized,
    pack_layout,
    pad_value,
    rank_and_world,
    resolve_items,
    value_index,
)
from holdfast.checkpoint.dcp.reader import completed_future
from holdfast.checkpoint.dcp.torch_metadata import index_of
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.checkpoint.image_record_locations import file_of
from holdfast.checkpoint.keeper_client import KeeperClient, current_generation, make_want
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.memory_copy import MemoryCopier
from holdfast.checkpoint.retention import retain_checkpoints
from holdfast.checkpoint.state_image import StateError, StateImage, local_tensor
from holdfast.checkpoint.storage_owner import take_ownership
from holdfast.checkpoint.stored_checkpoints import find_checkpoints
from holdfast.wire import rank_keeper_messages
from holdfast.wire.rank_keeper_messages import CheckpointPolicy, StateRequest
from holdfast.wire.replay_environment import redirect_path

_STEP_FILES = 16  # of metadata that the keeper has at most
_PARTS_S = 600.0  # storage has as long to show what other ranks have written


class SaveCall(msgspec.Struct):
    """The coordinator's note to a rank about one save, sent with its plan. `taken`: the rank has read it."""

    step: int
    world: int
    coordinator: int  # among all ranks of the job
    taken: bool = False


class Writer(StorageWriter):
    """Writes for `dcp.save(state, checkpoint_id="step-10", storage_writer=writer)`; each rank uses one for all saves.

    The step is the number at the end of the id. Without an id, it is the newest step plus one. If there is an agent and
    all ranks of the job save, the whole state is copied into the node's memory, and the keeper writes it to storage.
    Otherwise this rank's part is written to `url` before save returns. With `overwrite=False`, save refuses a step that
    exists. Save always refuses a step that another writer of the same launch has saved.

    >>> import torch.distributed.checkpoint as dcp
    >>> from holdfast.checkpoint.dcp import Writer
    >>> state = {"weight": torch.ones(2)}
    >>> saved = dcp.save(state, checkpoint_id="step-10", storage_writer=Writer("written"), no_dist=True)
    """

    _reached: ClassVar[dict[str, int]] = {}  # the last step of this process, by url: memory may be ahead of storage
    _finished: ClassVar[dict[str, tuple[int, str]]] = {}  # by url: the last whole one, and the writer that saved it

    def __init__(self, url: "str | os.PathLike[str]", *, keep: int = 3, slots: int = 3, overwrite: bool = True) -> None:
        self._given = os.fspath(url)
        self._storage = CheckpointPolicy(url=redirect_path(self._given), keep=keep)  # a replay never publishes
        self._slots = slots
        self._overwrite = overwrite
        self._named: int | None = None  # by the id of the next save
        self._last: int | None = None
        self._run = secrets.token_hex(8)  # of this writer, among those of its process and where its rank saves alone
        self._layout: ImageLayout | None = None
        self._image: StateImage | None = None  # without an agent
        self._arena: Arena | None = None
        self._slot: SnapshotSlot | None = None  # that the coordinator seals when the metadata is there
        self._metadata_name = self._roomy = ""  # of the keeper's file for this layout; of the one that it has
        self._step_files: list[str] = []  # that it was given for single steps

    @property
    def checkpoint_id(self) -> str:
        return self._storage.url

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        self._named = named_step(os.fspath(checkpoint_id), self._given) if checkpoint_id else None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        rank, world = rank_and_world()
        if world > 1 and not kwargs.get("use_collectives", True):
            raise StateError("use_collectives=False is not supported: ranks must agree to make one checkpoint")
        self._is_coordinator = is_coordinator
        self._asked, self._named = self._named, None  # an id is for one save, though that may fail
        self._rank: int = kwargs.get("rank", rank)  # of those that save, whoever they are in the job
        self._call = SaveCall(step=-1, world=world, coordinator=0, taken=True)
        self._slot = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        check_items(plan.items)
        self._local = plan if plan.usable else None  # before what others write is taken out: a snapshot is whole
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        step = self._next()
        self._call = SaveCall(step=step, world=len(plans), coordinator=rank_and_world()[0], taken=True)
        self._spare_others_step()
        told = msgspec.structs.replace(self._call, taken=False)
        return [dataclasses.replace(plan, storage_data=msgspec.structs.replace(told)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        call = self._heard(plan.storage_data)
        self._last = call.step
        self._reached[self._storage.url] = call.step
        link = self._keeper
        items, things = resolve_items(plan.items if link is None else self._whole(planner), planner)
        owned = {value_index(item) for item in plan.items}
        layout = self._layout = arrange_plan(items, things, owned, self._layout, (self._rank, call.world))
        self._fill(self._begun(layout, link), things)
        if link:
            if self._slot and not self._is_coordinator:
                self._slot.seal()
        else:
            assert self._image
            share = [self._image.memory[part.start : part.end] for part in layout.owned_ranges()]
            checkpoint_publication.write_part(self._folder, layout.rank, share)
        return completed_future(self._results(layout, things))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [one for some in results for one in some]
        metadata.storage_data = {one.index: one.storage_data for one in written if one.index.fqn != EXTRA}
        for name, one in metadata.state_dict_metadata.items():
            if isinstance(one, TensorStorageMetadata) and is_quantized(one.properties.dtype):
                metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_meta = self.storage_meta()  # where a planner has kept that of another writer
        content = pickle.dumps(metadata, protocol=2)
        if self._slot and (link := KeeperClient.for_this_rank()):
            self._tell_keeper(link, metadata, content, written)
            self._slot.seal()
            self._finished[self._storage.url] = self._call.step, self._run
            return
        url, step = self._storage.url, self._call.step
        if others := {one.storage_data for one in written if one.index.fqn == EXTRA} - {self._folder}:
            raise StateError(f"ranks disagree on where to save: some wrote to {min(others)}, others to {self._folder}")
        take_ownership(url, self._author)
        parts = checkpoint_publication.collect_parts(self._folder, len(results), _PARTS_S)
        checkpoint_publication.publish_checkpoint(
            url, step, parts, content, author=self._author, torch=str(torch.__version__)
        )
        self._finished[url] = step, self._run
        retain_checkpoints(url, self._storage.keep, newest=step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return True

    def _spare_others_step(self) -> None:
        """Raise StateError if the checkpoint of this step exists and must not be replaced: with `overwrite=False`, or
        if another writer of the same launch saved it."""
        url, step = self._storage.url, self._call.step
        if not self._overwrite and find_checkpoints(url, step):
            raise StateError(f"there is a checkpoint of step {step} in {url}, and overwrite=False")
        last, writer = self._finished.get(url, (-1, ""))
        rivals = last == step and writer != self._run
        if not rivals and not self._keeper and rank_and_world()[1] > 1:
            launch = f"{_launch_token()}-"
            authors = [one.author.run for one in find_checkpoints(url, step)]
            rivals = any(run.startswith(launch) and run != self._author.run for run in authors)
        if rivals:
            raise StateError(f"another writer of this job has saved step {step} in {url}: each needs a path of its own")

    @property
    def _keeper(self) -> KeeperClient | None:
        """Return this save's keeper; None without an agent, or if only some ranks save, as a keeper waits for all."""
        return KeeperClient.for_this_rank() if (self._rank, self._call.world) == rank_and_world() else None

    def _next(self) -> int:
        """Return the step of this save: from its id or, without an id, one after the newest that this rank knows."""
        if self._asked is not None:
            return self._asked
        reached = self._reached.get(self._storage.url, -1)
        if self._last is not None:
            return max(self._last, reached) + 1
        link = KeeperClient.for_this_rank()
        kept = (
            link.request_state(StateRequest(rank=rank_and_world()[0], generation=current_generation()))
            if link
            else None
        )
        newest = max(newest_step(self._storage.url), reached)
        return max(newest, kept.step if kept and kept.source != "none" else -1) + 1

    def _heard(self, call: object) -> SaveCall:
        """Return the SaveCall of this save. In a cached plan, `call` may be that of an earlier save; a rank that is not
        the coordinator then works out the step itself."""
        if isinstance(call, SaveCall) and not call.taken:
            call.taken = True
            self._call = call
        elif not self._is_coordinator:
            known = call if isinstance(call, SaveCall) else self._call
            self._call = msgspec.structs.replace(known, step=self._next())
        return self._call

    def _whole(self, planner: SavePlanner) -> Sequence[WriteItem]:
        """Return all items of this rank's state, including those that other ranks write to storage. If torch reuses a
        cached plan, the items are those of the first save."""
        plan = self._local or planner.create_local_plan()
        return plan.items if plan.usable else planner.plan.items  # type: ignore[attr-defined]

    @property
    def _author(self) -> Author:
        """Return the author of this save, the same for all ranks that save together. Their common token comes from
        torch's store and not from the plan, because a cached plan may be old."""
        rank, world = rank_and_world()
        if self._call.world == 1:
            run = f"{_launch_token()}-{rank}-{self._run}" if world > 1 else self._run
        else:
            run = f"{_launch_token()}-{self._call.coordinator}"
        return Author(current_generation(), run)

    @property
    def _folder(self) -> str:
        return checkpoint_publication.staging_folder(self._storage.url, self._call.step, self._author)

    def _results(self, layout: ImageLayout, things: Things) -> list[WriteResult]:
        """Return the place of each record that this rank owns. Before these, the list has the save's folder, under the
        EXTRA key, to check that all ranks use the same folder. The folder is "" if a keeper writes the files."""
        told = [WriteResult(MetadataIndex(EXTRA), 0, "" if self._slot else self._folder)]
        for item, at in layout.owned_items():
            index = index_of(item.spec)
            if item.spec.key != EXTRA:
                length = item.length if item.spec.dtype else len(things[index].getbuffer())
                told.append(WriteResult(index, item.length, _StorageInfo(file_of(layout.rank), at, length)))
        return told

    def _tell_keeper(self, link: KeeperClient, metadata: Metadata, content: bytes, written: list[WriteResult]) -> None:
        """Give the keeper the metadata of this step, and once for each layout metadata that suits all of its steps. In
        the latter, values are as long as their rooms. It is for a step whose own metadata is gone."""
        whole = {index: one.size_in_bytes for one in written if (index := one.index).fqn != EXTRA}
        rooms = {at: dataclasses.replace(one, length=whole[at]) for at, one in metadata.storage_data.items()}
        if rooms == metadata.storage_data:
            link.put_file(self._metadata_name, content)
        else:
            name = rank_keeper_messages.step_metadata_path(self._metadata_name, self._call.step)
            self._step_files = [*(one for one in self._step_files if one != name), name]
            link.put_file(name, content)
            while len(self._step_files) > _STEP_FILES:  # the keeper removes them too, once it can write to storage
                link.remove_file(self._step_files.pop(0))
            if self._roomy != self._metadata_name:
                roomy = dataclasses.replace(metadata, storage_data=rooms)
                link.put_file(self._metadata_name, pickle.dumps(roomy, protocol=2))
        if why := link.write_files():
            raise StateError(why)
        self._roomy = self._metadata_name

    def _fill(self, image: StateImage, things: Things) -> None:
        moves = []
        for number, item in enumerate(image.layout.items):
            thing = things.get(index_of(item.spec))
            if isinstance(thing, torch.Tensor):
                moves.append(image.put_tensor(number, local_tensor(thing)))
            elif thing is not None:
                image.put_bytes(number, pad_value(thing.getvalue(), item.spec.bytes))
            else:
                image.put_bytes(number, pack_layout(image.layout, self._call.step))
        MemoryCopier().copy_moves(filter(None, moves))

    def _begun(self, layout: ImageLayout, link: KeeperClient | None) -> StateImage:
        """Return the image to copy this save's state into. If the layout has not changed since the last save, the image
        is in the same memory, or in another slot of the same arena."""
        if not link:
            if not self._image or self._image.layout.digest != layout.digest:
                self._image = StateImage(layout, memoryview(mmap.mmap(-1, layout.image_bytes)))
                self._image.write_frames()
            self._image.layout = layout
            return self._image
        if not self._arena or self._arena.layout != layout.digest:
            self._metadata_name = f"metadata-{layout.digest.hex()[:32]}"
            path = str(link.path.parent / self._metadata_name) if self._is_coordinator else ""
            want = make_want(layout, self._slots, path, self._storage)
            self._arena = Arena.open(link.request_arena(want, layout))
            self._arena.populate_pages()
        self._slot = self._arena.begin_slot(self._call.step, current_generation(), DUE)
        if self._slot is None:
            raise StateError("no slot is free: earlier snapshots are still being written")
        image = StateImage(layout, self._slot.image)
        image.write_frames()
        return image


def _launch_token() -> str:
    """Return a token that all ranks of this launch share, and no other launch has."""
    return _get_default_store().compare_set("holdfast.dcp", "", secrets.token_hex(8)).decode()
