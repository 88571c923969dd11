"""Sees for itself what ranks do: every line that they print about a step, and when.

Nothing here asks holdfast: a line in a rank's log comes from the script alone.
"""

import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests.public.table import Script

_LOOK_S = 0.02


class Seen(NamedTuple):
    step: int  # steps made by then, by the script's own count
    loss: str
    at: float


class Life(NamedTuple):
    """One generation of a script, by the lines of one rank."""

    generation: int
    rank: int
    lines: list[Seen]


class Witness(threading.Thread):
    """Reads along from the start of a job until `close`."""

    def __init__(self, run_dir: Path, script: Script) -> None:
        super().__init__(daemon=True)
        self._logs, self._script = run_dir / "logs", script
        self._lives: dict[Path, Life] = {}
        self._read: dict[Path, int] = {}
        self._over = threading.Event()
        self.began_at = time.time()
        self.start()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()
        self._look()

    def close(self) -> None:
        """The job has ended; what it printed last is read."""
        self._over.set()
        self.join()

    def _look(self) -> None:
        for log in self._logs.glob("gen-*/rank-*/stdout.log"):
            if log not in self._lives:
                generation, rank = (int(part.rpartition("-")[2]) for part in log.parts[-3:-1])
                self._lives[log] = Life(generation, rank, [])
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[log] = self._read.get(log, 0) + len(whole + end)
            for line in whole.decode(errors="replace").splitlines():
                if (said := self._script.read(line)) is not None:
                    self._lives[log].lines.append(Seen(*said, time.time()))

    def lives(self, generation: int) -> list[Life]:
        """Of the ranks that have printed anything: with some scripts, the first alone."""
        return [life for life in list(self._lives.values()) if life.generation == generation and life.lines]

    @property
    def generations(self) -> int:
        return max((life.generation for life in list(self._lives.values())), default=0)

    def reached(self, generation: int) -> int:
        """The newest step that all who print have told of."""
        return min((life.lines[-1].step for life in self.lives(generation)), default=0)

    def origin(self, generation: int) -> int:
        """The step that the script went on from."""
        return min(life.lines[0].step for life in self.lives(generation)) - self._script.grain

    def stepped_at(self, generation: int, step: int) -> float:
        """When all of them had made this step."""
        return max(next(seen.at for seen in life.lines if seen.step >= step) for life in self.lives(generation))

    def trained_s(self) -> tuple[float, float]:
        """Seconds in which steps were made that nobody had made before, and those in which others were made again."""
        best, new_s, again_s = 0, 0.0, 0.0
        for generation in range(1, self.generations + 1):
            if not self.lives(generation):
                continue
            begun_at, reached = self.stepped_at(generation, 0), self.reached(generation)
            ended_at = self.stepped_at(generation, reached)
            fresh_at = self.stepped_at(generation, best) if reached > best else ended_at
            again_s += fresh_at - begun_at
            new_s += ended_at - fresh_at
            best = max(best, reached)
        return new_s, again_s

    def losses(self, generation: int) -> dict[int, str]:
        """What the first rank printed."""
        return {seen.step: seen.loss for life in self.lives(generation) if life.rank == 0 for seen in life.lines}
