"""Jobs for end-to-end tests: `holdfast run` as a process of its own, watched through what it leaves on disk."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from holdfast.cli.commands.report_command import load_report
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_report import Report
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.linux import own_process_settings
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.wire import program_fork_server
from holdfast.wire.controller_request import ControllerNotRunning
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.conftest import SERVER, job_environment

ROOT = Path(__file__).parents[2]
PATIENCE_S = 40.0  # without any sign of getting further; for anything that should happen at once
_MOST = 4  # times as long is waited for something that does get further
_CALM = 4  # processes per processor that want to run: with more of them everything takes as many times as long
T = TypeVar("T")

# A script that trains without torch: it steps until there is a file `finish`, and resumes where it was.
TRAIN = """
import os, sys, time
import holdfast
folder, rank = sys.argv[1], os.environ["RANK"]
mine = f"{folder}/step-{rank}"
step = int(open(mine).read()) if os.path.exists(mine) else 0
while not os.path.exists(f"{folder}/finish"):
    time.sleep(0.02)
    step += 1
    with open(mine + ".new", "w") as file:
        file.write(str(step))
    os.replace(mine + ".new", mine)
    holdfast.step(step, loss=1 / step)
"""

DEAF = TRAIN.replace("import holdfast\n", "import holdfast, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n")
# On SIGTERM it leaves a note and ends well.
CLEAN = TRAIN.replace(
    "import holdfast\n",
    """import holdfast, signal
def clean(number, frame):
    open(f"{folder}/clean-{rank}-{number}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, clean)
""",
)


def slowness() -> float:
    """How many times as long everything takes while others use this machine, too; 1 if they hardly do."""
    return max(1.0, os.getloadavg()[0] / (_CALM * (os.cpu_count() or 1)))


def until(
    look: Callable[[], T], what: str, patience_s: float = PATIENCE_S, signs: Callable[[], object] = lambda: None
) -> T:
    """Wait until something is true, and return it; what still changes its signs of life is not late but slow, and
    nothing is quick on a machine on which many others compute."""
    began_at = asked_at = moved_at = time.monotonic()
    seen = signs()
    while not (found := look()):
        now = time.monotonic()
        if now > asked_at + 1.0:
            before, seen, asked_at = seen, signs(), now
            moved_at = moved_at if seen == before else now
        enough_s = patience_s * slowness()
        assert now < min(moved_at + enough_s, began_at + _MOST * enough_s), f"waited in vain: {what}"
        time.sleep(min(0.02 + (now - began_at) / 20, 0.1))  # a look may cost a job more than its own work
    return found


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was replaced just now
        return 0


def gone(*pids: int) -> bool:
    return all(own_process_settings.process_state(pid) in ("", "Z", "X") for pid in pids)


def below(pid: int, word: str) -> int | None:
    """The child of this process that has a word in its command line."""
    for child in psutil.Process(pid).children():
        try:
            if word in child.cmdline():
                return child.pid
        except psutil.Error:  # it has just ended
            continue
    return None


def run_command(*words: str, folder: Path, patience_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """`holdfast` with these words, in a folder; forked where tests share a fork server, as importing takes longest."""
    env = make_rank_environment(job_environment())
    if SERVER not in os.environ:
        argv = [sys.executable, "-m", "holdfast.cli", *words]
        return subprocess.run(
            argv, env=env, cwd=folder, capture_output=True, text=True, timeout=patience_s, check=False
        )
    env |= {program_fork_server.NAMED: os.environ[SERVER]}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        front = Front(folder, words, env, OpenFiles(stdout=out.fileno(), stderr=err.fileno()))
        code = front.wait(patience_s)
        told = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess(words, code, *told)


class Front:
    """A command of holdfast that was forked by a fork server, and looks like a Popen."""

    def __init__(self, folder: Path, words: tuple[str, ...], env: dict[str, str], files: OpenFiles) -> None:
        self.returncode: int | None = None
        self._code = folder / f"code-{time.monotonic_ns()}"
        args = (str(self._code), *words)
        program = Program(module="tests.cli.front_program", args=args, env=env, cwd=str(folder))
        self._process = program_fork_server.start_program(program, files, Path(env[program_fork_server.NAMED]))
        self.pid = self._process.pid

    def poll(self) -> int | None:
        if self.returncode is None and self._process.is_over():
            self.returncode = int(self._code.read_text()) if self._code.exists() else -signal.SIGKILL
            self._process.close()
        return self.returncode

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        until(lambda: self.poll() is not None, "the end of the front", patience_s)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Job:
    """One `holdfast run`, in a session of its own."""

    process: "subprocess.Popen[bytes] | Front"

    def __init__(
        self, folder: Path, *words: str, env: dict[str, str], name: str = "job", executed: bool = False
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.output = folder / f"{name}.out"
        self.patience_s = PATIENCE_S
        self.watched: Path | None = None  # a folder besides the run directory in which nodes leave signs of life
        self._env = env
        self._executed = executed or program_fork_server.NAMED not in env
        self._started = False
        self.start(*words)

    def start(self, *words: str) -> None:
        """Start it, or start it once more after it was killed."""
        if self._started:
            self.process.wait(PATIENCE_S)
        self._started = True
        with self.output.open("ab") as output:
            if not self._executed:
                files = OpenFiles(stdout=output.fileno(), stderr=output.fileno())
                self.process = Front(self.folder, ("run", *words), self._env, files)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli", "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                env=self._env,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def sentences(self) -> list[str]:
        """What holdfast itself said."""
        return [line for line in self.text().splitlines() if line.startswith("holdfast")]

    def until(self, look: Callable[[], T], what: str, patience_s: float = 0.0) -> T:
        """Wait for this long, or for as long as this job is given."""
        try:
            return until(look, what, patience_s or self.patience_s, self._signs)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.story()}") from None

    def _signs(self) -> object:
        """What grows as long as anything goes on in this job."""
        folder = self.run_dir
        files = [self.output, *folder.glob("*.log"), *folder.glob("journal.db*"), *folder.glob("nodes/*/*.log")]
        elsewhere: list[Path] = []
        with contextlib.suppress(OSError):  # a part of it was removed just now
            for name in ("output", "*.log", "pid") if self.watched else ():
                elsewhere += (self.watched or folder).rglob(name)
        own = (*files, *folder.glob("logs/*/*/pid"), *self.folder.glob("step-*"))
        return [size_of(file) for file in (*own, *elsewhere)]

    def story(self) -> str:
        logs = [self.output, self.run_dir / "controller.log", *self.run_dir.glob("nodes/*/*.log")]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def finish(self) -> None:
        """Let the training script end."""
        (self.folder / "finish").touch()

    def ends(self, code: int, patience_s: float = 0.0) -> None:
        self.until(lambda: self.process.poll() is not None, "the end of the job", patience_s)
        assert self.process.returncode == code, self.story()

    # --- looking -----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = ask_controller(self.run_dir, "/api/v1/status")
        except (ControllerNotRunning, OSError):
            return {}
        return found

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def trains(self, generation: int = 1) -> dict[str, Any]:
        """Wait until every rank of this generation has made steps."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            there = status.get("phase") == "training" and status["generation"] == generation
            return status if there and status["step"] > 0 else None

        return self.until(look, f"training in generation {generation}") or {}

    def says(self, words: str, patience_s: float = 0.0) -> str:
        """Wait for a sentence of ours with these words."""
        found = lambda: next((line for line in self.sentences() if words in line), "")  # noqa: E731
        return self.until(found, f"the words {words!r}", patience_s or self.patience_s)

    def rank_dir(self, rank: int, generation: int = 1) -> Path:
        return self.run_dir / "logs" / f"gen-{generation}" / f"rank-{rank}"

    def rank(self, rank: int, generation: int = 1) -> int:
        return self._pid(self.rank_dir(rank, generation) / "pid")

    def ranks(self, count: int, generation: int = 1) -> list[int]:
        return [self.rank(rank, generation) for rank in range(count)]

    def children(self, rank: int) -> list[int]:
        """Pids of what this process has started to train, not of what Python needs for it."""
        found = psutil.Process(rank).children()
        return [child.pid for child in found if not any("resource_tracker" in word for word in child.cmdline())]

    def holder(self, node: str) -> int:
        return self._pid(self.run_dir / "nodes" / node / "holder.pid")

    def agent(self, node: str) -> int:
        holder = self.holder(node)
        return self.until(lambda: below(holder, "holdfast.agent.main"), f"the agent of {node}") or 0

    def controller(self) -> int:
        listening = self.until(lambda: run_directory.find_controller(self.run_dir), "a controller")
        assert listening
        return listening.pid

    def store(self) -> int:
        words = {"holdfast.client.boot.tcp_store_server", str(self.run_dir)}
        [found] = [p.pid for p in psutil.process_iter(["cmdline"]) if words <= {*(p.info["cmdline"] or [])}]
        return found

    def _pid(self, path: Path) -> int:
        return int(self.until(lambda: path.exists() and path.read_text().strip(), f"a pid in {path}"))

    # --- acting ------------------------------------------------------------------------------------------------

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    # --- afterwards --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What `holdfast report` is made of; to read it is to check that its spans tile the wall clock."""
        report = load_report(self.run_dir)
        assert abs(sum(span.seconds for span in report.spans) - report.wall_s) < 1e-6
        return report

    def events(self, of: type[T]) -> list[T]:
        """The events of this type in the journal."""
        with contextlib.closing(SqliteJournal(self.run_dir / "journal.db", read_only=True)) as journal:
            return [entry.event for entry in journal.read() if isinstance(entry.event, of)]

    def alarms(self, kind: Kind) -> list[Alarm]:
        """The alarms of this kind in the journal, whatever came of them."""
        return [alarm for alarm in self.events(Alarm) if alarm.kind is kind]

    def check_replay(self) -> int:
        """The journal leads to the same decisions again; how many entries it has."""
        journal = SqliteJournal(self.run_dir / "journal.db", read_only=True)
        try:
            return len(list(rebuild_decider(journal, Decider())))
        finally:
            journal.close()
