"""Table 3: seconds from a fault of a machine to the alarm that names it, with inspection and without.

A real job of two nodes with standbys; its machines are folders whose kernel log, links and GPU driver say what they are
told. Inspection has its default paces. Without it there is only what such a fault does to a rank: it stands.
"""

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks._byterobust_part import Part, spread
from benchmarks._detect_scene import RANKS, Failed, Named, Scene, at_random
from benchmarks._harness import Job
from benchmarks._report import FULL
from holdfast.chaos import hardware_faults
from holdfast.chaos.hardware_faults import LINES, NVML, READINGS
from holdfast.model.detector_alarm import Kind

TRIALS = int(os.environ.get("BENCH_ROUNDS", "2" if FULL else "1"))  # jobs, each with every cause once
STANDBYS, MACHINES = 3, 40
LIMIT_S = 120.0
APART_S = 45.0  # losses of links that are further apart are not taken for one: 1.5 times health.network_s
TIMEOUT_S = 20.0  # of a collective, where nothing else sees it; torch has 600 (NCCL) and 1,800 (gloo)
READ = (Kind.HEALTH, Kind.LINES)
# cause -> seconds with inspection and without, as published
PUBLISHED = {
    "OS kernel fault": ("2 s", "T_timeout"),
    "GPU lost": ("10 s", "T_timeout"),
    "GPU driver hang": ("10 s", "T_timeout"),
    "GPU high temperature": ("10 s", "T_monitor"),
    "NIC crash": ("30 s", "T_timeout"),
    "port flapping": ("30 s", "T_timeout"),
    "switch down": ("30 s x 2", "T_timeout"),
}
WORDS = {  # of the alarm about it
    "OS kernel fault": "uncorrected machine check",
    "GPU lost": "has lost GPU",
    "GPU driver hang": "has not answered",
    "GPU high temperature": "slows",
    "NIC crash": "has no link",
    "port flapping": "twice within five minutes",
    "switch down": "a switch",
}


class Machines:
    """Folders in which each node finds a kernel log, a link and a GPU of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = itertools.count(1)
        for number in range(MACHINES):
            (folder / f"n{number}/dev").mkdir(parents=True)
            (folder / f"n{number}/dev/kmsg").touch()
            (folder / f"n{number}/sys/class/net/eth0/device").mkdir(parents=True)
            self.set_link(f"n{number}", carrier=1)
            self.set_link(f"n{number}", carrier_down_count=0)

    def flags(self) -> list[str]:
        return [f"--standbys={STANDBYS}", f"--set=health.root={self.folder}/{{node}}"]

    def env(self) -> dict[str, str]:
        fakes = Path(hardware_faults.__file__).parent / "fakes"
        paths = [str(fakes), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        return {NVML: str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}

    def log_line(self, node: str, text: str) -> None:
        with (self.folder / node / "dev/kmsg").open("a") as log:
            log.write(f"3,{next(self._count)},{time.monotonic_ns() // 1000},-;{text}\n")

    def set_gpu(self, node: str, reading: str) -> None:
        _replace(self.folder / node / "nvml.json", json.dumps(READINGS[reading]))

    def set_link(self, node: str, **values: int) -> None:
        for name, value in values.items():
            _replace(self.folder / node / "sys/class/net/eth0" / name, f"{value}\n")

    def heal(self, node: str) -> None:
        """Mended while it was away: it may come back as a standby."""
        self.set_link(node, carrier=1)
        (self.folder / node / "nvml.json").unlink(missing_ok=True)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    cause: str
    seen_s: float | None
    right: bool


class Inspected:
    """One job, in which every cause strikes once, some of them at the same time on different nodes."""

    def __init__(self, scene: Scene, machines: Machines, chance: random.Random) -> None:
        self.scene, self.machines, self.chance = scene, machines, chance
        self._open: dict[str, tuple[float, tuple[str, ...]]] = {}
        self.found: list[Seen] = []

    def run(self) -> list[Seen]:
        machines = self.machines
        self._settle(STANDBYS)
        here, there = self._pair()
        self._strike("NIC crash", here, lambda node: machines.set_link(node, carrier=0))
        self._strike("GPU driver hang", there, lambda node: machines.set_gpu(node, "hung"))
        self._await("GPU driver hang")
        machines.set_gpu(there, "hot")  # its driver answers again
        self._began("GPU high temperature", there)
        self._await("NIC crash", "GPU high temperature")
        machines.heal(here)
        self._settle(1, after=1)
        here, there = self._pair()
        self._strike("port flapping", here, lambda node: machines.set_link(node, carrier_down_count=2))
        self._strike("GPU lost", there, lambda node: machines.set_gpu(node, "lost"))
        self._await("port flapping", "GPU lost")
        self._settle(1, after=2)
        here, _ = self._pair()
        self._strike("OS kernel fault", here, lambda node: machines.log_line(node, LINES["mce"]))
        self._await("OS kernel fault")
        self._settle(0, after=3)
        time.sleep(APART_S)  # else the link that flapped counts as one of those that the switch takes
        nodes = tuple(sorted(set(self.scene.node_of().values())))
        for node in nodes:
            machines.set_link(node, carrier=0)
        self._began("switch down", *nodes)
        self._await("switch down")
        return self.found

    def _settle(self, standbys: int, after: int = 0) -> None:
        """Until the job steps in a later generation than this one, on two nodes and with so many standbys, and still
        does a random time later."""
        while True:
            self.scene.steady(240.0, after)
            generation = self.scene.generation()
            self.scene.until(lambda: self._ready() >= standbys, "standbys", 240.0)
            at_random(self.chance, 10.0)
            if self.scene.generation() == generation and len(self._pair()) == 2:
                self.scene.alarms(READ)
                return

    def _ready(self) -> int:
        return sum(view["role"] == "ready" for view in self.scene.status().get("nodes", ()))

    def _pair(self) -> list[str]:
        nodes = list(dict.fromkeys(self.scene.node_of().values()))
        return self.chance.sample(nodes, len(nodes))

    def _strike(self, cause: str, node: str, strike: Callable[[str], None]) -> None:
        self._began(cause, node)
        strike(node)

    def _began(self, cause: str, *nodes: str) -> None:
        self._open[cause] = (time.time(), nodes)

    def _await(self, *causes: str) -> None:
        end = time.monotonic() + LIMIT_S
        while any(cause in self._open for cause in causes) and time.monotonic() < end:
            for alarm in self.scene.alarms(READ):
                self._on_alarm(alarm)
            time.sleep(0.05)
        for cause in causes:
            if self._open.pop(cause, None):
                self._note(Seen(cause=cause, seen_s=None, right=False))

    def _on_alarm(self, alarm: Named) -> None:
        """The cause that this is about: of those that strike, the one whose words it has."""
        for cause, (at, nodes) in self._open.items():
            if WORDS[cause] in alarm.reason:
                del self._open[cause]
                if not (right := alarm.nodes == nodes):
                    print(f"  struck {nodes}, but: {alarm.reason}", flush=True)
                self._note(Seen(cause=cause, seen_s=round(alarm.at - at, 2), right=right))
                return
        print(f"  besides: {alarm.reason}", flush=True)

    def _note(self, seen: Seen) -> None:
        print(f"  {seen.cause}: {seen.seen_s} s, {'right' if seen.right else 'WRONG'}", flush=True)
        self.found.append(seen)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.replace(path)


def inspected(seed: int) -> list[Seen]:
    with Job(RANKS) as job:
        scene, machines = Scene(job), Machines(job.folder / "machines")
        scene.start(*machines.flags(), env=machines.env())
        return Inspected(scene, machines, random.Random(seed)).run()


def uninspected(seed: int) -> dict[str, float | None]:
    """What sees it without inspection: a rank that stands and one that is slow, and with no such detector a timeout."""
    chance, found = random.Random(seed), dict[str, float | None]()
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start()
        for name, kind in (("slow", "slow"), ("stands", "sleep")):
            rank = chance.randrange(RANKS)
            scene.steady()
            scene.alarms()
            with scene.order(kind, rank, times=1.5) as id:
                found[name] = _first_alarm(scene, scene.began(id, rank), Kind.SLOW if kind == "slow" else Kind.HANG)
    with Job(RANKS) as job:
        scene = Scene(job)
        scene.start("--set=hang.stance=observe", timeout_s=TIMEOUT_S)
        rank = chance.randrange(RANKS)
        with scene.order("sleep", rank) as id:
            found["timeout"] = _first_alarm(scene, scene.began(id, rank), Kind.CRASH)
        scene.signal(rank, signal.SIGKILL) if job.owns(scene.page(rank).pid) else None
    print(f"  without inspection: {found}", flush=True)
    return found


def _first_alarm(scene: Scene, at: float, kind: Kind) -> float | None:
    try:
        return round(scene.until(lambda: scene.alarms((kind,)), f"an alarm of {kind}", LIMIT_S)[0].at - at, 2)
    except Failed:
        return None


def causes() -> Part:
    part = Part()
    seen = [one for seed in range(TRIALS) for one in inspected(seed)]
    without = [uninspected(seed) for seed in range(TRIALS)]
    stands, slow, timed = ([t for one in without if (t := one[name])] for name in ("stands", "slow", "timeout"))
    for cause, (inspection, none) in PUBLISHED.items():
        took = [one.seen_s for one in seen if one.cause == cause]
        known = [s for s in took if s is not None]
        right = sum(one.right for one in seen if one.cause == cause)
        instead = f"slow rank named {spread(slow)}" if none == "T_monitor" else f"hang named {spread(stands)}"
        ours = f"{spread(known)}, {right} of {len(took)} right; without: {instead}"
        part.rows.append((f"table 3: {cause}", ours, f"{inspection}; without: {none}", "fake machine, real job"))
        key = cause.replace(" ", "_").lower()
        part.figures |= {f"{key}_s": max(known, default=None), f"{key}_right": right, f"{key}_trials": len(took)}
        part.runs[f"seen_s {cause}"] = took
    said = f"after {spread(timed)} with a timeout of {TIMEOUT_S:g} s"
    part.rows.append(("table 3: no inspection, no hang detector", said, "T_timeout: 10 or 30 min", "scaled timeout"))
    part.runs |= {"hang_named_s": list(stands), "slow_named_s": list(slow), "timeout_s": list(timed)}
    part.goals["table 3: every cause named, and the right node"] = all(one.right for one in seen)
    return part.stamped()
