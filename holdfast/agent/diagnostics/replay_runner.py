"""Runs this node's ranks of a replay: starts the job's own script in processes that only this errand uses."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from holdfast.core.incident.incident_text import describe_exit
from holdfast.linux.regular_files import read_start
from holdfast.model.node_errands import ReplayHere
from holdfast.model.replay_task import ReplayResult
from holdfast.wire import replay_environment
from holdfast.wire.rank_memory import slot_reader
from holdfast.wire.run_and_node_specs import EntryPoint

_LOOK_S = 0.1
_TOLD_BYTES = 64 << 20  # of a rank's signatures
_LINGER_S = 0.5  # for others to have received what a rank that is done has sent
_APART = ("HOLDFAST_KEEPER", "HOLDFAST_FLIGHT", "HOLDFAST_IMPORTS", "HOLDFAST_MESH")  # training's own

Environment = Callable[[int], dict[str, str]]  # of a rank, by its number on this node


class ReplayRank:
    """One rank of a replay: its process, its progress and its result."""

    def __init__(self, rank: int, steps: int, told: str, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self.marks: dict[int, int] = {}
        self.signed: dict[int, int] = {}
        self.bad_step = -1
        self.done = False
        self.ending = "did not finish in time"
        self._steps = steps
        self._told = told  # the file with what it signed

    @property
    def is_over(self) -> bool:
        return self.done or self.bad_step >= 0 or self.process.returncode is not None

    def read_progress(self, arena: memoryview, index: int) -> None:
        with contextlib.suppress(OSError):
            for step, state, sent in replay_environment.decode_signatures(read_start(Path(self._told), _TOLD_BYTES)):
                self.marks[step] = state
                if sent is not None:
                    self.signed[step] = sent
        reading = slot_reader.read_slot(arena, index)
        if reading is None:
            return
        self.bad_step = reading.first_bad_step
        stepped = reading.step - reading.first_step + 1 if reading.first_step >= 0 else 0
        self.done = self.done or max(stepped, len(self.marks)) >= self._steps or self.process.returncode == 0

    def make_result(self) -> ReplayResult:
        failed = not self.done and self.bad_step < 0
        marks = {step: self.marks[step] for step in sorted(self.marks)[: self._steps]}
        return ReplayResult(
            rank=self.rank,
            ended=self.done,
            failed=failed,
            bad_step=self.bad_step,
            marks=marks,
            signed={step: self.signed[step] for step in marks if step in self.signed},
            detail=self.ending if failed else "",
        )

    def kill(self) -> None:
        """Kill the rank's process group. If the rank has already ended, note its exit code first."""
        if self.process.returncode is not None:
            self.ending = describe_exit(self.process.returncode)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def run_replay(
    errand: ReplayHere, entry: EntryPoint, folder: Path, environment: Environment
) -> tuple[ReplayResult, ...]:
    """Run this node's ranks until all finish, one fails or time is up. Then end them all and return their results."""
    seat = errand.launch.seat
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file, contextlib.ExitStack() as logs:
        os.truncate(file.fileno(), seat.nproc * slot_reader.SLOT_BYTES)
        arena = slot_reader.open_slot_memory(f"/proc/self/fd/{file.fileno()}")
        players: list[ReplayRank] = []
        try:
            for local in range(seat.nproc):
                rank = seat.first_rank + local
                own = _replay_environment(environment(local), errand, file, local, folder)
                log = logs.enter_context((folder / f"rank-{rank}.log").open("wb"))
                process = await _start_rank(entry, own, log)
                players.append(
                    ReplayRank(rank, errand.replay.steps, replay_environment.signature_path(str(folder), rank), process)
                )
            await _watch_ranks(players, memoryview(arena), errand.within_s)
        finally:
            for player in players:
                player.kill()
            for player in players:
                await player.process.wait()
        for index, player in enumerate(players):
            player.read_progress(memoryview(arena), index)
    return tuple(player.make_result() for player in players)


def _replay_environment(
    env: dict[str, str], errand: ReplayHere, file: BinaryIO, local: int, folder: Path
) -> dict[str, str]:
    env = {name: value for name, value in env.items() if name not in _APART}
    env["HOLDFAST_SLOT"] = f"/proc/{os.getpid()}/fd/{file.fileno()}:{local}"
    return env | replay_environment.replay_variables(errand.replay, str(folder))


async def _start_rank(entry: EntryPoint, env: dict[str, str], log: BinaryIO) -> asyncio.subprocess.Process:
    argv = (*entry.interpreter_argv(), *(word.replace("${local_rank}", env["LOCAL_RANK"]) for word in entry.argv))
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        cwd=entry.cwd,
        start_new_session=True,
    )


async def _watch_ranks(players: list[ReplayRank], arena: memoryview, within_s: float) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        for index, player in enumerate(players):
            player.read_progress(arena, index)
        if all(player.is_over for player in players) or any(_has_failed(player) for player in players):
            break
        await asyncio.sleep(_LOOK_S)
    await asyncio.sleep(_LINGER_S)


def _has_failed(player: ReplayRank) -> bool:
    return player.bad_step >= 0 or bool(player.process.returncode)
