"""On a real Slurm with GPUs by name only: ranks see those that Slurm gave to their job, also after a refill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.driver import TRAIN, until
from tests.slurm.lab import SlurmLab
from tests.slurm.slurm_job import StartSlurm, jobs_in_own_lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

# What a rank sees of its host's GPUs, by its generation.
SEEING = TRAIN.replace(
    "step = int",
    """sees = os.environ.get("CUDA_VISIBLE_DEVICES")
with open(f"{folder}/sees-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}", "w") as file:
    file.write(str(sees))
step = int""",
    1,
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str) -> Iterator[StartSlurm]:
    with jobs_in_own_lab(tmp_path, monkeypatch, SlurmLab(2, gpus=4)) as start:
        yield start


def test_ranks_see_the_gpus_of_their_job_and_a_refill_has_as_many(start: StartSlurm, tmp_path: Path) -> None:
    lab = start.lab
    first, second = lab.nodes
    # Somebody else has the first GPU of one host and the first two of the other.
    for busy, count in ((first, 1), (second, 2)):
        words = ("--parsable", f"--gres=gpu:{count}", "-w", busy, "-n1", "-o", "/dev/null", "--wrap", "sleep 900")
        other = lab.call("sbatch", *words).strip()
        until(lambda other=other: lab.call("squeue", "-h", "-j", other, "-o", "%T").strip() == "RUNNING", "a job")  # type: ignore[misc]
    expected = {first: "1,2", second: "2,3"}
    job = start("--nnodes", "1", "--nproc-per-node", "2", "--slurm", "gres=gpu:2 time=30", script=SEEING)

    def sees(generation: int) -> set[str]:
        return {(tmp_path / f"sees-{generation - 1}-{rank}").read_text() for rank in (0, 1)}

    def host() -> str:
        [node] = [str(node["node"]) for node in job.status()["nodes"] if node["role"] == "active"]
        return job.host_of(node)

    job.trains()
    assert sees(1) == {expected[host()]}
    [record] = job.records().values()
    lab.call("scancel", f"{record.job}.0")
    job.trains(generation=2)
    assert len(job.records()) == 2 and sees(2) == {expected[host()]}
    job.finish()
    job.ends(0)
