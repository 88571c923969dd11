"""The Checkpointer, with which a training script saves and restores its state.

Every rank makes a Checkpointer after wrapping the model, and calls `restore` and `save`. A saved state is a snapshot in
memory that outlives the rank. The node's keeper copies it to a peer and, if `path` is given, makes checkpoints of it.
Without an agent the snapshots belong to the process, and a thread makes the checkpoints.
"""

import atexit
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint import dcp
from holdfast.checkpoint.arena import DUE, Arena, SealedSnapshot, SnapshotName
from holdfast.checkpoint.image_layout import ImageLayout, arrange_image
from holdfast.checkpoint.keeper_client import KeeperClient, current_generation, make_want
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.snapshot_metadata_record import ImageMetadataError
from holdfast.checkpoint.state_image import StateError, extra_spec, flatten_state, record_sizes
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.stored_checkpoints import StoredCheckpoint, apply_doubts, find_checkpoints
from holdfast.checkpoint.writable_check import write_refusal
from holdfast.client.checkpointing.agentless_writer import CheckpointTimer, LocalWriter
from holdfast.client.checkpointing.checkpoint_fit import describe_mismatch, refuse_fresh_start
from holdfast.client.checkpointing.checkpointer_args import source_of, storage_of
from holdfast.client.checkpointing.extra_state import ExtraState, extras_room
from holdfast.client.checkpointing.model_state import ModelState
from holdfast.client.checkpointing.optimizer_step_pre_hook import do_nothing
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.checkpointing.replicated_restore import announce_sizes
from holdfast.client.checkpointing.rival_run import RivalRun
from holdfast.client.checkpointing.state_restore import StateRestore
from holdfast.client.snapshot.rank_snapshots import RankSnapshots, make_own_arena
from holdfast.client.snapshot.state_item_locations import ChangedError
from holdfast.client.training import script_replay
from holdfast.client.training.fixed_ddp_buckets import fix_saved_model
from holdfast.client.training.progress import here
from holdfast.client.training.stderr_sentence import say
from holdfast.wire.rank_keeper_messages import StateGrant, StateRequest

_NO_STATE = StateGrant(source="none")
_ENDING_S = 120.0  # a write that is under way when the script ends is waited for as long


class Checkpointer:
    """Saves and restores the state of one rank. `save` never raises because of storage or memory; misuse raises.

    >>> import holdfast, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer, extra={"epoch": 1}, path="ckpt", every=100)
    >>> for step in range(ckpt.restore() + 1, 4):
    ...     saved = ckpt.save(step)
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        extra: MutableMapping[str, Any] | None = None,
        state_dict: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        load: Callable[[dict[str, Any]], object] | None = None,
        path: str | os.PathLike[str] | None = None,
        every: int | str | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        slots: int | None = None,
        verified: bool = False,
        replicated: "bool | dist.ProcessGroup | None" = None,
    ) -> None:
        """`optimizer`: one of torch's or several; with `state_dict`, any object whose method `step` changes the state
        dict. `every`: steps between checkpoints under `path`, or "30s", or "auto". `slots`: how many snapshots fit in
        memory; by default 4 if they are copied to peers, 3 if they are written to storage, else 2. `verified`: one more
        slot, for a snapshot that was verified as good. `replicated`: the group of ranks that hold the same tensors, if
        no wrapper such as DDP says so; True for all ranks."""
        self._world = RankWorld()
        self._replay = script_replay.current_replay()
        self._storage = storage_of(path, every, keep, keep_every)
        self._unread = self._storage is not None and not self._replay  # nobody has looked what is there already
        self._newest: SealedSnapshot | None = None  # snapshot
        self._link = KeeperClient.for_this_rank()
        if slots is None:
            slots = 4 if self._link and self._world.nodes > 1 else 3 if self._storage else 2
        self._slots, self._verified = slots + verified, verified
        if slots < 2:
            raise ValueError(f"slots must be at least 2, not {slots}, or a snapshot overwrites the last whole one")
        group = self._world.replica_group(replicated)
        self._source = source_of(model, optimizer, (state_dict, load), rank=self._world.rank, group=group)
        self._extras = ExtraState({} if extra is None else extra)
        self._generation, self._said = current_generation(), set[str]()
        self._say_once(fix_saved_model(model, lambda count: self._world.gather_all(count, int)))
        self._rival = self._check_path()
        self._storing: LocalWriter | None = None
        if self._storage and not self._link and not self._replay:
            author = Author(self._generation, self._world.broadcast_first(secrets.token_hex(8), str))
            self._storing = LocalWriter(self._storage, self._world, author, say)
        self._due = CheckpointTimer(self._storage, self._world) if self._storage and not self._replay else None
        self._snapshots: RankSnapshots | None = None
        self._announce_step: Callable[[], None] = do_nothing  # the processor's copies are done when save returns
        self._metadata, self._last, self._stall_s = b"", -1, 0.0  # the third is what the last save took
        self.skipped = 0  # saves for which there was no room
        self.restored_from = ""  # "memory", "peer", "replica", "disk", "storage"; "none": nothing was found
        self._lay_out()
        atexit.register(_on_exit, weakref.ref(self))

    def save(self, step: int, *, force: bool = False) -> bool:
        """Take a snapshot; the script may change the state once this returns. False if no snapshot was taken.

        `force` makes this snapshot a checkpoint whatever `every` says; all ranks must force the same steps.

        >>> holdfast.Checkpointer(model=torch.nn.Linear(2, 1), path="saved", every=100).save(7, force=True)
        True
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be a whole number from 0 on, not {step!r}")
        if step <= self._last:
            raise ValueError(f"step {step} was saved after step {self._last}; steps must grow")
        if force and not self._storage:
            raise ValueError("force=True makes a checkpoint, so give path=")
        if self._rival:
            self._rival.check_save()
        self._check_line(step)
        began_at = time.monotonic()
        self._last = step
        if self._replay:
            return self._sign_replay(step)
        due = self._due is not None and (self._due.is_due(step, self._stall_s) or force)
        if due and self._rival:
            self._rival.check_due()
        if astray := here.is_astray():  # the states before it may be needed, and would be overwritten
            self._say_once("no snapshots are taken while the loss is not finite")
        taken = None if astray else self._take_snapshot(step, due)
        if self._link and (why := self._link.write_files()):
            self._say_once(f"rank {self._world.rank} {why}", by_all=True)  # each node has a disk of its own
        if taken is None:
            self.skipped += 1
            return False
        self._newest = taken
        if self._storing and due:
            self._store_snapshot(self._storing, taken, force)
        self._stall_s = time.monotonic() - began_at
        return True

    def before_step(self) -> None:
        """Announce that the script is about to change its `state_dict`; a GPU can then copy it while training goes on.

        Optimizers of torch, and objects given as `optimizer=`, announce their steps themselves and need no such call.

        >>> weights = torch.zeros(3)
        >>> ckpt = holdfast.Checkpointer(state_dict={"weights": weights})
        >>> for step in range(ckpt.restore() + 1, 4):
        ...     ckpt.before_step()
        ...     changed = weights.add_(1.0)
        ...     saved = ckpt.save(step)
        """
        self._announce_step()

    def restore(self) -> int:
        """Restore the newest state that all ranks can restore; return its step, or 0 if there is none.

        >>> holdfast.Checkpointer(model=torch.nn.Linear(2, 1), path="nothing-yet").restore()
        0
        """
        if self._last >= 0:
            raise RuntimeError("call restore() before the first save")
        self._unread = False
        with here.phase("restore"):
            began_at = time.monotonic()
            step = self._resume_from(self._link) if self._link else self._restore_newest()
        took_s = time.monotonic() - began_at
        if self._snapshots:
            self._snapshots.on_restored()
        if self.restored_from != "none":
            self._last = step
            if self._world.rank == 0:
                say(f"step {step} was restored from {self.restored_from} in {took_s:.2f} s")
        here.on_restored(step, took_s, self._extras.made)
        return step

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for queued snapshots, then for a write to storage; False if that write takes longer than `timeout_s`.

        >>> holdfast.Checkpointer(model=torch.nn.Linear(2, 1), path="waited-for").wait(timeout_s=60)
        True
        """
        if self._snapshots:
            self._snapshots.close()
        whole = self._storing is None or self._storing.wait(timeout_s)
        if not whole:
            say("the last checkpoint is unfinished")
        return whole

    def close(self, timeout_s: float | None = None) -> None:
        """Make the newest snapshot a checkpoint; an agent's keeper makes it if there is one. All ranks call this last.

        >>> holdfast.Checkpointer(model=torch.nn.Linear(2, 1), path="closed").close()
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self.wait(timeout_s) and self._storing and self._newest and self._newest.step > self._storing.offered:
            self._store_snapshot(self._storing, self._newest)
            self.wait(None if until is None else max(0.0, until - time.monotonic()))
        if self._storing:
            self._storing.release_path()

    def _check_path(self) -> RivalRun | None:
        """Look for a rival run; return the RivalRun, or None without a path. If checkpoints cannot be written, raise
        StateError in the first generation. In later ones print the reason; the first save may raise the error."""
        self._refused = ""
        if not self._storage or self._replay:
            return None
        why = write_refusal(self._storage.url) if self._world.rank == 0 else ""
        self._refused = why = self._world.broadcast_first(why, str)
        rival = RivalRun(self._storage.url, self._world, with_agent=self._link is not None)
        if rival.sentence:
            self._say_once(f"{rival.sentence}; states there can be restored, but not saved")
        if why and self._generation > 1:  # it could be written to before, so it may well be again
            self._say_once(f"cannot write checkpoints: {why}")
        elif why:
            raise StateError(f"cannot write checkpoints: {why}")
        return rival

    def _check_line(self, step: int) -> None:
        """Check the first save of a script that has not called restore(). Raise StateError if storage is not writable
        or has this step or a later one already: the next restore would take that checkpoint and not ours."""
        if not self._unread or not self._storage:
            return
        if self._refused:
            raise StateError(f"cannot write checkpoints: {self._refused}")
        self._unread = False
        url, newest = self._storage.url, -1
        if self._world.rank == 0:
            with suppress(StorageError):  # storage that fails stops nobody
                newest = max((one.step for one in find_checkpoints(url) if one.ok or one.unvouched), default=-1)
        if (newest := self._world.broadcast_first(newest, int)) >= step:
            told = "call restore() before the first save, or give another path"
            raise StateError(f"{url} already holds a checkpoint of step {newest}, and this is step {step}: {told}")

    def _sign_replay(self, step: int) -> bool:
        """In a replay, report the hash of the state instead of saving the state; always return False."""
        self._say_once("this is a replay: nothing is saved")
        try:
            known = self._snapshots is not None or self._lay_out()
            things = self._source.read().all if known else []
        except ChangedError:
            things = self._source.read().all if self._lay_out() else []
        self._replay.done(step, [thing for thing in things if isinstance(thing, torch.Tensor)])
        return False

    def _take_snapshot(self, step: int, due: bool) -> SealedSnapshot | None:
        try:
            for _ in range(2):
                if not self._snapshots and not self._lay_out():
                    raise StateError("the optimizer has no state yet, and its layout is unknown")
                assert self._snapshots
                try:
                    return self._copy_state(self._snapshots, step, due)
                except ChangedError as e:
                    self._say_once(f"the state is laid out anew: {e}")
                    self._snapshots.free_memory()
                    self._snapshots = self._newest = None
        except StateError as e:
            self._say_once(f"no snapshots are taken: {e}")
        return None

    def _copy_state(self, snapshots: RankSnapshots, step: int, due: bool) -> SealedSnapshot | None:
        snapshots.check_capture()
        things = self._source.read()
        packed = self._extras.pack_extras(step, things.absent, here.numbers.made)
        name = SnapshotName(step=step, generation=self._generation, flags=DUE if due else 0)  # the keeper sees by it
        return snapshots.take_snapshot(name, things, packed)

    def _lay_out(self) -> bool:
        """Plan layout and memory of all snapshots; a collective. Return False if a rank cannot predict its state."""
        state = self._source.build_state()
        if not all(self._world.gather_all(state is not None, bool)) or state is None:
            return False
        world = self._world
        found = flatten_state(state, self._source.holders_of)
        extra = world.largest_of(extras_room(self._extras.pack_extras(0, list(found.objects))))
        specs = [*found.specs, extra_spec(extra, world.rank, world.size)]
        form = f"torch {torch.__version__}"
        layout = arrange_image(specs, record_sizes, rank=world.rank, world=world.size, form=form)
        gathered = world.gather_layouts(layout)
        self._metadata = dcp.encode_metadata(gathered) if gathered else b""
        announce_sizes(layout, self._say_once)
        self._source.bind_layout(layout, found)
        self._snapshots = self._make_memory(layout)
        if self._replay:
            return True  # no more of its memory is used than to read a checkpoint
        devices = {one.device for one in found.objects.values() if isinstance(one, torch.Tensor) and one.is_cuda}
        if len(devices) == 1:
            guarded, followed = self._source.guarded_items(), self._source.is_followed
            self._snapshots.use_gpu(devices.pop(), guarded, self._say_once, followed=followed)
            self._announce_step = torch.compiler.disable(self._snapshots.before_step)
            self._source.before_step(self._announce_step)
        else:
            self._snapshots.populate_memory()
        return True

    def _make_memory(self, layout: ImageLayout) -> RankSnapshots:
        if not self._link:
            return RankSnapshots(layout, *make_own_arena(layout, self._slots))
        left = self._link.put_metadata(self._metadata) if self._metadata else ""
        want = make_want(layout, self._slots, left, self._storage)
        path = self._link.request_arena(msgspec.structs.replace(want, verified=self._verified), layout)
        arena = Arena.open(path)
        if arena.layout != layout.digest:
            raise StateError(f"the keeper gave memory of another layout: {path}")
        return RankSnapshots(layout, arena, path)

    def _resume_from(self, link: KeeperClient) -> int:
        """Restore the state that the keeper names, from memory or storage; all ranks get the same step."""
        state = link.request_state(StateRequest(rank=self._world.rank, generation=self._generation))
        self.restored_from = state.source
        if state.source == "none" and not state.cut_from:
            return self._restore_newest(state)
        restoring = self._start_restore()
        if state.cut_from:
            done, note = restoring.from_cut(state, self._world)
            self._say_once(note)
            if not done:
                return self._restore_newest(state)
        elif state.replicated:
            if note := restoring.from_replicas(state, self._world, self._generation, link.path.parent):
                self._say_once(note)
        elif state.source == "storage":
            if why := self._load_checkpoint(restoring, state.url, state.step):
                raise StateError(f"{state.url} cannot be restored: {why}")
        else:
            restoring.from_memory(state.arena, state.slot, state.step)
        restoring.drop_later(state.step)
        return state.step

    def _restore_newest(self, told: StateGrant = _NO_STATE) -> int:
        """Restore the newest checkpoint that all ranks can read; return its step, or 0 if there is none.

        Storage that is not mounted looks like storage that is empty. So if the job has written a checkpoint, finding
        none is an error: a start from step 0 would throw away the job's work.
        """
        self.restored_from = "none"
        url = self._storage.url if self._storage else ""
        there = find_checkpoints(url) if url and self._world.rank == 0 else ()
        found = self._world.broadcast_first(apply_doubts(there, told.run, told.doubts), tuple[StoredCheckpoint, ...])
        if unvouched := [one for one in found if one.unvouched]:
            self._say_once(f"{len(unvouched)} of {len(found)} checkpoints are left out: {unvouched[0].why}")
        tried = False
        for one in found:
            if 0 <= self._replay.not_after < one.step or one.unvouched:
                continue
            if not one.ok:
                self._say_once(f"{one.url} is left out: {one.why}")
                continue
            tried = True
            why = self._load_checkpoint(self._start_restore(), one.url, one.step)
            if not why:
                self.restored_from = "storage"
                return one.step
            self._say_once(f"{one.url} is left out: {why}")
        if tried:
            raise StateError(f"none of the checkpoints at {url} can be restored")
        if why := refuse_fresh_start(url, found, told):
            raise StateError(why)
        if self._refused:  # nothing would be lost by an end here
            raise StateError(f"cannot write checkpoints: {self._refused}")
        if found:
            self._say_once(f"training starts from step 0: all {len(found)} checkpoints in {url} are left out")
        return 0

    def _load_checkpoint(self, restoring: StateRestore, url: str, step: int) -> str:
        """Restore a checkpoint on all ranks. Return "", or why it failed; every rank returns the same sentence."""
        metadata, pieces, why = None, None, ""
        try:
            metadata, pieces = restoring.plan_read(url)
        except StorageError as e:
            why = str(e)
        told = self._world.gather_all((why, pieces is not None), tuple[str, bool])
        if reasons := [why for why, _ in told if why]:
            return reasons[0]
        assert metadata is not None
        self._check_alike(url, metadata)  # though all that we ask for be there, there may be more, which would be lost
        try:
            if pieces is not None and all(same for _, same in told):
                # Of the generation before: what was just read from storage need not be written there again.
                restoring.from_parts(self._world, url, SnapshotName(step=step, generation=self._generation - 1), pieces)
            elif note := restoring.from_other(url, metadata, self._world.rank):
                self._say_once(f"{url} {note}")
        except (StorageError, StateError, ImageMetadataError, CheckpointException) as e:
            why = str(e)
        return next(filter(None, self._world.gather_all(why, str)), "")

    def _check_alike(self, url: str, metadata: Metadata) -> None:
        """Raise StateError on all ranks if the checkpoint is of another model; the restore ends with this error."""
        ours, trained = (
            dcp.decode_metadata(self._metadata) if self._metadata else None,
            isinstance(self._source, ModelState),
        )
        why = self._world.broadcast_first(describe_mismatch(url, metadata, ours, trained=trained) if ours else "", str)
        if why:
            raise StateError(why)

    def _start_restore(self) -> StateRestore:
        if not self._snapshots:
            self._source.loadable_state()
            self._lay_out()
        assert self._snapshots
        return StateRestore(self._source, self._extras, self._snapshots)

    def _store_snapshot(self, storing: LocalWriter, taken: SealedSnapshot, force: bool = False) -> None:
        assert self._snapshots
        if force:
            storing.wait(_ENDING_S)
        if not storing.offer_snapshot(self._snapshots, self._metadata, taken):
            self._say_once("a checkpoint was due while another was still being written, and is left out")

    def _say_once(self, what: str, *, by_all: bool = False) -> None:
        if what and what not in self._said and (by_all or self._world.rank == 0):
            say(what)
        self._said.add(what)


def _on_exit(checkpointer: "weakref.ref[Checkpointer]") -> None:
    if (found := checkpointer()) is None:
        return
    if found._world.size > 1 and hasattr(sys, "last_value"):  # an exception: the others are at other steps
        found.wait(_ENDING_S)
    else:
        found.close(_ENDING_S)
