"""Aggregation of stacks: a random rank of a random machine stands in a job of TP 8, PP 8, DP 150, and live with TP 2.

Whatever stands keeps its pipeline in sends and receives, its tensor group in a collective, and all other pipelines in
the sum of the gradients. Right is an answer that has the machine at fault and nobody outside of its pipeline.
"""

import random
import statistics
import time
from pathlib import Path

import msgspec

from benchmarks._byterobust_part import Part
from benchmarks._detect_hangs import KINDS as LIVE_KINDS
from benchmarks._detect_hangs import Hangs, Trial, said
from benchmarks._detect_scene import RANKS, Scene
from benchmarks._harness import Job
from benchmarks._report import FULL
from holdfast.core.diagnose.blocking_ranks import BlockingRanks, find_blocking
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace

TP, PP, DP, DEPTH = 8, 8, 150, 40
NODES = PP * DP
MESH = (("pp", PP), ("dp", DP), ("tp", TP))
TRIALS = 200 if FULL else 50
LIVE = 10 if FULL else 4
LIVE_RANK = Path(__file__).with_name("_byterobust_rank.py")
KINDS = ("user code", "user code, no recorder", "in its kernel", "in its kernel, no recorder", "stopped", "no answer")
C10D = "torch/distributed/distributed_c10d.py"
WHERE = {
    "sum": ("reduce_scatter_tensor", C10D),
    "tensor": ("all_gather_into_tensor", C10D),
    "send": ("isend", C10D),
    "receive": ("irecv", C10D),
    "code": ("load", "/opt/job/train.py"),
}


def node_of(stage: int, replica: int) -> int:
    return stage * DP + replica


def process(node: int, rank: int, where: str, state: str = "S") -> Process:
    frames = [
        Frame(f"forward_{n}", f"/opt/env/lib/python3.11/site-packages/torch/nn/{n}.py", n) for n in range(DEPTH - 1)
    ]
    last = Frame(*WHERE[where], 3252)
    return Process(
        node=f"n{node}", rank=rank, pid=100 + rank, state=state, threads=(Thread(main=True, frames=(*frames, last)),)
    )


def flight(node: int, rank: int, where: str) -> Flight:
    """What torch's recorder tells: of collectives all, of messages between two ranks nothing."""
    summed, gathered = where == "sum", where == "tensor"
    groups = (
        Collective(group=f"dp{node // DP}-{rank % TP}", entered=77 + summed, completed=77, op="reduce_scatter"),
        Collective(group=f"tp{node}", entered=499 + gathered, completed=499, op="all_gather"),
    )
    return Flight(node=f"n{node}", rank=rank, groups=groups)


def trace(node: int, wheres: list[str], states: str = "S" * TP) -> Trace:
    """As it comes off the wire: no two equal stacks are the same object."""
    ranks = range(node * TP, (node + 1) * TP)
    made = Trace(
        node=f"n{node}",
        at=1.0,
        processes=tuple(process(node, r, w, s) for r, w, s in zip(ranks, wheres, states, strict=True)),
        flights=tuple(flight(node, r, w) for r, w in zip(ranks, wheres, strict=True)),
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Trace)


def standing(kind: str, stage: int, replica: int, local: int) -> list[Trace]:
    """The traces of one pipeline in which one rank stands."""
    found = []
    for other in range(PP):
        node = node_of(other, replica)
        if other != stage:
            found.append(trace(node, ["receive" if other > stage else "send"] * TP))
        elif kind.startswith("in its kernel"):
            found.append(trace(node, ["tensor"] * TP))
        elif kind == "no answer":
            found.append(Trace(node=f"n{node}", at=1.0, error="no answer within 10 s"))
        else:
            wheres = ["code" if one == local else "tensor" for one in range(TP)]
            states = "".join("T" if kind == "stopped" and one == local else "S" for one in range(TP))
            found.append(trace(node, wheres, states))
    if kind.endswith("no recorder"):
        found = [msgspec.structs.replace(one, flights=()) for one in found]
    return found


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.healthy = [trace(node, ["sum"] * TP) for node in range(NODES)]
        self.mute = [msgspec.structs.replace(one, flights=()) for one in self.healthy]
        self.seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i * TP, nproc=TP) for i in range(NODES))

    def trial(self, kind: str) -> tuple[bool, bool, int, float]:
        """Whether the right group was found, and the machine alone; how many nodes; seconds."""
        stage, replica, local = (self.chance.randrange(most) for most in (PP, DP, TP))
        traces = list(self.mute if kind.endswith("no recorder") else self.healthy)
        for one, found in zip(range(PP), standing(kind, stage, replica, local), strict=True):
            traces[node_of(one, replica)] = found
        began = time.perf_counter()
        answer: BlockingRanks = find_blocking(traces, self.seats, MESH)
        took_s = time.perf_counter() - began
        pipeline = {f"n{node_of(one, replica)}" for one in range(PP)}
        bad = f"n{node_of(stage, replica)}"
        right = bad in answer.wide and pipeline.issuperset(answer.wide)
        if not right:
            print(f"  WRONG, {kind}: {answer.reason}", flush=True)
        return right, answer.wide == (bad,), len(answer.wide), took_s


def live_trials() -> list[Trial]:
    """Hangs in a real job whose nodes are tensor groups and whose pipeline goes across them."""
    chance = random.Random(1)
    kinds = [kind for kind in LIVE_KINDS if kind not in ("deadlock", "mismatch")]
    with Job(RANKS) as job:
        scene = Scene(job, LIVE_RANK)
        # The kills that undo hangs are the same failure again and again, and would be probed for.
        scene.start("--standbys=1", "--mesh=pp=2,tp=2", "--set=probe.allow=false")
        trials = []
        for number in range(LIVE):
            trials.append(Hangs(scene, chance).trial(kinds[number % len(kinds)]))
            said(trials[-1])
    return trials


def groups() -> Part:
    part, world = Part(), World(1)
    found = {kind: [world.trial(kind) for _ in range(TRIALS // len(KINDS) + 1)] for kind in KINDS}
    for kind, trials in found.items():
        right, alone = sum(one[0] for one in trials), sum(one[1] for one in trials)
        ms = [1000 * one[3] for one in trials]
        named = statistics.mean(one[2] for one in trials)
        ours = (
            f"{right} of {len(trials)} right, {alone} the machine alone, {named:.1f} nodes named, "
            f"{statistics.median(ms):.0f} ms (at most {max(ms):.0f})"
        )
        part.rows.append((f"9,600 ranks, TP 8 PP 8 DP 150: {kind}", ours, "the pipeline: 8 machines", "made-up stacks"))
        key = kind.replace(" ", "_").replace(",", "")
        part.figures |= {f"{key}_trials": len(trials), f"{key}_right": right, f"{key}_machine_alone": alone}
        part.figures |= {f"{key}_ms": round(statistics.median(ms), 1)}
    part.goals["aggregation: the right group in 95 % of trials"] = sum(
        one[0] for trials in found.values() for one in trials
    ) >= 0.95 * sum(map(len, found.values()))
    return part.stamped()


def hangs() -> Part:
    part, trials = Part(), live_trials()
    right = sum(one.right for one in trials)
    took = [one.named_s for one in trials if one.named_s is not None]
    after = f"named after {statistics.median(took):.1f} s (at most {max(took):.1f})" if took else "never named"
    part.rows.append(
        ("live, 4 ranks, TP 2 PP 2 on 2 nodes", f"{right} of {len(trials)} right, {after}", "not told", "gloo")
    )
    part.figures |= {"live_trials": len(trials), "live_right": right}
    part.runs["live_named_s"] = [one.named_s for one in trials]
    return part.stamped()
