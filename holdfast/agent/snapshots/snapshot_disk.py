"""States of this node's ranks on its local disk, which outlive the memory of all nodes.

Each state is a checkpoint of one part: the rank's whole image, its layout, and a manifest with the run, the generation
and all checksums. Nodes of one host share a run's folder, which only its owner can read.
"""

import asyncio
import contextlib
import mmap
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.snapshots.arena_table import ArenaTable, SnapshotPin, pin_snapshot
from holdfast.agent.snapshots.keeper_interfaces import IsWanted, KeeperNotes, KeeperPorts, any_generation
from holdfast.checkpoint import checkpoint_publication, checkpoint_reader, retention, storage_owner
from holdfast.checkpoint.disk_state_record import DiskNote, DiskState
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.manifest import Author, step_of
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.writable_check import look_in_time, try_write
from holdfast.checkpoint.write_lane import WriteLane, WriteOutcome, WritePulse
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits, list_stored_ranks
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.decoding import from_msgpack
from holdfast.linux import own_process_settings
from holdfast.model.copy_aim import Aim
from holdfast.model.state_copy import Copy
from holdfast.wire.rank_keeper_messages import layout_file_name

_STALL_S = 15.0  # a disk that takes nothing for so long is given up for this step
_FIRST_S = 30.0  # to read for the first time what lies there; a node is not ready before
_LOOK_S = 1.0  # to list it again: the agent waits for it, and must not fall silent
_REST_S = 1.0  # after one block at most
_RANK = "rank-"
_MEND = "holdfast ckpt gather brings it to one"
_IMAGE = "__0_0.distcp"  # of a checkpoint that has one part


class PacedPulse(WritePulse):
    """Paces a write so that training gets half of the disk's time: after each block, it sleeps as long as the block
    took."""

    def __init__(self, pulse: WritePulse, clock: AgentClock) -> None:
        super().__init__()
        self._pulse, self._clock = pulse, clock
        self.notes = pulse.notes
        self._since = clock.monotonic()

    def add_bytes(self, count: int = 0) -> None:
        self._pulse.add_bytes(count)
        if count:
            time.sleep(min(self._clock.monotonic() - self._since, _REST_S))
        self._since = self._clock.monotonic()


class SnapshotDisk:
    """Writes, lists, reads and removes states. Methods that touch the disk for long run in threads."""

    def __init__(self, limits: DiskLimits, notes: KeeperNotes, arenas: ArenaTable, ports: KeeperPorts) -> None:
        self.limits = limits
        self._notes = notes
        self._arenas = arenas
        self._ports = ports
        self._author = Author(0)  # without a run nothing is read or written
        self._lane = WriteLane(limits.path, ports.say, _STALL_S, "the disk")
        self._trouble = self._hangs = False
        self._leaving = False  # the final state is written in place of what the aim names
        self._left = False  # and nothing changes any more
        self._read: dict[tuple[str, int], DiskState] = {}  # by URL, and when that came to be there
        self._left_out: set[tuple[str, int]] = set()  # the same
        self._listed: list[DiskState] = []  # when the agent looked last
        self._looking = threading.Thread()  # that lists what lies there; it may hang
        self._loaded: tuple[str, memoryview] | None = None  # what was last read for others, and is whole
        self._loading = threading.Lock()
        self._removed = -1  # all before this step
        self._aimed = -1  # newest step that was begun in this generation
        self.unseen = bool(limits.path)  # nobody has tried yet whether anything can be written
        self.written = -1  # newest that is on disk
        self.tried = -1  # newest that is, or could not be written
        self.final = -1  # that was written when the node left the job

    def begin_generation(self, author: Author) -> None:
        self._lane.give_up()  # of a generation that is over
        self._author = author
        self.written = self.tried = self._aimed = self._removed = -1

    async def use_run(self, run: str) -> None:
        """From now on, use only states of this run. Read them once now, so that they are listed quickly later."""
        if run != self._author.run:
            self._author = Author(0, run)
        if self.limits.path:
            await asyncio.to_thread(look_in_time, self._look, _FIRST_S)

    # --- what lies there ---------------------------------------------------------------------------------------

    def list_states(self) -> list[DiskState]:
        """Return this run's whole states, those of later generations first. This blocks while the disk hangs."""
        if not self.limits.path or not self._author.run or self._hangs:
            return []
        try:
            if why := _refuse_folder(self._folder):
                self._leave_out(str(self._folder), why)
                return []
            found = [at for at in self._folder.glob(f"{_RANK}*/step-*") if step_of(at.name) is not None]
            urls = {str(at): at.lstat().st_mtime_ns for at in found}  # another state may come to lie in its place
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            self._leave_out(str(self._folder), e.strerror or str(e))
            return []
        before = self._read
        now = {one: state for one in urls.items() if (state := before.get(one) or self._read_state(*one))}
        self._read = now
        return sorted(now.values(), key=lambda one: (-one.author.generation, -one.step, one.note.layout.rank))

    def _look(self) -> str:
        self._listed = self.list_states()
        return ""

    def _list_in_time(self) -> list[DiskState]:
        """Return the states on disk. If the disk is slow, return those listed last; if a write hangs, return none."""
        if not self._left and not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, name="holdfast-list", daemon=True)
            self._looking.start()
            self._looking.join(_LOOK_S)
        return [] if self._hangs else [one for one in self._listed if one.author.run == self._author.run]

    @property
    def _folder(self) -> Path:
        return Path(self.limits.run_folder(self._author.run))

    def list_copies(self, node: str) -> list[Copy]:
        return [state.describe_copy(node) for state in self._list_in_time()]

    def find_state(
        self, rank: int, layout: str, step: int | None = None, is_wanted: IsWanted = any_generation
    ) -> DiskState | None:
        found = (one for one in self.list_states() if one.matches(rank, layout, step))
        return next((one for one in found if is_wanted(one.author.generation)), None)

    def _read_state(self, url: str, came_at: int) -> DiskState | None:
        if (url, came_at) in self._left_out:
            return None
        try:
            manifest = checkpoint_reader.read_manifest(url)
            note = from_msgpack(checkpoint_reader.read_metadata(url), DiskNote)
            size = LocalStorage(url).file_size(_IMAGE)
        except (StorageError, msgspec.DecodeError) as e:
            if os.path.exists(url):  # else another node of this host has just removed it
                self._leave_out(url, str(e), came_at)
            return None
        plan, place = note.layout, os.path.basename(os.path.dirname(url))
        if manifest.author.run != self._author.run or place != f"{_RANK}{plan.rank}":
            why = f"it is of rank {plan.rank} of run {manifest.author.run}"
        elif not size == manifest.bytes == plan.image_bytes:
            why = f"it has {size or 0} bytes instead of {plan.image_bytes}"
        else:
            return DiskState(url=url, step=manifest.step, author=manifest.author, note=note, bytes=manifest.bytes)
        self._leave_out(url, why, came_at)
        return None

    def _leave_out(self, url: str, why: str, came_at: int = 0) -> None:
        if (url, came_at) not in self._left_out:
            self._left_out.add((url, came_at))
            self._ports.say(f"the state at {url} is left out: {why}")

    # --- reading -----------------------------------------------------------------------------------------------

    def read_image(self, state: DiskState, into: memoryview) -> None:
        """Read a state and check every block. Raises StorageError; a damaged state is also removed."""
        try:
            checkpoint_reader.read_part(state.url, 0, into)
        except CorruptError as e:
            self._ports.say(f"dropped the damaged state of rank {state.note.layout.rank} at {state.url}: {e}")
            self._remove_states([state])
            raise

    def open_image(self, rank: int, layout: str, step: int, generation: int) -> memoryview | None:
        """Return the verified image of a state, for a rank of another node. Return None if the state is damaged or not
        here. Generation 0 stands for any generation."""
        with self._loading:  # several links ask for parts of the same one
            state = self.find_state(rank, layout, step, lambda one: generation in (0, one))
            if state is None:
                return None
            if self._loaded is None or self._loaded[0] != state.url:
                self._loaded = None
                image = memoryview(mmap.mmap(-1, state.bytes))
                try:
                    self.read_image(state, image)
                except StorageError:
                    return None
                self._loaded = (state.url, image)
            return self._loaded[1]

    # --- writing -----------------------------------------------------------------------------------------------

    async def look_at_path(self) -> None:
        """Before the first write, test whether the disk can be written to; print a message if it cannot."""
        self.unseen = False
        why = await asyncio.to_thread(look_in_time, self._explain_path, _STALL_S)
        if why and self.tried < 0:
            self._trouble = True
            self._ports.say(f"disk.path is of no use: {why}; training goes on, with no state on disk")

    def _explain_path(self) -> str:
        try:
            try_write(self.limits.path)
        except StorageError as e:
            return str(e)
        return ""

    async def follow_aim(self, aim: Aim, ranks: Sequence[int]) -> None:
        """Write the states of step `aim.disk` to disk, and remove states of steps before `aim.disk_from`."""
        if not self.limits.path or aim.generation != self._author.generation:
            return
        self._loaded = None  # the job trains: every rank has its state
        if aim.disk_from > self._removed:
            self._removed = aim.disk_from
            await asyncio.to_thread(self.remove_before, aim.disk_from)
        if aim.disk > self._aimed and aim.generation == self._author.generation:  # another may have begun meanwhile
            await self._write_floor(aim.disk, ranks, verified=aim.verified >= aim.disk)

    async def _write_floor(self, step: int, ranks: Sequence[int], *, verified: bool) -> None:
        """Write the snapshots of this step. A failure is reported once, and training goes on."""
        author, self._aimed = self._author, step
        outcome = await self._write_step(step, ranks, verified=verified)
        if author != self._author or self._leaving:
            return
        self.tried = step
        if outcome is None:
            return
        self._hangs = not outcome.ok and self._lane.is_held_up
        if outcome.ok:
            self.written = step
        if outcome.ok == self._trouble:
            self._trouble = not outcome.ok
            word = "states are written to disk again" if outcome.ok else "training goes on, with no newer state there"
            self._ports.say(f"{outcome.detail}; {word}")
        self._ports.report_progress()

    async def _write_step(self, step: int, ranks: Sequence[int], *, verified: bool) -> WriteOutcome | None:
        """Write the ranks' snapshots of this step; return None if memory does not hold all of them."""
        pins = [pin for rank in ranks if (pin := self._pin_step(rank, step))]
        try:
            if len(pins) < len(ranks):
                return None
            write = _StepWrite(self, self._author, pins, verified)
            return await asyncio.to_thread(self._lane.run, step, write.write_all)
        finally:
            for pin in pins:
                pin.release()

    def _pin_step(self, rank: int, step: int) -> SnapshotPin | None:
        own = self._arenas.find_arena(rank)
        found = next((one for one in own.arena.list_sealed() if one.step == step), None) if own else None
        return pin_snapshot(own.arena, found) if own and found else None

    def write_state(self, author: Author, pin: SnapshotPin, verified: bool, pulse: WritePulse) -> None:
        """Write one rank's image to the local disk and publish it. Raises StorageError."""
        arena, pulse = pin.arena, pulse if self._leaving else PacedPulse(pulse, self._ports.clock)
        base = str(self._make_folder(arena.rank))
        try:
            plan = self._notes.read_note(layout_file_name(arena.rank, arena.layout.hex()))
            note = DiskNote(layout=from_msgpack(plan, ImageLayout), verified=verified)
        except (OSError, msgspec.DecodeError) as e:
            raise StorageError(f"the layout of rank {arena.rank} cannot be read: {e}") from None
        storage_owner.take_ownership(base, author)
        folder = checkpoint_publication.staging_folder(base, pin.step, author)
        part = checkpoint_publication.write_part(folder, 0, [pin.image], threads=1, pulse=pulse)
        url = checkpoint_publication.publish_checkpoint(
            base, pin.step, (part,), msgspec.msgpack.encode(note), author=author, layout=arena.layout.hex(), pulse=pulse
        )
        with contextlib.suppress(OSError):  # the run's folder keeps others out as it is
            for name in os.listdir(url):
                os.chmod(os.path.join(url, name), 0o600)
        retention.clean_unpublished(base, author)

    def check_room(self, need: int) -> None:
        """Raise StorageError if this node's states would take more than disk.max_bytes."""
        if self.limits.max_bytes:
            ranks = {own.arena.rank for own in self._arenas.list_arenas()}
            held = sum(one.bytes for one in self.list_states() if one.note.layout.rank in ranks)
            if held + need > self.limits.max_bytes:
                most = f"disk.max_bytes allows {self.limits.max_bytes}"
                raise StorageError(f"{held} bytes lie at {self.limits.path}, {need} more are needed, and {most}")

    def _make_folder(self, rank: int) -> Path:
        """Return the folder of a rank's states, made if it was missing. Raises StorageError."""
        at = self._folder / f"{_RANK}{rank}"
        try:
            with contextlib.suppress(FileNotFoundError):  # another node has just found the run's folder empty
                return _make_private(at)
            return _make_private(at)
        except OSError as e:
            raise StorageError(f"{at} cannot be made: {e.strerror}") from None

    # --- removal -----------------------------------------------------------------------------------------------

    def remove_before(self, step: int) -> None:
        """Remove this run's states of steps before `step`; all nodes' disks have enough newer states."""
        self._remove_states([one for one in self.list_states() if one.step < step])

    def remove_given_up(self, launch: KeeperLaunch) -> None:
        """In a thread, remove states in doubt, and the last generation's states after the step to resume from."""

        def remove() -> None:
            states = self.list_states()
            self._remove_states([one for one in states if launch.gives_up(one.author.generation, one.step)])

        if self.limits.path:
            threading.Thread(target=remove, name="holdfast-remove", daemon=True).start()

    def remove_run(self) -> None:
        """Remove all states of this run from this host's disk."""
        with contextlib.suppress(StorageError, OSError):
            if self.limits.path and self._author.run and not _refuse_folder(self._folder):
                LocalStorage(self.limits.path).remove_folder(self._folder.name)

    async def write_final(self, step: int, ranks: Sequence[int], within_s: float) -> None:
        """Write the final states of these ranks at this step. If this succeeds in time, set `final` to the step."""
        self._leaving = True
        self._lane.give_up()
        if self._hangs:
            return
        until = self._ports.clock.monotonic() + within_s
        await asyncio.to_thread(self._lane.wait_idle, within_s)  # or the final state finds no room in the lane
        writing = asyncio.create_task(self._write_step(step, ranks, verified=False))
        done, _ = await asyncio.wait([writing], timeout=max(0.0, until - self._ports.clock.monotonic()))
        self._lane.give_up()  # if it is still under way
        outcome = writing.result() if done else None
        if outcome and outcome.ok:
            self.final = step
        else:
            lacks = ": memory does not hold it for all ranks of this node" if done else " in time"
            why = outcome.detail if outcome else f"step {step} was not written to {self.limits.path}{lacks}"
            self._ports.say(why)

    async def leave_job(
        self, ranks: Sequence[int], stored: int, spared: Sequence[int], not_after: int, *, answered: bool
    ) -> None:
        """Remove this run's states from this host's disk. Keep the states of a rank that has one newer than step
        `stored`, and of the ranks in `spared`, which belong to other nodes. Report which state stays and why: storage
        lacks it or, without `answered`, could not be read. A state after step `not_after` is in doubt."""
        self._leaving = True
        self._lane.give_up()

        def clear() -> str:
            newer = [one for one in self.list_states() if one.step > stored and one.note.layout.rank not in spared]
            self._remove_ranks(stored, spared)
            self._look()
            held = {rank: {one.step for one in newer if one.note.layout.rank == rank} for rank in ranks}
            whole = set.intersection(*held.values()) if held else set()
            steps = whole or {one.step for one in newer}
            good = {step for step in steps if step <= not_after}
            named = f"step {max(good)}" if good else f"step {max(steps, default=-1)} (in doubt)"
            why = "no storage has this state" if answered else "whether storage has this state is not known"
            return f"{named} stays on disk in {self._folder}: {why} ({_MEND})" if newer else ""

        stays = await asyncio.to_thread(look_in_time, clear, _STALL_S)
        self._left = True
        if stays:
            self._ports.say(stays)

    def _remove_ranks(self, stored: int, spared: Sequence[int]) -> None:
        """Remove the folders of ranks that have no state after the stored step, except ranks in `spared`. Then remove
        the run's folder if it is empty."""
        with contextlib.suppress(OSError, StorageError):
            if not self._author.run or _refuse_folder(self._folder):
                return
            newest: dict[int, int] = {}
            for at in self._folder.glob(f"{_RANK}*"):
                if (told := at.name.removeprefix(_RANK)).isdecimal():
                    steps = [step for one in at.iterdir() if (step := step_of(one.name)) is not None]
                    newest[int(told)] = max(steps, default=-1)
            for rank in list_stored_ranks(newest, stored, spared):
                LocalStorage(str(self._folder)).remove_folder(f"{_RANK}{rank}")
            self._folder.rmdir()

    def _remove_states(self, states: Sequence[DiskState]) -> None:
        for state in states:
            with contextlib.suppress(StorageError):  # another node of this host may be faster
                LocalStorage(os.path.dirname(state.url)).remove_folder(os.path.basename(state.url))


class _StepWrite:
    """Writes the states of this node's ranks at one step, one rank after the other, at low priority."""

    def __init__(self, disk: SnapshotDisk, author: Author, pins: Sequence[SnapshotPin], verified: bool) -> None:
        self._disk, self._author, self._pins, self._verified = disk, author, pins, verified

    def write_all(self, pulse: WritePulse) -> str:
        own_process_settings.yield_disk()
        self._disk.check_room(sum(pin.arena.image_bytes for pin in self._pins))
        for pin in self._pins:
            self._disk.write_state(self._author, pin, self._verified, pulse)
            pin.release()
        return ""


def _make_private(at: Path) -> Path:
    """Make a rank's folder and, if missing, the run's folder above, for this user only. Raises StorageError."""
    at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := _refuse_folder(at.parent):
        raise StorageError(f"{at.parent} is not used: {why}")
    at.mkdir(mode=0o700, exist_ok=True)
    return at


def _refuse_folder(folder: Path) -> str:
    """Return why a run's folder cannot be trusted; empty if only we can use it."""
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode):
        return "it is a symbolic link or a file"
    if seen.st_uid != os.getuid():
        return "it is another user's"
    return "other users may read or write it" if seen.st_mode & 0o077 else ""
