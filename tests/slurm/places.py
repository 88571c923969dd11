"""A Slurm fleet at a place, on the lab of this test process; its nodes are processes that only wait."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.fleet import slurm_fleet
from holdfast.fleet.local_process_fleet import node_processes
from holdfast.fleet.slurm_fleet import SlurmFleet, SlurmPlan
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from tests.slurm.lab import SlurmLab

LAB: list[SlurmLab] = []  # of this process, while it has one
_WAIT = ("/bin/sh", "-c", "exec sleep 3600", "node")
_fleets: dict[Path, SlurmFleet] = {}


def slurm(place: Path, *flags: str, allocation: int = 0, shared: bool = False) -> SlurmFleet:
    """A fleet whose nodes have hosts of their own, unless these may be shared."""
    [lab] = LAB
    flags = ("--time=30", *(() if shared else ("--exclusive",)), *flags)
    plan = SlurmPlan(run_id=place.name, flags=flags, allocation=allocation, leave_s=0.0, starts=_WAIT)
    env = {**os.environ, **lab.env, "PATH": f"{lab.bin}:{lab.env['PATH']}"}
    _fleets[place] = SlurmFleet(place, plan, env, mint=lambda name: f"token-of-{name}", epoch=lambda: 1)
    return _fleets[place]


def slurm_alive(place: Path, node: str) -> bool:
    """Whether a node's process is there. Between two looks the fleet is surveyed, as a controller does."""
    return bool(_survey(place)) and bool(waiting_processes(place, node))


def slurm_answers(place: Path, node: str) -> bool:
    """Whether Slurm still sees a node's host."""
    return _survey(place)[node].state is not FleetState.UNKNOWN


def _survey(place: Path) -> dict[str, FleetNode]:
    found: list[dict[str, FleetNode]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_fleets[place].survey())))
    thread.start()
    thread.join()
    return found[0]


def waiting_processes(place: Path, node: str) -> list[int]:
    """The processes of a node on its host, seen from here; its srun is none of them."""
    return [pid for pid in node_processes(place / slurm_fleet.FOLDER / node) if _name(pid) == "sleep"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def lose_slurm(place: Path, node: str) -> None:
    for pid in waiting_processes(place, node):
        os.kill(pid, 9)


def hold_slurm(place: Path, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep jobs in the queue until the returned function is called."""
    [lab] = LAB
    lab.call("scontrol", "update", "PartitionName=main", "State=DOWN")

    def let_go() -> None:
        lab.call("scontrol", "update", "PartitionName=main", "State=UP")

    return let_go


def refuse_slurm(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setitem(_fleets[place]._commands._env, "SBATCH_PARTITION", "nowhere")
    return "[Ii]nvalid partition"
