"""Starts a process for each device of the node, has them work together over NCCL or gloo, and reads their results."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from holdfast.agent.probes.probe_tools import accelerators
from holdfast.agent.system.child_last_line import read_last_line
from holdfast.core.incident.incident_text import describe_exit
from holdfast.decoding import from_json
from holdfast.model.probe_findings import Finding

NEEDS_S = 20.0  # mostly to import torch in every process, and for NCCL to connect them
LIMIT_S = 100.0
_LOOK_S = 0.05
_ECHO_S = 5.0  # for the others to say why they broke off, after one has ended badly
Line = TypeVar("Line")


class TeamSeat(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a team: the device it computes on, and the name that findings give to it."""

    place: str
    device: str
    env: Mapping[str, str] = {}  # besides ours


class TeamTask(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part in a team; the process gets it on its command line."""

    module: str  # of this package: its function `run_rank(task)` is run
    rank: int
    world: int
    port: int  # of the store, on this host
    device: str
    core: int = -1  # the only processor to run on; -1: any
    small: bool = False
    repeats: int = 1
    limit_s: float


class TeamError(Exception):
    """The team did not finish; the error says why, and which device seems to be at fault."""

    def __init__(self, place: str, why: str, *, is_fault: bool = True) -> None:
        super().__init__(why)
        self.place = place  # "": of nobody in particular
        self._is_fault = is_fault

    def to_finding(self, blank: Finding) -> Finding:
        return msgspec.structs.replace(blank, ok=False if self._is_fault else None, place=self.place, detail=str(self))


def team_refusal(seats: Sequence[TeamSeat], left_s: float) -> str:
    """Return why no team of these devices can be started in the time that is left; empty if a team can be started."""
    if len(seats) < 2:
        return "this node has fewer than two devices"
    return f"takes {NEEDS_S:g} s, and {left_s:.0f} s of the budget are left" if left_s < NEEDS_S else ""


def find_seats(*, cores: bool) -> list[TeamSeat]:
    """Return a seat for each GPU of the node; without GPUs, if `cores`, one for each processor."""
    if gpus := accelerators():
        return [TeamSeat(place=str(gpu), device=str(gpu)) for gpu in gpus]
    return [TeamSeat(place=f"cpu:{core}", device="cpu") for core in sorted(os.sched_getaffinity(0))] if cores else []


def run_team(seats: Sequence[TeamSeat], task: TeamTask, line: type[Line]) -> list[list[Line]]:
    """Run the task in a process for each seat; return each process's output, parsed as `line`s. Raises TeamError."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    team = [_RankProcess(seat, _seated_task(task, rank, seats, store.port)) for rank, seat in enumerate(seats)]
    try:
        _await_team(team, task.limit_s)
        return [[from_json(text, line) for text in one.read_output().splitlines()] for one in team]
    except msgspec.DecodeError as e:
        raise TeamError("", f"a process printed what is no finding: {e}") from None
    finally:
        for one in team:
            one.end()


def _seated_task(task: TeamTask, rank: int, seats: Sequence[TeamSeat], port: int) -> TeamTask:
    seat = seats[rank]
    core = int(seat.place.removeprefix("cpu:")) if seat.place.startswith("cpu:") else -1
    return msgspec.structs.replace(task, rank=rank, world=len(seats), port=port, device=seat.device, core=core)


def _await_team(team: Sequence["_RankProcess"], limit_s: float) -> None:
    """Wait until all processes end well. Raises TeamError, about one that failed or about all that ran too long."""
    until, failed = time.monotonic() + limit_s, None
    while running := [one for one in team if one.process.poll() is None]:
        failed = failed or next((one for one in team if one.process.returncode), None)
        if failed:
            until = min(until, time.monotonic() + _ECHO_S)
            failed = next((one for one in team if (one.process.returncode or 0) < 0), failed)
        if time.monotonic() > until:
            break
        time.sleep(_LOOK_S)
    broken = [one for one in team if one.process.returncode]
    # A signal is a cause; what others say is mostly that a neighbour has gone.
    failed = next((one for one in broken if one.process.returncode < 0), failed or next(iter(broken), None))
    if failed:
        raise TeamError(failed.seat.place, f"{failed.seat.place}: {failed.describe_end()}")
    if running:
        late = f"{', '.join(one.seat.place for one in running)} did not finish within {limit_s:g} s"
        # Imports alone may take that long on a busy node: only who had the whole time is at fault.
        raise TeamError("", late, is_fault=limit_s >= LIMIT_S)


class _RankProcess:
    def __init__(self, seat: TeamSeat, task: TeamTask) -> None:
        self.seat = seat
        # Not pipes, which fill up, nor files, as the disk may be what is wrong.
        self._out, self._words = os.memfd_create("holdfast-team"), os.memfd_create("holdfast-team-words")
        inside = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.agent.probes.probe_team_member", msgspec.json.encode(task).decode()],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._words,
            env={**os.environ, **inside, **seat.env},
        )

    def read_output(self) -> bytes:
        return os.pread(self._out, os.fstat(self._out).st_size, 0)

    def describe_end(self) -> str:
        code = self.process.returncode
        said = read_last_line(self._words) if code > 0 else ""
        return said or f"its process {describe_exit(code)}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._out)
        os.close(self._words)


def join_team(task: TeamTask) -> torch.device:
    """Join the process group of the whole team; return the device to compute on."""
    device = torch.device(task.device)
    if task.core >= 0:
        os.sched_setaffinity(0, {task.core})
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=task.limit_s)
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=limit)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.world, timeout=limit)
    return device
