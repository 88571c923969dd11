"""Table 6: seconds from the alarm to the first step after it, beside a policy that probes every node first.

Real jobs of two nodes with standbys; the faults of machines come from folders, those of ranks from orders. What probing
first takes is ours and a probe of all nodes, as the same job makes it after a collective has timed out. It finds nobody
where no machine is to blame, and then has nothing more to do.
"""

import os
import statistics
from collections.abc import Callable

import msgspec

from benchmarks._byterobust_causes import STANDBYS, Machines
from benchmarks._byterobust_part import Part, spread
from benchmarks._detect_scene import RANKS, Scene
from benchmarks._exact_scene import records_of
from benchmarks._harness import Job
from benchmarks._report import FULL
from holdfast.core.record.solving_rungs import rung_of
from holdfast.model.incident_record import Record

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3" if FULL else "1"))  # jobs: a second time would be judged otherwise
PACES = ("health.gpu_s=1", "health.network_s=2", "health.kernel_s=0.5")  # what comes before the alarm is table 3
RANK = 3


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    published: str  # mean and most, and selective stress testing
    strike: Callable[[Scene, Machines, str], None]
    machine: bool  # a probe that finds what there is would find one


def _order(kind: str, error: str = "") -> Callable[[Scene, Machines, str], None]:
    def strike(scene: Scene, machines: Machines, node: str) -> None:
        with scene.order(kind, RANK, error=error) as id:
            scene.began(id, RANK)

    return strike


def _lose(scene: Scene, machines: Machines, node: str) -> None:
    scene.job.kill(int((scene.run_dir / f"nodes/{node}/holder.pid").read_text()))


def _gpu(reading: str) -> Callable[[Scene, Machines, str], None]:
    return lambda scene, machines, node: machines.set_gpu(node, reading)


CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"
HDFS = "HdfsError: Connection to namenode refused"
SYMPTOMS = (
    Symptom(name="CUDA error", published="93, 600; 518", strike=_order("fail", CUDA), machine=True),
    Symptom(
        name="IB error",
        published="60, 60; 288",
        strike=lambda scene, machines, node: machines.set_link(node, carrier=0),
        machine=True,
    ),
    Symptom(name="storage (HDFS) error", published="58, 65; INF", strike=_order("fail", HDFS), machine=False),
    Symptom(name="kernel panic", published="109, 120; 168", strike=_lose, machine=True),
    Symptom(name="NaN", published="4289, 7200; 7200", strike=_order("nan"), machine=True),
    Symptom(name="GPU memory error", published="10, 10; 600", strike=_gpu("ecc"), machine=True),
    Symptom(
        name="code or data error",
        published="57, 64; INF",
        strike=_order("fail", "ValueError: could not convert string to float: 'x'"),
        machine=False,
    ),
    Symptom(name="GPU unavailable", published="10, 10; 120", strike=_gpu("lost"), machine=True),
)


TIMED_OUT = (
    "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=44, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
PROBED = Symptom(name="collective timed out", published="", strike=_order("fail", TIMED_OUT), machine=False)


class Mended(msgspec.Struct, frozen=True, kw_only=True):
    symptom: str
    took_s: float
    rung: str
    probed_s: float = 0.0


def play(scene: Scene, machines: Machines, symptom: Symptom) -> Mended:
    scene.until(scene.has_standby, "a standby", 240.0)
    scene.steady(120.0)
    known, generation = len(records_of(scene.run_dir)), scene.generation()
    struck = scene.node_of()[RANK]
    symptom.strike(scene, machines, struck)
    record: Record = scene.until(lambda: records_of(scene.run_dir)[known:], f"the end of {symptom.name}", 240.0)[0]
    scene.steady(120.0, after=generation)
    machines.heal(struck)
    took_s = round(record.resumed_at - record.alarm_at, 2)
    print(f"  {symptom.name}: {took_s} s, {record.sentence}", flush=True)
    return Mended(symptom=symptom.name, took_s=took_s, rung=rung_of(record).value, probed_s=record.probed_s)


def mended() -> list[Mended]:
    with Job(RANKS) as job:
        scene, machines = Scene(job), Machines(job.folder / "machines")
        scene.start(*machines.flags(), *(f"--set={pace}" for pace in PACES), env=machines.env())
        scene.until(lambda: sum(v["role"] == "ready" for v in scene.status()["nodes"]) >= STANDBYS, "standbys", 240.0)
        return [play(scene, machines, symptom) for symptom in (*SYMPTOMS, PROBED)]


def symptoms() -> Part:
    part, found = Part(), [one for _ in range(ROUNDS) for one in mended()]
    probes = [one.probed_s for one in found if one.probed_s]
    probe_s = statistics.median(probes) if probes else None
    for symptom in SYMPTOMS:
        here = [one for one in found if one.symptom == symptom.name]
        took = [one.took_s for one in here]
        first = "never: no machine to find" if not symptom.machine else "not measured"
        if symptom.machine and probe_s:
            first = f"{statistics.median(took) + probe_s:.1f} s"
        ways = ", ".join(dict.fromkeys(one.rung for one in here))
        part.rows.append(
            (f"table 6: {symptom.name}", f"{spread(took)}, {ways}; probing first: {first}", symptom.published, "live")
        )
        key = symptom.name.replace(" ", "_").lower()
        part.figures |= {f"{key}_s": round(statistics.median(took), 2), f"{key}_rung": ways}
        part.runs[f"mended_s {symptom.name}"] = [one.took_s for one in here]
    part.figures["probe_of_every_node_s"] = probe_s and round(probe_s, 2)
    part.runs["probed_s"] = list(probes)
    return part.stamped()
