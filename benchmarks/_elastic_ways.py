"""Ways in which survivors of a killed rank go on, each as documented: ours, torchft, NVIDIA's in-process restart."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks._harness import START_LIMIT_S, Job, executable, free_port, holdfast, is_listening

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
TORCHFT, INPROCESS = BUILD / "peers-torchft", BUILD / "peers-inprocess"  # where `make bench-elastic` puts them
SEATS = 4
NODES = ("--nnodes=2", "--nproc-per-node=2")
# torchft's replicas beat ten times a second. Ten missed beats, not the default fifty, and nobody who may still come is
# waited for, are what let it go on soonest without a false alarm here.
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000")
RESTARTS = "--max-restarts=100"
OURS, SPARES, RESTART, PLAIN = "holdfast", "holdfast, spare ranks", "holdfast, all restart", "plain"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way: how its job of four seats is started, and what is to be expected of it."""

    name: str
    script: Path
    start: Callable[[Job], None]
    spares: int = 0  # processes that say that they stand by, before anybody is killed
    refills: bool = True  # somebody takes the lost seat
    killed: bool = True  # False: nobody is killed, it is there for its steps


def list_ways() -> tuple[list[Way], dict[str, str]]:
    """Return the ways that are here, and why others are not."""
    ours = HERE / "_elastic_rank.py"
    found = [
        Way(name=OURS, script=ours, start=run_holdfast),
        Way(
            name=SPARES,
            script=ours,
            start=lambda job: run_holdfast(job, "--set=recovery.spares=true"),
            spares=SEATS,
        ),
        Way(
            name=RESTART,
            script=ours,
            start=lambda job: run_holdfast(job, "--set=recovery.survive_s=0"),
        ),
    ]
    skipped = {}
    if why := find_hindrance(TORCHFT, "torchft"):
        skipped["torchft"] = why
    else:
        script = HERE / "_elastic_torchft_rank.py"
        found += [
            Way(name="torchft", script=script, start=lambda job: run_torchft(job, SEATS)),
            Way(name="torchft, a spare", script=script, start=lambda job: run_torchft(job, SEATS + 1), spares=1),
        ]
    if why := find_hindrance(INPROCESS, "nvidia_resiliency_ext.inprocess"):
        skipped["in-process restart"] = why
    else:
        script = HERE / "_elastic_nvrx_rank.py"
        found += [
            Way(name="in-process", script=script, start=lambda job: run_inprocess(job, SEATS), refills=False),
            Way(name="in-process, a spare", script=script, start=lambda job: run_inprocess(job, SEATS + 1)),
        ]
    if executable("torchrun"):
        found.append(Way(name=PLAIN, script=HERE / "_elastic_plain_rank.py", start=run_plain, killed=False))
    else:
        skipped[PLAIN] = "there is no torchrun beside this python"
    return found, skipped


def find_hindrance(folder: Path, module: str) -> str:
    """Return why a package of others cannot be used here; empty if it can."""
    if not (folder / module.partition(".")[0]).exists():
        return f"it is not in {folder.name}, where `make bench-elastic` installs it if pip has it for this machine"
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=with_path(folder), capture_output=True, text=True, check=False
    )
    return f"it is not importable: {tried.stderr.strip().rpartition(chr(10))[2]}" if tried.returncode else ""


def with_path(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


def run_plain(job: Job) -> None:
    job.start([executable("torchrun"), "--standalone", f"--nproc-per-node={SEATS}"])


def run_holdfast(job: Job, *flags: str) -> None:
    job.start(holdfast(job.folder / "run", *NODES, *flags))


def run_torchft(job: Job, replicas: int) -> None:
    """A lighthouse, and for each replica a torchrun that starts it again when it dies."""
    port, env = free_port(), with_path(TORCHFT)
    job.spawn([str(TORCHFT / "bin" / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}", *LIGHTHOUSE], env)
    if job.wait(lambda: is_listening(port) or None, START_LIMIT_S) is None:
        raise RuntimeError(f"torchft's lighthouse did not start: {job.last_words(3)}")
    for number in range(replicas):
        told = {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(replicas)}
        launch = [executable("torchrun"), f"--master-port={free_port()}", "--nnodes=1", "--nproc-per-node=1", RESTARTS]
        job.start(launch, {**env, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", **told}, seats())


def run_inprocess(job: Job, world: int) -> None:
    """Processes as Slurm would start them, nothing above them: torchrun would end the others when one dies."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WRAPPER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        job.start([sys.executable], {**with_path(INPROCESS), **shared, **own}, seats())


def seats() -> Sequence[str]:
    return [f"--seats={SEATS}"]
