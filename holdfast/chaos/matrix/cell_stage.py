"""The job that runs the matrix's cells one after another, and the undisturbed run to compare its states with."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from holdfast.chaos import lab_launch, release_faults
from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.injection_records import CannotInject, FaultResult, GroundTruth, InjectedFault, SkippedFault
from holdfast.chaos.job_observer import JobObserver, ObservedStatus
from holdfast.chaos.local_lab_job import LabJob
from holdfast.chaos.matrix import job_checks
from holdfast.chaos.matrix.cells import NAMED, OTHER, RANK, MatrixCell
from holdfast.chaos.matrix.expectations import CellOutcome, ExpectedRow, closest_row, judging_row
from holdfast.chaos.matrix.job_checks import JobChecks, SharedMemoryWatch
from holdfast.chaos.scenario import ScenarioJob
from holdfast.chaos.striker import Striker
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.model.incident_record import Change, Record

RANKS = 4
SCRIPT = Path(__file__).parents[3] / "examples" / "parallel.py"
PATIENCE_S = 120.0
_SETTLED = 25  # steps, by which a release is past its trial
_STORED_S = 30.0  # a checkpoint is due every second or so
_MORE = 1.25  # steps of an undisturbed run beyond those that are needed, for the next time
_SHAPES = {
    "local": ("--nnodes", "2", "--nproc-per-node", "2", "--standbys", "2"),
    "wide": ("--nnodes", "4", "--nproc-per-node", "1", "--standbys", "2"),
    "hosts": ("--nnodes", "2", "--nproc-per-node", "2", "--standbys", "2"),
}
# Cells are to be judged one by one: what came before in the same job is forgotten at once, and nodes may be evicted as
# often as it takes. A busy machine takes its time to start another agent.
_SETTINGS = (
    "recovery.window_s=0.001",
    "recovery.evictions=1000",
    "silence.silence_s=8",
    "node.lost_s=120",
    "hang.act_s=20",
    "health.host_s=2",
)
_CHOOSES = ("standby.kill", "link.cut", "partition")  # whom these strike has no such rank, or not for sure
Say = Callable[[str], None]


class StageFailed(Exception):
    """Cells cannot be run; the message is one sentence that says why."""


def make_job(kind: str, how: str, folder: Path) -> ScenarioJob:
    flags = [*_SHAPES.get(kind, _SHAPES["local"])]
    for setting in _SETTINGS:
        flags += ["--set", setting]
    if how == "pp":
        flags += ["--mesh", "pp=2,dp=2"]
    store = {"disk": "{disk}/ckpt", "storage": "{storage}"}.get(kind, str(folder / "ckpt"))
    words = (str(folder / "tree" / SCRIPT.name), str(folder / "work"), "--how", how, "--pause-s", "0.1")
    return ScenarioJob(
        run=(*flags, *words, "--stretch-s", "0.3", "--store", store),
        machines=kind in ("local", "wide"),
        disk_mib=64 if kind == "disk" else 0,
        shm_mib=16 if kind == "disk" else 0,
        hosts=4 if kind == "hosts" else 0,
    )


class CellStage:
    """A job of one kind, training in one way, on which cells run."""

    def __init__(self, made: LabJob, guard: UndoGuard, say: Say, shared: SharedMemoryWatch) -> None:
        self.made, self.say = made, say
        self._shared = shared
        self.sight: JobObserver = made.observe_job()
        self.striker = Striker(self.sight, guard, 1, say)
        self.striker.scene.links = made.links
        self._found = job_checks.open_traces(made.folder / "work", RANKS)
        self._windows: dict[str, range] = {}  # steps that belong to each cell
        self._spoilt = False
        self._updates = 0
        self._since: tuple[int, int] | None = None  # generation and step from which on it was seen to train

    def play_cell(self, cell: MatrixCell, rows: list[ExpectedRow]) -> CellOutcome:
        """Run one cell: wait until the job trains steadily, inject the fault, and wait until the job trains again."""
        strike = NAMED[cell.strike]
        if why := KINDS[strike.fault.kind].lacks():
            return CellOutcome(skipped=why)
        before = self._await_steady(
            PATIENCE_S, closest_row(rows, cell).evicted or int(cell.strike.startswith("standby"))
        )
        first = before.step
        lines = len(self.striker.lines)
        struck = self._strike_cell(cell, strike.fault)
        self.striker.await_recovery(PATIENCE_S)
        self._since, settled_at = None, time.time()
        after = self._await_steady(PATIENCE_S, 0)
        stored = self._has_stored(after, settled_at)
        self.striker.undo_all()
        if isinstance(struck, SkippedFault):
            return CellOutcome(skipped=struck.why)
        results = [line for line in self.striker.lines[lines:] if isinstance(line, FaultResult)]
        came = self._cell_outcome(cell, struck, results, (before.generation, after))
        came = msgspec.structs.replace(came, stored=stored)
        if not self._spoilt:  # what spoils it is compared, too: its states are to differ
            self._windows[cell.name] = range(max(1, first), after.step)
        self._spoilt = self._spoilt or judging_row(rows, cell, came).oracle == "blind"
        return came

    def _strike_cell(self, cell: MatrixCell, fault: InjectedFault) -> GroundTruth | SkippedFault:
        """Inject the cell's fault. If the cell's moment is a restore or an update, first cause a crash or an update."""
        if cell.when == "restoring":
            # Of another kind than what follows, or it would be the same failure twice, and nodes would be tried.
            opener = "rank.segv" if fault.kind in ("rank.kill", "rank.oom") else "rank.kill"
            self.striker.strike_fault(InjectedFault(kind=opener, rank=OTHER), PATIENCE_S)
        elif cell.when == "updating":
            self._update_code()
        if cell.when == "idle":
            return self.striker.strike_fault(fault, PATIENCE_S)
        filled = msgspec.structs.replace(fault, when=cell.when)
        if fault.rank is None and fault.kind not in _CHOOSES:
            filled = msgspec.structs.replace(filled, rank=RANK)
        return self.striker.strike_fault(filled, PATIENCE_S)

    def _update_code(self) -> None:
        """Update the job to the same code with another comment."""
        self._updates += 1
        tree = self.made.folder / f"tree-{self._updates}"
        shutil.copytree(self.made.folder / "tree", tree)
        with (tree / SCRIPT.name).open("a") as file:
            file.write(f"# release {self._updates}\n")
        told = release_faults.update_job(self.sight, tree)
        if told.returncode != 0:
            raise CannotInject(f"holdfast update did not work: {told.stderr.strip()}")

    def _cell_outcome(
        self, cell: MatrixCell, struck: GroundTruth, results: list[FaultResult], span: tuple[int, ObservedStatus]
    ) -> CellOutcome:
        generation, after = span
        records = [record for record in self.striker.closed if record.generation >= generation]
        changes = [change for change in self.striker.changed if change.generation >= generation]
        opened = int(cell.when in ("restoring", "updating"))
        restarts = after.generation - generation - opened
        both: list[Record | Change] = [*records, *changes]
        evicted = tuple(dict.fromkeys(node for one in both for node in one.evicted))
        verdict = str(records[-1].verdict.remedy) if records and (restarts > 0 or evicted) else ""
        lost = [one.good_step - one.resumed_from for one in both if one.resumed_from is not None]
        alarms = [told for result in results for told in result.alarms]
        return CellOutcome(
            verdict=verdict,
            evicted=evicted,
            guilty=struck.nodes,
            restarts=restarts,
            lost=max([0, *lost]),
            alarms=tuple(dict.fromkeys(told.kind for told in alarms)),
            acted=tuple(dict.fromkeys(told.kind for told in alarms if told.stance == "act")),
            unseen=tuple(result.kind for result in results if result.seen is False),
            misnamed=tuple(result.kind for result in results if result.named is False and not _is_seen_by_loss(result)),
            back=all(result.back_s is not None for result in results),
        )

    @property
    def steps(self) -> int:
        """The number of steps that the undisturbed run must have to be compared with every cell of this job."""
        return max((window.stop for window in self._windows.values()), default=0)

    def compare_states(self, came: dict[str, CellOutcome], calm: Path) -> dict[str, CellOutcome]:
        """Add to each outcome how many states in its cell's steps differ from those of the undisturbed run."""
        wanted = {rank: trace.read() for rank, trace in job_checks.open_traces(calm, RANKS).items()}
        judged = dict(came)
        for cell, window in self._windows.items():
            differing, compared = job_checks.count_differing(self._found, wanted, window)
            judged[cell] = msgspec.structs.replace(came[cell], differing=differing, compared=compared)
        return judged

    def _has_stored(self, status: ObservedStatus, since: float) -> bool:
        """Wait a while for a checkpoint that is published after `since`; return whether there is one."""
        until = time.monotonic() + _STORED_S
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):  # an old one was just removed
                found = [
                    path.stat().st_mtime for path in self.sight.checkpoint_folder(status).glob("step-*/holdfast.json")
                ]
                if max(found, default=0.0) > since:
                    return True
            self.striker.poll_job()
            time.sleep(0.1)
        return False

    def _await_steady(self, patience_s: float, standbys: int) -> ObservedStatus:
        """Wait until the job trains steadily, with copies on peers and this many standbys; raise StageFailed if not."""
        until = time.monotonic() + patience_s
        status: ObservedStatus | None = None
        while time.monotonic() < until:
            status = self.sight.read_status()
            if self.sight.has_ended():
                raise StageFailed(f"the job has ended:\n{self.made.read_output()[-1500:]}")
            if status is None or status.phase != "training":
                self._since = None
            elif self._since is None or self._since[0] != status.generation:
                self._since = (status.generation, status.step)
            elif status.step > self._since[1] + _SETTLED and status.floor > 0 and len(status.standbys) >= standbys:
                self._shared.note_users()
                return status
            self.striker.poll_job()
            time.sleep(0.1)
        lacks = f"the job was not steady within {patience_s:g} s: {_status_text(status)}"
        raise StageFailed(f"{lacks}\n{self.made.read_output()[-1500:]}")

    def end_job(self, mark: str, how: str) -> JobChecks:
        """Request the job's end, and check its exit code, samples, processes, shared memory and journal."""
        self._shared.note_users()
        (self.made.folder / "work" / "finish").touch()
        try:
            code = self.made.fronts[0].wait(PATIENCE_S)
            said = "" if code == 0 else f"the job ended with code {code}"
        except subprocess.TimeoutExpired:
            said = "the job did not end on request"
        self.made.end_job()
        # As it lies on the host's own disk, not by way of a process that is gone.
        at = self.made.run_dir
        run_dir = at if (at / "journal.db").exists() else self.sight.run_dir
        for trace in self._found.values():
            trace.read()
        parts = RANKS if how != "pp" else RANKS // 2
        return JobChecks(
            exit=said,
            samples=tuple(job_checks.check_samples(self._found, parts)),
            orphans=tuple(job_checks.find_orphans(mark)),
            shm=tuple(self._shared.list_leftovers()),
            record=tuple(job_checks.check_record(run_dir)),
        )


def _status_text(status: ObservedStatus | None) -> str:
    if status is None:
        return "its controller does not answer"
    where = f"{status.phase}, generation {status.generation}, step {status.step}"
    return f"{where}, newest step on peers {status.floor}, {len(status.standbys)} standbys"


def _is_seen_by_loss(result: FaultResult) -> bool:
    """Return whether the loss revealed the fault. All ranks have the same loss, so it does not show the faulty node."""
    return any(told.kind == "loss" for told in result.alarms)


@contextlib.contextmanager
def open_stage(kind: str, how: str, folder: Path, say: Say) -> Iterator[tuple[CellStage, str]]:
    """Start a job for cells. Yield its stage, and the random mark that all its processes have in their environment."""
    (folder / "tree").mkdir(parents=True)
    (folder / "work").mkdir()
    shutil.copy(SCRIPT, folder / "tree" / SCRIPT.name)
    mark = uuid.uuid4().hex
    env = {job_checks.MARK: mark, "HOLDFAST_HOME": str(folder / "home"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    shared = SharedMemoryWatch(mark)
    with UndoGuard() as guard, lab_launch.run_lab_job(make_job(kind, how, folder), folder, env) as made:
        yield CellStage(made, guard, say, shared), mark


def calm_run(how: str, steps: int, cache: Path, say: Say) -> Path:
    """Return the traces of an undisturbed run of at least this many steps, cached per version of script and torch."""
    code = hashlib.sha256(SCRIPT.read_bytes() + version("torch").encode()).hexdigest()[:12]
    folder = cache / f"calm-{how}-{code}"
    if min(trace.read().last for trace in job_checks.open_traces(folder, RANKS).values()) >= steps:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    steps = int(_MORE * steps)
    (part := folder.with_suffix(".part")).mkdir(parents=True, exist_ok=True)
    for old in part.glob("trace-*"):
        old.unlink()
    say(f"an undisturbed run of {steps} steps ({how})")
    argv = [sys.executable, "-P", "-m", "holdfast.cli", "run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
    env = os.environ | {"HOLDFAST_HOME": str(part / "home"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    told = subprocess.run(
        [*argv, str(SCRIPT), str(part), "--how", how, "--steps", str(steps)], env=env, capture_output=True, check=False
    )
    if told.returncode != 0:
        raise StageFailed(f"the undisturbed run failed:\n{told.stdout.decode(errors='replace')[-2000:]}")
    part.rename(folder)
    return folder
