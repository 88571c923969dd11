"""Ranks of a replay: the job's own script once more, in processes that nobody but this errand knows of."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from holdfast.model.errand import PlayHere
from holdfast.model.replay import Played
from holdfast.wire import replaying, slot
from holdfast.wire.spec import Entry

_LOOK_S = 0.1
_LINGER_S = 0.5  # for others to have received what a rank that is done has sent
_APART = ("HOLDFAST_KEEPER", "HOLDFAST_FLIGHT", "HOLDFAST_IMPORTS", "HOLDFAST_MESH")  # training's own

Environment = Callable[[int], dict[str, str]]  # of a rank, by its number on this node


class Player:
    """One rank."""

    def __init__(self, rank: int, steps: int, told: str, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self.marks: dict[int, int] = {}
        self.signed: dict[int, int] = {}
        self.bad_step = -1
        self.done = False
        self.ending = "stood still"
        self._steps = steps
        self._told = told  # the file with what it signed

    @property
    def over(self) -> bool:
        return self.done or self.bad_step >= 0 or self.process.returncode is not None

    def look(self, arena: memoryview, index: int) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._told, "rb") as file:
            for step, state, sent in replaying.lines_in(file.read()):
                self.marks[step] = state
                if sent is not None:
                    self.signed[step] = sent
        reading = slot.read(arena, index)
        if reading is None:
            return
        self.bad_step = reading.first_bad_step
        stepped = reading.step - reading.first_step + 1 if reading.first_step >= 0 else 0
        self.done = self.done or max(stepped, len(self.marks)) >= self._steps or self.process.returncode == 0

    def played(self) -> Played:
        failed = not self.done and self.bad_step < 0
        marks = {step: self.marks[step] for step in sorted(self.marks)[: self._steps]}
        return Played(
            rank=self.rank,
            ended=self.done,
            failed=failed,
            bad_step=self.bad_step,
            marks=marks,
            signed={step: self.signed[step] for step in marks if step in self.signed},
            detail=self.ending if failed else "",
        )

    def kill(self) -> None:
        """It, and whatever it has started: it leads a session of its own."""
        if self.process.returncode is not None:
            self.ending = f"ended with code {self.process.returncode}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def play(errand: PlayHere, entry: Entry, folder: Path, environment: Environment) -> tuple[Played, ...]:
    """Start this node's ranks of the group, wait until all have done their steps or one has failed, end them."""
    seat = errand.launch.seat
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file, contextlib.ExitStack() as logs:
        os.truncate(file.fileno(), seat.nproc * slot.SLOT_BYTES)
        arena = slot.open_arena(f"/proc/self/fd/{file.fileno()}")
        players: list[Player] = []
        try:
            for local in range(seat.nproc):
                rank = seat.first_rank + local
                own = _own(environment(local), errand, file, local, folder)
                log = logs.enter_context((folder / f"rank-{rank}.log").open("wb"))
                process = await _start(entry, own, log)
                players.append(Player(rank, errand.replay.steps, replaying.told_in(str(folder), rank), process))
            await _watch(players, memoryview(arena), errand.within_s)
        finally:
            for player in players:
                player.kill()
            for player in players:
                await player.process.wait()
        for index, player in enumerate(players):
            player.look(memoryview(arena), index)
    return tuple(player.played() for player in players)


def _own(env: dict[str, str], errand: PlayHere, file: BinaryIO, local: int, folder: Path) -> dict[str, str]:
    env = {name: value for name, value in env.items() if name not in _APART}
    env["HOLDFAST_SLOT"] = f"/proc/{os.getpid()}/fd/{file.fileno()}:{local}"
    return env | replaying.environment(errand.replay, str(folder))


async def _start(entry: Entry, env: dict[str, str], log: BinaryIO) -> asyncio.subprocess.Process:
    argv = (*entry.interpreter(), *(word.replace("${local_rank}", env["LOCAL_RANK"]) for word in entry.argv))
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        cwd=entry.cwd,
        start_new_session=True,
    )


async def _watch(players: list[Player], arena: memoryview, within_s: float) -> None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        for index, player in enumerate(players):
            player.look(arena, index)
        if all(player.over for player in players) or any(_fell(player) for player in players):
            break
        await asyncio.sleep(_LOOK_S)
    await asyncio.sleep(_LINGER_S)


def _fell(player: Player) -> bool:
    return player.bad_step >= 0 or bool(player.process.returncode)
