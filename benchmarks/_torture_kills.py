"""Rounds of SIGKILLs in one running job of four ranks on two nodes; every step of it is held against a calm run."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from benchmarks._harness import Job, holdfast
from benchmarks._torture_scene import KEEP_NODES, SCRIPT, Failed, Scene, Struck, at_random, differing
from holdfast.chaos import faulty_storage
from holdfast.checkpoint import checkpoint_reader, stored_checkpoints

RANKS = 4
STRETCH_S = 0.006
FLAGS = ["--nnodes=2", "--nproc-per-node=2", *KEEP_NODES]
# What is struck, and when. A rank in each part of a step and a save; "any": at a moment drawn from a whole step. A
# rank, and a keeper, while a part is written to storage or a manifest is published; the same while a snapshot is copied
# to the peer. A rank of the generation that restores after another kill. Two ranks of two nodes at once.
KINDS = "train copy copied sealed any write publish backup restore pair".split()
KINDS += [f"keeper-{kind}" for kind in ("write", "publish", "backup")]
ROOT = Path(__file__).parents[1]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One SIGKILL, or two: what was hit, and how the job came back."""

    kind: str
    phases: tuple[str, ...]  # of the ranks that were killed, as seen while they stood
    sealed: int  # newest step that all ranks had sealed before
    reached: int  # newest step that all ranks had made before
    step: int  # from which all went on
    sources: tuple[str, ...]
    took_s: float
    held: dict[int, list[int]] = {}  # more than a step was lost: of which steps each rank had a whole snapshot
    fault: str = ""  # empty: restored as it should be

    @property
    def lost(self) -> int:
        """Steps that all ranks had made, and must make again."""
        return max(0, self.reached - self.step)


class Round:
    """One job: strikes, then the calm run beside which it is judged."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.job = job
        self.rng = rng
        self.work = job.folder / "work"
        self.store = self.work / "store"
        self.control = job.folder / "marks" / "control"
        self.scene = Scene(self.work, job.folder / "run", RANKS, lambda: job.launchers[0].poll() is None)
        for folder in (self.work, self.control.parent):
            folder.mkdir()

    def start(self) -> None:
        faulty_storage.register_in(self.job.folder / "site")
        self.control.write_text("slow")
        path = os.pathsep.join([str(self.job.folder / "site"), str(ROOT)])
        env = {"PYTHONPATH": path, faulty_storage.CONTROL: str(self.control)}
        told = [str(self.work), f"--stretch-s={STRETCH_S}", f"--store=faulty://{self.store}", "--every=20"]
        self.job.spawn([*holdfast(self.scene.run_dir, *FLAGS), str(SCRIPT), *told], env)
        self.scene.trains(1)

    def trial(self, kind: str) -> Trial:
        scene = self.scene
        scene.trains(scene.generation(), steps=3)
        for mark in self.control.parent.glob("*ing*"):
            mark.unlink(missing_ok=True)  # left by a keeper that was killed
        since = time.monotonic()
        struck = self._strike(kind)
        came = scene.came(struck, since)
        fault = ""
        if came.step < struck.sealed:
            fault = f"went on from step {came.step}, and step {struck.sealed} was sealed by all: {struck.held}"
        return Trial(
            kind=kind,
            phases=tuple(look.phase for look in struck.looks.values()),
            sealed=struck.sealed,
            reached=struck.reached,
            step=came.step,
            sources=came.sources,
            took_s=round(came.took_s, 3),
            held=struck.held if came.step < struck.reached - 1 else {},
            fault=fault or self._torn_on_storage(),
        )

    def _strike(self, kind: str) -> Struck:
        scene, rank = self.scene, self.rng.randrange(RANKS)
        match kind:
            case "train" | "copy" | "copied" | "sealed":
                scene.await_phase(rank, kind)
                at_random(self.rng, STRETCH_S / 2)
                return scene.strike(rank)
            case "any":
                at_random(self.rng, 0.2)
                return scene.strike(rank)
            case "pair":
                at_random(self.rng, 0.2)
                return scene.strike(rank % 2, 2 + self.rng.randrange(2))
            case "restore":
                first = scene.strike(rank)
                scene.until(lambda: scene.generation() > first.generation, "another generation")
                other = self.rng.randrange(RANKS)
                scene.until(lambda: scene.look(other).generation > first.generation, f"rank {other} anew")
                scene.await_phase(other, "restore", 2.0)
                at_random(self.rng, 3 * STRETCH_S)
                second = scene.strike(other)
                return msgspec.structs.replace(second, sealed=max(first.sealed, second.sealed))
            case "backup" | "keeper-backup":
                return self._strike_copying(kind, rank)
            case _:
                return self._strike_writing(kind, rank)

    def _strike_writing(self, kind: str, rank: int) -> Struck:
        """While storage is being written: a rank, whose part it is, or the keeper that writes it."""
        publishing = kind.endswith("publish")
        rank = 0 if publishing else rank
        mark = self.control.with_name("publishing" if publishing else f"writing-{rank}")
        self._await(mark.exists)
        at_random(self.rng, faulty_storage.SLOW_S if publishing else 3 * faulty_storage.SLOW_S)
        if kind.startswith("keeper"):
            self._kill_keeper(rank)
            at_random(self.rng, 0.2)
            self._await(lambda: self.scene.look(rank).phase == "train")
        return self.scene.strike(rank)

    def _strike_copying(self, kind: str, rank: int) -> Struck:
        """While two snapshots of a rank are held: the floor, and the one that is on its way to the peer."""
        arena = self.scene.arena(rank)
        self._await(lambda: arena.count_pinned() > 1)
        if kind.startswith("keeper"):
            self._kill_keeper(rank)
            self._await(lambda: self.scene.look(rank).phase == "train")
        return self.scene.strike(rank)

    def _kill_keeper(self, rank: int) -> None:
        _, holder = self.scene.holder_of(rank)
        agent = _agent(holder)
        agent.send_signal(signal.SIGKILL)
        self.scene.until(lambda: (found := _agent_or_none(holder)) and found.pid != agent.pid, "another agent")

    def _await(self, look: Callable[[], bool], limit_s: float = 90.0) -> None:
        end = time.monotonic() + limit_s
        while not look():
            if time.monotonic() > end:
                raise Failed("storage was not written in time")
            time.sleep(0.0005)

    def _torn_on_storage(self) -> str:
        """What is wrong with the newest published checkpoint: whatever else was written half does not count as one."""
        found = [one for one in stored_checkpoints.find_checkpoints(str(self.store)) if one.ok][:1]
        return "; ".join(why for one in found for why in checkpoint_reader.verify_checkpoint(one.url))

    def judged(self) -> dict[str, int]:
        """End the job, run it once more with nobody striking, and count what differs."""
        (self.work / "finish").touch()
        if self.job.launchers[0].wait(60.0) != 0:
            raise Failed(f"the job did not end well:\n{self.job.last_words()}")
        lines = {rank: list(self.scene.lines(rank)) for rank in self.scene.ranks}
        last = max(int(str(line["step"])) for found in lines.values() for line in found if "step" in line)
        calm = Scene(self.job.folder / "calm", self.job.folder / "calm-run", RANKS)
        calm.folder.mkdir()
        told = [str(calm.folder), f"--steps={last}"]
        if self.job.spawn([*holdfast(calm.run_dir, *FLAGS), str(SCRIPT), *told]).wait(600.0) != 0:
            raise Failed(f"the undisturbed run did not end well:\n{self.job.last_words()}")
        wrong = [step for rank in self.scene.ranks for step in differing(lines[rank], calm.lines(rank))]
        compared = sum("digest" in line for found in lines.values() for line in found)
        return {"steps": last, "compared": compared, "differing": len(wrong)}


def _agent_or_none(holder: int) -> psutil.Process | None:
    for child in psutil.Process(holder).children():
        try:
            if "holdfast.agent.main" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return child
        except psutil.Error:  # it has just ended
            continue
    return None


def _agent(holder: int) -> psutil.Process:
    if found := _agent_or_none(holder):
        return found
    raise Failed(f"holder {holder} has no agent")


def kills(kinds: list[str], seed: int) -> tuple[list[Trial], dict[str, int]]:
    """One round: these strikes in a row, then how many states of all ranks and steps were compared, and differed."""
    with Job(RANKS, SCRIPT) as job:
        one = Round(job, random.Random(seed))
        one.start()
        trials = []
        for kind in kinds:
            trials.append(one.trial(kind))
            print(f"  {kind}: {trials[-1]}", flush=True)
        return trials, one.judged()
