"""Somebody who looks at a rank's snapshots all the time, pinned and unpinned: none may be torn, none stale."""

import mmap
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks._harness import Job, holdfast
from benchmarks._torture_mutate import TENSORS, WORDS
from benchmarks._torture_scene import Failed, Scene
from holdfast.checkpoint.arena import Arena, SealedSnapshot

SCRIPT = Path(__file__).with_name("_torture_mutate.py")


class Seen(msgspec.Struct, kw_only=True):
    saves: int = 0
    skipped: int = 0
    looks: int = 0  # at snapshots that stayed while they were read
    moved: int = 0  # looks that a newer snapshot overtook, as the header told
    judged: int = 0  # times that the newest snapshot was held against the last save that had returned
    torn: int = 0
    stale: int = 0


class Watcher:
    """Reads as the keeper does, by pin, and as somebody who only compares the header before and after."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.seen = Seen()
        self._runs: list[slice] = []

    def look(self, promised: int, *, pins: bool) -> None:
        """`promised`: the step of the last save that had returned before this look began."""
        before = self._seqs()
        found = self.arena.list_sealed()
        # Between looks at one slot and the next one much can happen. And while others are pinned, the newest may be
        # written anew, so that an older one is all there is until that is done.
        if before == self._seqs() and not (pins and any(seq % 2 for seq in before)):
            self.seen.judged += 1
            self.seen.stale += not found or found[0].step < promised
        for turn, one in enumerate(found[:2]):
            self._read(one, pinned=pins and bool((self.seen.looks + turn) % 2))

    def _seqs(self) -> list[int]:
        return [self.arena.slot_seq(slot) for slot in range(self.arena.slots)]

    def _read(self, one: SealedSnapshot, *, pinned: bool) -> None:
        if pinned and not self.arena.pin(one.slot, one.seq):
            self.seen.moved += 1
            return
        image = self.arena.slot_image(one.slot)
        words = np.frombuffer(image[: len(image) // 4 * 4], dtype=np.int32).copy()
        stayed = self.arena.slot_seq(one.slot) == one.seq
        if pinned:
            self.arena.unpin(one.slot)
        if not stayed:
            self.seen.moved += 1
            self.seen.torn += pinned  # the pin should have kept the writer away
            return
        self.seen.looks += 1
        self._runs = self._runs or _runs(words, one.step)
        if not all((words[run] == one.step).all() for run in self._runs):
            self.seen.torn += 1


def _runs(words: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]", step: int) -> list[slice]:
    """Where the tensors lie: long stretches of nothing but the step."""
    same = np.concatenate(([False], words == step, [False]))
    edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
    runs = [slice(int(start), int(end)) for start, end in edges if end - start >= WORDS]
    if len(runs) != TENSORS:
        raise Failed(f"of {TENSORS} tensors {len(runs)} were found whole in the first snapshot")
    return runs


def looks(saves: int) -> Seen:
    """One rank under holdfast, so many saves in a row."""
    with Job(1, SCRIPT) as job:
        run_dir = job.folder / "run"
        told = [f"--folder={job.folder}", f"--saves={saves}"]
        launcher = job.spawn([*holdfast(run_dir, "--nproc-per-node=1"), str(SCRIPT), *told])
        scene = Scene(job.folder, run_dir, 1, lambda: launcher.poll() is None)
        path = job.folder / "promised"
        scene.until(lambda: path.exists() and path.stat().st_size, "the first save")
        with path.open("rb") as file:
            promised = memoryview(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)).cast("q")
        scene.until(lambda: promised[0] > 0, "the first save")
        watcher = Watcher(scene.arena(0))
        while launcher.poll() is None and not promised[1]:
            watcher.look(promised[0], pins=promised[0] > saves / 2)
            time.sleep(0)
        if launcher.wait(60.0) != 0:
            raise Failed(f"the job did not end well:\n{job.last_words()}")
        watcher.seen.saves, watcher.seen.skipped = saves, promised[1]
        return watcher.seen
