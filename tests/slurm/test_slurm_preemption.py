"""On a real Slurm that preempts without grace: a batch job goes on from its very last step, in whatever way Slurm lets
it come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.commands.report_command import load_report
from tests.cli.driver import until
from tests.cli.test_run_state import TRAIN
from tests.slurm.lab import SlurmLab
from tests.slurm.slurm_job import StartSlurm, jobs_in_own_lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# Rank 0 says which states it has handed over. Only every thousandth goes to storage of its own accord.
SAVING = TRAIN.replace('"every": 5', '"every": 1000').replace(
    "    ckpt.save(step)\n", '    ckpt.save(step)\n    print("saved", step, flush=True)\n'
)


@pytest.fixture(params=["CANCEL", "REQUEUE"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str
) -> Iterator[StartSlurm]:
    conf = {"PreemptMode": request.param, "KillWait": "40"}
    with jobs_in_own_lab(tmp_path, monkeypatch, SlurmLab(1, conf)) as start:
        start.lab.call("scontrol", "update", "PartitionName=main", "GraceTime=0")
        yield start


class Output:
    """What a batch job and its successors print, one after the other."""

    def __init__(self, path: Path, lab: SlurmLab) -> None:
        self._path, self._lab = path, lab

    def text(self) -> str:
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    def numbers(self, word: str) -> list[int]:
        """What rank 0 printed after a word."""
        lines = [line.split(f"] {word} ")[1] for line in self.text().splitlines() if f"rank 0] {word} " in line]
        return [int(line.split()[0]) for line in lines]

    def until(self, found: str, count: int = 1) -> None:
        def grows() -> object:
            return len(self.text()), self._lab.call("squeue", "-h", "-o", "%i %T")

        until(lambda: self.text().count(found) >= count, f"{found}: {self.text()[-3000:]}", 300, grows)


def test_a_preempted_batch_job_goes_on_from_its_last_step(start: StartSlurm, tmp_path: Path) -> None:
    lab = start.lab
    (tmp_path / "job.py").write_text(SAVING)
    words = ["sbatch", "--run-dir", str(tmp_path / "run"), "--nnodes", "1", "--slurm", "time=30 exclusive"]
    words += ["--set", "probe.allow=false", "job.py", str(tmp_path)]
    start.call_holdfast(*words, HOLDFAST_STORE=str(tmp_path / "store"))
    output = Output(tmp_path / "run.out", lab)
    output.until("saved 20")
    [first] = lab.call("squeue", "-h", "-o", "%i").split()
    words = ["--parsable", "-p", "urgent", "-N1", "--exclusive", "--time=9", "-o", "/dev/null"]
    urgent = lab.call("sbatch", *words, "--wrap", "sleep 900").strip()
    output.until("ended with code 95")
    until(lambda: lab.call("squeue", "-h", "-j", urgent, "-o", "%T").strip() == "RUNNING", "the urgent job", 120)
    last = output.numbers("saved")[-1]
    waiting = lab.call("squeue", "-h", "-t", "PD", "-o", "%i").split()
    lab.call("scancel", urgent)
    output.until("] from ", 2)
    assert output.numbers("from")[1:] == [last], output.text()
    (tmp_path / "finish").touch()
    output.until("done: ")
    until(lambda: not lab.call("squeue", "-h").strip(), f"an empty queue, after {first} and {waiting}", 120)
    report = load_report(tmp_path / "run")
    assert report.code == 0 and report.generation == 2, "one journal"
