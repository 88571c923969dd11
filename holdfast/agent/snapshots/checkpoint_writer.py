"""Writes checkpoints from snapshots in memory: each keeper writes its ranks' parts, rank 0's keeper publishes all."""

import asyncio
import glob
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.snapshots.arena_table import SnapshotPin, pin_snapshot
from holdfast.checkpoint import checkpoint_publication, retention, storage_owner, stored_checkpoints
from holdfast.checkpoint.arena import DUE, Arena, SealedSnapshot
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.storage_errors import PartFailedError, StorageError
from holdfast.checkpoint.writable_check import look_in_time
from holdfast.checkpoint.write_lane import WriteLane, WriteOutcome, WritePulse
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.core.snapshots.memory_grant import format_bytes
from holdfast.model.state_doubt import Doubt
from holdfast.model.stored_checkpoint_report import MissedCheckpoint
from holdfast.wire.rank_keeper_messages import ArenaRequest, CheckpointPolicy, step_metadata_path

_PARTS_S = 60.0  # for the slowest rank's part; one that missed the step has none
_STALL_S = 15.0  # storage that takes nothing for so long is given up for this step, and the snapshot is free again
_LOOK_S = 5.0  # for a look at what is published
_WELL = 3  # checkpoints in a row: storage that is slow on and off is said to be slow once
_MISSED = 4  # steps that are remembered as missing: rank 0 waits for one at a time
DOUBTED = "doubted"
_log = logging.getLogger("holdfast.keeper")


class CheckpointWriter:
    def __init__(
        self, say: Callable[[str], None], clock: AgentClock, report: Callable[[CheckpointListing], None]
    ) -> None:
        """`report` is given each new listing of the checkpoints at a storage that this node publishes to."""
        self.author = Author(0)
        self.doubts: tuple[Doubt, ...] = ()
        self.unmarked = False  # nobody has noted yet at the storage what is in doubt
        self._say, self._clock, self._report = say, clock, report
        self.now = clock.monotonic
        self._listings: dict[str, CheckpointListing] = {}  # newest of each storage
        self._looked_at: dict[str, float] = {}  # when that look began
        self._wants: dict[int, ArenaRequest] = {}  # of this generation
        self._latest: dict[int, ArenaRequest] = {}  # rank -> what it asked for last, in whichever generation
        self._lanes: dict[tuple[int, str], WriteLane] = {}  # one each: a rank whose storage hangs holds up no other
        self._taken_on: dict[int, int] = {}  # rank -> newest step that was taken on
        self._unwritten: dict[int, set[int]] = {}  # rank -> steps whose part is not there, and rank 0 may wait for it
        self.done: dict[int, int] = {}  # rank -> newest step of which its part is on storage
        self.under_way: dict[tuple[int, int], asyncio.Event] = {}  # rank and step -> set when it is over
        self.stored = -1  # newest step that was published
        self.stored_at = 0.0  # when it was, by the monotonic clock
        self.missed_checkpoint: MissedCheckpoint | None = None  # that should have been published since
        self._trouble: dict[
            str, tuple[int, int, int]
        ] = {}  # storage -> step that failed, how many must go well, misses
        self.wanted = -1  # this step is due as well
        self._trains = True  # no rank of this generation has been told to end
        self.owned = storage_owner.OwnedStorages()

    def begin_generation(self, author: Author, doubts: tuple[Doubt, ...] = (), wanted: int = -1) -> None:
        """Begin a generation; drop requests of the previous generation. Step `wanted` becomes a checkpoint as well."""
        self.author, self.doubts, self.wanted = author, doubts, wanted
        self.unmarked, self._trains = bool(doubts), True
        for lane in self._lanes.values():
            lane.give_up()  # of a generation that is over: a part that is missing will not come
        self._wants.clear()
        self._taken_on.clear()
        self._unwritten.clear()
        self.done.clear()
        # The generation may begin at an older step than the last that failed, and its failures count too.
        self._trouble = {url: (-1, more, missed) for url, (_, more, missed) in self._trouble.items()}
        self._listings.clear()  # rank 0 may be elsewhere from now on
        self.stored, self.missed_checkpoint = -1, None

    def end_training(self) -> None:
        """Record that the ranks are being ended; what is still written goes on."""
        self._trains = False

    def note_request(self, want: ArenaRequest) -> None:
        """Remember a rank's request, which says where to write final states, for longer than the rank's generation."""
        self._latest[want.rank] = want

    def on_want(self, want: ArenaRequest) -> None:
        self._wants[want.rank] = want

    def storage_url(self, rank: int) -> str:
        """Return the storage that the rank's newest request names; empty if it names none."""
        want = self._latest.get(rank)
        return want.storage.url if want and want.storage else ""

    @property
    def is_held_up(self) -> bool:
        """Return whether a write to any storage has not ended, even if the write was given up."""
        return any(lane.is_held_up for lane in self._lanes.values())

    def is_published(self, rank: int, step: int) -> bool | None:
        """Return whether this generation has published this step at the rank's storage; None if that cannot be read."""
        url, author = self.storage_url(rank), self.author

        def look() -> str:
            with suppress(StorageError):
                found = stored_checkpoints.find_checkpoints(url, step)
                return str(any(one.ok and one.author == author for one in found))
            return ""

        told = look_in_time(look, _LOOK_S)
        return told == str(True) if told else None

    def is_forsaken(self, rank: int, step: int) -> bool:
        """Return whether rank 0 will publish this step no more, because it gave up or is done; False if unknown."""
        url, author = self.storage_url(rank), self.author

        def look() -> str:
            with suppress(StorageError):
                return str(checkpoint_publication.has_failed(checkpoint_publication.staging_folder(url, step, author)))
            return ""

        return look_in_time(look, _LOOK_S) == str(True)

    async def mark_doubts(self, more: tuple[Doubt, ...] = ()) -> None:
        """Note at rank 0's storage which checkpoints are in doubt, so that no later run resumes from them."""
        self.unmarked, self.doubts = False, (*self.doubts, *more)
        url, run, doubts = self.storage_url(0), self.author.run, self.doubts
        if url and doubts:
            told = await asyncio.to_thread(look_in_time, lambda: _mark_doubts(url, run, doubts), _LOOK_S)
            if told:
                self._say(told)
            await self._list_again(url)

    async def _list_again(self, url: str) -> None:
        """Report which checkpoints are at a storage, if it can be read in time."""
        author, looked_at, found = self.author, self._clock.monotonic(), list[CheckpointListing]()

        def look() -> str:
            with suppress(StorageError):
                found.append(
                    stored_checkpoints.describe_published(
                        url, stored_checkpoints.find_checkpoints(url), author.generation
                    )
                )
            return ""

        await asyncio.to_thread(look_in_time, look, _LOOK_S)
        if found and author == self.author:
            self._report_listing(looked_at, found[0])

    def _report_listing(self, looked_at: float, listing: CheckpointListing) -> None:
        """Report a listing, unless a later look at the same storage was reported before."""
        if looked_at >= self._looked_at.get(listing.base, looked_at):
            self._looked_at[listing.base], self._listings[listing.base] = looked_at, listing
            self._report(listing)

    def report_again(self) -> None:
        """Report the newest listings once more, to a controller that may not have heard of them."""
        for listing in self._listings.values():
            self._report(listing)

    async def clean_up(self) -> None:
        """Remove what failed writes have left at rank 0's storage, since this run publishes nothing more."""
        url, author = self.storage_url(0), self.author

        def clean() -> str:
            with suppress(StorageError):
                retention.clean_unpublished(url, author, before=sys.maxsize)
            return ""

        may_be_left = self.missed_checkpoint or self.stored < 0  # an earlier generation may have failed to write
        if url and may_be_left and not self.is_held_up:  # else a removal would hang as well
            await asyncio.to_thread(look_in_time, clean, _LOOK_S)

    def mark_recalled(self) -> None:
        """Record for every rank that its part of some checkpoint may be missing, because an earlier agent has ended."""
        self._unwritten.update({rank: {checkpoint_publication.UNKNOWN} for rank in self._wants})

    def is_due(self, rank: int, sealed: SealedSnapshot) -> bool:
        """Return whether to checkpoint this snapshot: it is an n-th step, the wanted step, or flagged by its rank."""
        want = self._wants.get(rank)
        if want is None or want.storage is None or sealed.step <= self._taken_on.get(rank, -1):
            return False
        every = want.storage.every_steps
        return (every > 0 and sealed.step % every == 0) or bool(sealed.flags & DUE) or sealed.step == self.wanted

    async def write_snapshot(self, rank: int, arena: Arena, sealed: SealedSnapshot) -> None:
        want, author = self._wants[rank], self.author
        assert want.storage is not None
        self._taken_on[rank] = sealed.step
        before = frozenset(sorted(self._unwritten.get(rank, ()))[-_MISSED:])
        missed = self._unwritten[rank] = {*before, sealed.step}  # until it is written
        pinned = pin_snapshot(arena, sealed)
        if pinned is None:
            why = f"step {sealed.step} was overwritten before it could be written to storage"
            self._say(f"rank {rank}: {why}")
            self.note_missed(rank, sealed.step, why)
            return
        url, every = want.storage.url, want.storage.every_steps
        alone = sealed.step == self.wanted or bool(every and sealed.step % every)  # somebody wants just this one
        begun_s = _PARTS_S if alone else checkpoint_publication.BEGUN_S
        job = PartWrite(self, want, pinned, begun_s, missed=before)
        if alone:
            await self._wait_idle(rank)
        outcome = await self.run_write(job)
        if author != self.author:  # of a generation that is over: no trouble of the storage
            _log.info("rank %d: %s", rank, outcome.detail)
            return
        missed -= job.told
        if not outcome.ok:
            self.note_missed(rank, sealed.step, outcome.detail)
        self._report_outcome(rank, url, outcome)

    async def _wait_idle(self, rank: int) -> None:
        """Wait until this rank has no write under way. Its write lane gives up a write that makes no progress."""
        for over in [over for (writer, _), over in self.under_way.items() if writer == rank]:
            await over.wait()

    async def run_write(self, job: "PartWrite") -> WriteOutcome:
        """Write one rank's part and return the outcome; unpin its snapshot in any case."""
        rank, url = job.want.rank, job.url
        lane = self._lanes.setdefault((rank, url), WriteLane(url, self._say, _STALL_S))
        over = self.under_way[rank, job.step] = asyncio.Event()
        try:
            outcome = await asyncio.to_thread(lane.run, job.step, job.write_and_publish)
        finally:
            self.under_way.pop((rank, job.step), None)
            over.set()
            job.pinned.release()
        if job.author == self.author and job.listing:
            self._report_listing(job.looked_at, job.listing)
        if job.author == self.author and not job.doubted:
            if job.step in job.told:
                self.done[rank] = max(self.done.get(rank, -1), job.step)
            if outcome.ok and outcome.url:
                self.note_published(job.step)
                missed = self.missed_checkpoint
                if missed and missed.step <= job.step:  # a later one may have been left out meanwhile
                    self.missed_checkpoint = None
        return outcome

    def note_published(self, step: int) -> None:
        if step > self.stored:
            self.stored, self.stored_at = step, self._clock.monotonic()

    def note_missed(self, rank: int, step: int, why: str) -> None:
        """Note why a step was not written. Only rank 0 counts: it publishes, so it learns of other ranks' failures."""
        if rank == 0 and (self.missed_checkpoint is None or step >= self.missed_checkpoint.step):
            self.missed_checkpoint = MissedCheckpoint(step=step, why=why)

    def give_up(self, rank: int) -> None:
        """Give up all writes of this rank that have begun."""
        for (writer, _), lane in self._lanes.items():
            if writer == rank:
                lane.give_up()

    def last_write(self, rank: int, pinned: SnapshotPin, begun_s: float, *, doubted: bool) -> "PartWrite | None":
        """Return the write of a rank's part of a final checkpoint; None if the rank has no storage or a new layout."""
        want = self._latest.get(rank)
        if want is None or want.storage is None or want.layout != pinned.arena.layout.hex():
            return None
        if doubted:  # in a folder of its own: nobody finds it who does not look for it, and nothing is retired for it
            apart = msgspec.structs.replace(want.storage, url=f"{want.storage.url}/{DOUBTED}", keep=0)
            want = msgspec.structs.replace(want, storage=apart)
        return PartWrite(self, want, pinned, begun_s, checked=True, doubted=doubted)

    def _report_outcome(self, rank: int, url: str, outcome: WriteOutcome) -> None:
        """Print a message when writing to a storage begins to fail, when the number of missed checkpoints has doubled,
        and when writing succeeds again. Other failures are only logged."""
        _log.info("rank %d: %s", rank, outcome.detail)
        step, more, missed = self._trouble.get(url, (-1, 0, 0))
        if not outcome.ok:
            begins = not more
            again = not begins and outcome.step > step and not outcome.behind
            missed = 1 if begins else missed + again
            self._trouble[url] = (max(outcome.step, step), _WELL if outcome.behind else 1, missed)
            if begins:
                goes_on = "; training goes on, snapshots stay in memory" if self._trains else ""
                self._say(f"rank {rank}: {outcome.detail}{goes_on}")
            elif again and missed.bit_count() == 1:
                self._say(f"rank {rank}: {outcome.detail}; {missed} checkpoints were not written since that began")
        elif outcome.url and more and outcome.step > step:  # what was left out meanwhile is no better for an older one
            self._trouble[url] = (outcome.step, more - 1, missed)
            if more == 1:
                self._say(f"checkpoints are written again: {outcome.detail}")


class PartWrite:
    """The write of one rank's part of one checkpoint."""

    def __init__(
        self,
        writer: CheckpointWriter,
        want: ArenaRequest,
        pinned: SnapshotPin,
        begun_s: float,  # for rank 0 to begin
        *,
        missed: frozenset[int] = frozenset(),  # steps before this one whose part will not come
        checked: bool = False,  # whether the snapshot is to be compared with its checksums first
        doubted: bool = False,  # then it counts for nobody
    ) -> None:
        self.want = want
        self.author = writer.author
        self.pinned = pinned
        self.step = pinned.step
        self.doubted = doubted
        self.listing: CheckpointListing | None = None  # what is at the storage after this write was published
        self.looked_at = 0.0  # when that was
        self.told: set[int] = set()  # of the missed, and of this one if it is written: nobody waits for them
        self._pulse = WritePulse()  # of the write, once it runs
        self._doubts, self._now = writer.doubts, writer.now
        self._missed = missed
        self._owned = writer.owned
        self._begun_s = begun_s
        self._cleans = writer.missed_checkpoint is not None  # after a write that failed, as rank 0's keeper knows
        self._checked = checked

    @property
    def url(self) -> str:
        return self.want.storage.url if self.want.storage else ""

    def describe_progress(self) -> str:
        """Return how much of this rank's part is written, and that other ranks' parts are waited for if it all is."""
        whole = sum(end - start for start, end in self.want.share)
        written = min(self._pulse.bytes, whole)
        if written == whole and self.want.world > 1:
            return f"all {format_bytes(whole)} of rank {self.want.rank}, waiting for the other ranks' parts,"
        return f"{format_bytes(written)} of {format_bytes(whole)} of rank {self.want.rank}"

    def write_and_publish(self, pulse: WritePulse) -> str:
        """Write the part. On rank 0, wait for all parts, publish, and return the checkpoint's URL; else return ""."""
        self._pulse, want = pulse, self.want
        assert want.storage is not None
        base = want.storage.url
        # From here on no older generation can publish.
        fresh = want.rank == 0 and self._owned.take(base, self.author, self.step, pulse.notes)
        if fresh or (want.rank == 0 and self._cleans):  # what is left of a failure may be why there is no room
            with suppress(StorageError):
                retention.clean_unpublished(base, self.author, before=self.step)
        folder = checkpoint_publication.staging_folder(base, self.step, self.author)
        if want.rank != 0 and self._missed:
            self.told |= self._missed
            with suppress(StorageError):
                checkpoint_publication.forsake_parts(base, self.author, want.rank, self._missed, before=self.step)
        if want.rank != 0 and not checkpoint_publication.wait_until_begun(folder, pulse, self._begun_s):
            return ""
        if self._checked and (wrong := self.pinned.verify()):
            if want.rank != 0:  # or rank 0 would wait for it
                checkpoint_publication.forsake_parts(base, self.author, want.rank, (self.step,), before=self.step)
            raise StorageError(f"the snapshot of rank {want.rank} is damaged: {wrong}")
        image = self.pinned.image
        ranges = [image[start:end] for start, end in want.share]
        checkpoint_publication.write_part(folder, want.rank, ranges, pulse=pulse)
        self.told.add(self.step)
        self.pinned.release()
        if want.rank != 0:
            return ""
        try:
            parts = checkpoint_publication.collect_parts(folder, want.world, _PARTS_S, pulse)
        except PartFailedError as e:
            checkpoint_publication.withdraw_write(folder, want.world, str(e))
            raise
        metadata = read_metadata(Path(want.metadata_path), self.step)
        url = checkpoint_publication.publish_checkpoint(
            base, self.step, parts, metadata, author=self.author, layout=want.layout, pulse=pulse
        )
        _remove_older_metadata(Path(want.metadata_path), self.step)
        self._tidy_up(want.storage, pulse)
        return url

    def _tidy_up(self, storage: CheckpointPolicy, pulse: WritePulse) -> None:
        """Remove what the checkpoint that was just published makes superfluous; note which ones are there then."""
        found: tuple[stored_checkpoints.StoredCheckpoint, ...] | None = None
        try:
            stored_checkpoints.mark_doubts(storage.url, self.author.run, self._doubts)  # if that has failed so far
            retention.retain_checkpoints(storage.url, storage.keep, storage.keep_every, newest=self.step)
            self.looked_at, found = self._now(), stored_checkpoints.find_checkpoints(storage.url)
            retention.clean_unpublished(storage.url, self.author, found=found)
        except StorageError as e:
            pulse.notes.append(f"cannot remove old checkpoints: {e}")
        with suppress(StorageError):
            if found is None:
                self.looked_at, found = self._now(), stored_checkpoints.find_checkpoints(storage.url)
            generation = self.author.generation
            self.listing = stored_checkpoints.describe_published(storage.url, found, generation, doubted=self.doubted)


def read_metadata(path: Path, step: int) -> bytes:
    """Return DCP's metadata of this step or, if the step has none of its own, of all steps of the layout."""
    with suppress(OSError):
        return Path(step_metadata_path(str(path), step)).read_bytes()
    try:
        return path.read_bytes()
    except OSError as e:
        raise StorageError(f"cannot read the checkpoint's metadata: {e}") from None


def _remove_older_metadata(path: Path, step: int) -> None:
    """Remove the metadata of earlier steps. That of this step stays: it may be written once more at the end."""
    before = len(step_metadata_path(path.name, 0)) - 1
    with suppress(OSError):
        for file in path.parent.glob(f"{glob.escape(path.name)}-*"):
            if file.name[before:].isdecimal() and int(file.name[before:]) < step:
                file.unlink(missing_ok=True)


def _mark_doubts(url: str, run: str, doubts: tuple[Doubt, ...]) -> str:
    """Mark checkpoints in doubt; return a sentence about those that are newly marked, or about the failure."""
    try:
        steps = stored_checkpoints.mark_doubts(url, run, doubts)
    except StorageError as e:
        return f"checkpoints in doubt cannot be marked: {e}"
    named = ", ".join(map(str, steps))
    return f"checkpoints in doubt at {url} are marked, and no run resumes from them: step {named}" if steps else ""
