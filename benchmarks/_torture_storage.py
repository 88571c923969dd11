"""Storage fails while training goes on: what that does to the steps, and to a rank that is killed meanwhile."""

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil

from benchmarks._harness import Job, holdfast
from benchmarks._torture_scene import KEEP_NODES, SCRIPT, Failed, Scene
from holdfast.chaos import faulty_storage
from holdfast.checkpoint import stored_checkpoints

RANKS = 2
ROOT = Path(__file__).parents[1]
FLAGS = ["--nnodes=2", "--nproc-per-node=1", *KEEP_NODES]
WIDTH, WORK = 8192, 6  # 13 MB of state, steps of some tens of milliseconds
WARM_STEPS = 300  # what is bought once, buffers and imports, is bought by then
SAMPLES, SAMPLE_S = 40, 0.1  # of a process's memory; the least counts, as each step takes some and gives it back
PAIRS, WINDOW_S = 8, 3.0  # of fault and calm: what else disturbs steps here lasts longer than both


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what it did to the steps, and what a SIGKILL at its end cost."""

    fault: str
    seconds: float  # in one piece
    ratio: float  # median step with it over that without
    error: float  # standard error of the ratio
    steps: int  # that were compared
    lost: int  # steps
    source: str
    said: bool
    back_s: float  # until a checkpoint was published again


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process, over so many saves."""

    who: str
    saves: int
    memory_bytes: int  # of no file
    files: int
    threads: int


class Study:
    """One job, whose storage fails when told to."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.work = job.folder / "work"
        self.work.mkdir()
        self.store = self.work / "store"
        self.control = job.folder / "control"
        self.control.write_text("ok")
        self.scene = Scene(self.work, job.folder / "run", RANKS, lambda: job.launchers[0].poll() is None)
        faulty_storage.register_in(job.folder / "site")
        path = os.pathsep.join([str(job.folder / "site"), str(ROOT)])
        told = [str(self.work), f"--width={WIDTH}", f"--work={WORK}", "--every=40"]
        launch = [*holdfast(self.scene.run_dir, *FLAGS), str(SCRIPT), *told, f"--store=faulty://{self.store}"]
        job.spawn(launch, {"PYTHONPATH": path, faulty_storage.CONTROL: str(self.control)})
        self.scene.trains(1, steps=WARM_STEPS)

    # --- steps -------------------------------------------------------------------------------------------------

    def outage(self, fault: str, seconds: float) -> Outage:
        """First in short windows, turn by turn with calm ones, for the steps' sake; then so long, with a SIGKILL."""
        scene = self.scene
        words = len(self.said())
        ratio, error, steps = self._slowed(fault)
        self.control.write_text(fault)
        time.sleep(seconds)
        struck = scene.strike(1)
        came = scene.came(struck, time.monotonic())
        self.control.write_text("ok")
        healed_at = time.monotonic()
        scene.until(lambda: self._published() > struck.reached, "a checkpoint after the outage", 180.0)
        back_s = time.monotonic() - healed_at
        scene.trains(scene.generation(), steps=10)
        return Outage(
            fault=fault,
            seconds=seconds,
            ratio=round(ratio, 4),
            error=round(error, 4),
            steps=steps,
            lost=max(0, struck.reached - came.step),
            source=" ".join(came.sources),
            said="training goes on" in self.said()[words:],
            back_s=round(back_s, 1),
        )

    def _slowed(self, fault: str) -> tuple[float, float, int]:
        """Median step with the fault over that in the calm before and after it, its standard error, and how many."""
        edges = [time.time()]
        for turn in range(2 * PAIRS + 1):
            self.control.write_text(fault if turn % 2 else "ok")
            time.sleep(WINDOW_S)
            edges.append(time.time())
        self.control.write_text("ok")
        windows = [self._steps(start, end) for start, end in pairwise(edges)]
        medians = [statistics.median(window) for window in windows]
        ratios = [medians[at] / statistics.mean((medians[at - 1], medians[at + 1])) for at in range(1, 2 * PAIRS, 2)]
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # 1.25: of a median, if all is normal
        return statistics.median(ratios), error, sum(map(len, windows))

    def said(self) -> str:
        return (self.job.folder / "launcher0.log").read_text(errors="replace")

    def _published(self) -> int:
        """The newest step that is there as a checkpoint."""
        return max((one.step for one in stored_checkpoints.find_checkpoints(str(self.store)) if one.ok), default=0)

    def _steps(self, start: float, end: float) -> list[float]:
        """How long the steps of rank 0 took that ended between these instants."""
        lines = [line for line in self.scene.lines(0) if "took_s" in line and start <= float(str(line["at"])) < end]
        if not lines:
            raise Failed(f"no step was made in {WINDOW_S:g} s")
        return [float(str(line["took_s"])) for line in lines]

    # --- memory ------------------------------------------------------------------------------------------------

    def grown(self, saves: int) -> list[Grown]:
        """What each process of the job has more of after so many saves."""
        before = self._weighed()
        first = self.scene.reached()
        self.scene.until(lambda: self.scene.reached() >= first + saves, f"{saves} saves", 300.0)
        after = self._weighed()
        made = self.scene.reached() - first
        grown = []
        for who, was in before.items():
            memory_bytes, files, threads = (now - then for now, then in zip(after[who], was, strict=True))
            grown.append(Grown(who=who, saves=made, memory_bytes=memory_bytes, files=files, threads=threads))
        return grown

    def _weighed(self) -> dict[str, tuple[int, int, int]]:
        least = self._weights()
        for _ in range(SAMPLES):
            time.sleep(SAMPLE_S)
            for who, weight in self._weights().items():
                memory_bytes, files, threads = (min(pair) for pair in zip(least[who], weight, strict=True))
                least[who] = (memory_bytes, files, threads)
        return least

    def _weights(self) -> dict[str, tuple[int, int, int]]:
        found: dict[str, tuple[int, int, int]] = {}
        for node, pid in self.scene.holders():
            for child in psutil.Process(pid).children(recursive=True):
                if "holdfast.agent.main" in child.cmdline():
                    found[f"agent of {node.name}"] = _weight(child)
        for rank in self.scene.ranks:
            found[f"rank {rank}"] = _weight(psutil.Process(self.scene.look(rank).pid))
        return found

    def kept(self) -> float:
        """Memory of all slots over the bytes of the state in them."""
        arena = self.scene.arena(0)
        return len(arena.memory) / arena.image_bytes / arena.slots * 2


def _weight(process: psutil.Process) -> tuple[int, int, int]:
    # Not what is the process's alone: a rank shares pages with the zygote, and has them alone once that has ended.
    status = Path(f"/proc/{process.pid}/status").read_text()
    anonymous = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(anonymous), process.num_fds(), process.num_threads()


def storage(outages: list[tuple[str, float]], saves: int) -> tuple[list[Outage], list[Grown], float]:
    """A job that goes through these outages, each with its seconds; what grew over so many saves; and `kept`."""
    with Job(RANKS, SCRIPT) as job:
        study = Study(job)
        grown = study.grown(saves)
        found = []
        for fault, seconds in outages:
            found.append(study.outage(fault, seconds))
            print(f"  {found[-1]}", flush=True)
        kept = study.kept()
        (study.work / "finish").touch()
        if job.launchers[0].wait(60.0) != 0:
            raise Failed(f"the job did not end well:\n{job.last_words()}")
        return found, grown, kept
