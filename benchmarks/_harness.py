"""Runs a training job under some launcher, breaks it, and times from outside how long it takes to step again."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import psutil

SCRIPT = Path(__file__).with_name("_train_ddp.py")
MARK = "HOLDFAST_BENCH_MARK"
START_LIMIT_S = 120.0
STANDBY_LIMIT_S = 300.0  # it has to start and to pass its probes
STOP_LIMIT_S = 20.0
LOOK_EVERY_S = 0.05  # coarse, not to disturb: times are taken from the events, not from when they were seen

T = TypeVar("T")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote down about itself."""

    at: float
    kind: str
    pid: int
    rank: int
    world: int = 0
    step: int = 0
    generation: int = 0


class Fault(msgspec.Struct, frozen=True):
    """A fault, and the ranks seen until then: whoever steps later and is none of them was started after it."""

    at: float
    before: frozenset[int]


class Job:
    """One training job: its launchers, each in a session of its own, and the events of its ranks."""

    def __init__(self, ranks: int, script: Path = SCRIPT) -> None:
        self.ranks = ranks
        self._script = script
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._mark = uuid.uuid4().hex
        self._events: list[Event] = []
        self._read_bytes: dict[Path, int] = {}

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()
        self._temporary.cleanup()

    def start(
        self, launch: Sequence[str], env: Mapping[str, str] | None = None, flags: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a launcher of the training script."""
        script = [str(self._script), f"--events={self.folder / 'events'}", f"--ckpt={self.folder / 'checkpoint.pt'}"]
        return self.spawn([*launch, *script, *flags], env)

    def spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command as part of the job."""
        # Every process below inherits the mark, so that all of them, and no others, can be found and ended.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: self._mark}
        with (self.folder / f"launcher{len(self.launchers)}.log").open("wb") as log:
            launcher = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def wait(self, look: Callable[[], T | None], limit_s: float) -> T | None:
        """What `look` finds; None when the limit passes or every launcher has ended without it."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            ended = all(launcher.poll() is not None for launcher in self.launchers)
            if (found := look()) is not None:
                return found
            if ended:
                break
            time.sleep(LOOK_EVERY_S)
        return None

    def wait_steps(self, count: int, fault: Fault | None = None, limit_s: float = START_LIMIT_S) -> float | None:
        """The instant when every rank, of those started after the fault, had done so many steps."""

        def done() -> float | None:
            nth = [at[count - 1] for at in self._steps(fault).values() if len(at) >= count]
            return max(nth) if len(nth) == self.ranks else None

        return self.wait(done, limit_s)

    def pid_of(self, rank: int) -> int:
        return max((event for event in self.events() if event.rank == rank), key=lambda event: event.at).pid

    def fault(self) -> Fault:
        """To be called right before the fault is injected."""
        return Fault(before=frozenset(event.pid for event in self.events()), at=time.time())

    def kill(self, *pids: int) -> None:
        """Kill processes of this job."""
        if strangers := [pid for pid in pids if not self.owns(pid)]:
            raise RuntimeError(f"gone already, or not of this job: {strangers}")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Every process of this job that lives."""
        return [pid for pid in psutil.pids() if self.owns(pid)]

    def owns(self, pid: int) -> bool:
        """Whether this is a process of the job, and not dead."""
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return f"{MARK}={self._mark}".encode() in variables

    def events(self) -> list[Event]:
        """All events so far, each rank's own in order."""
        for path in sorted((self.folder / "events").glob("*.jsonl")):
            seen = self._read_bytes.get(path, 0)
            with path.open("rb") as file:
                file.seek(seen)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] = seen + len(whole) + len(end)
            self._events += (msgspec.json.decode(line, type=Event) for line in whole.splitlines())
        return self._events

    def steps_in(self, generation: int, count: int) -> list[Event] | None:
        """The step of this number that each rank told of in a generation; None unless all have made it."""
        made: dict[int, list[Event]] = {}
        for event in self.events():
            if event.kind == f"step in {generation}":
                made.setdefault(event.rank, []).append(event)
        found = [events[count - 1] for events in made.values() if len(events) >= count]
        return found if len(found) == self.ranks else None

    def last_words(self, lines: int = 12) -> str:
        logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("launcher*.log"))]
        return "\n".join(line for log in logs for line in log.splitlines()[-lines:])

    def _steps(self, fault: Fault | None) -> dict[int, list[float]]:
        """When each rank stepped."""
        old = fault.before if fault else frozenset()
        steps: dict[int, list[float]] = {}
        for event in self.events():
            if event.kind == "step" and event.pid not in old:
                steps.setdefault(event.rank, []).append(event.at)
        return steps

    def _stop(self) -> None:
        running = [launcher for launcher in self.launchers if launcher.poll() is None]
        for launcher in running:
            launcher.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_LIMIT_S
        for launcher in running:
            try:
                launcher.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"benchmark: {launcher.args!r} did not stop by itself", file=sys.stderr)
        # What is left is killed until nothing is: something may still have been starting something.
        while left := self.pids():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_EVERY_S)
        for launcher in self.launchers:
            launcher.wait()


def holdfast(run_dir: Path, *flags: str) -> list[str]:
    return [*holdfast_command(), "run", f"--run-dir={run_dir}", *flags]


def holdfast_command() -> list[str]:
    """The installed program, or the module where holdfast is only on the path, as on a GPU machine."""
    installed = executable("holdfast")
    return [installed] if installed else [sys.executable, "-m", "holdfast"]


def executable(name: str) -> str:
    """A program of the environment that runs this; empty when it has none of that name."""
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else ""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
