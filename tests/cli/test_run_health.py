"""A machine turns bad below a job that runs: the node that has it leaves, whoever only might be to blame stays."""

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job

pytestmark = pytest.mark.e2e

XID = b"4,2,200,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
REMAPPED = XID.replace(b": 79,", b": 63,")


def machines(folder: Path) -> str:
    """A root of its own for each node, with a kernel's log in it."""
    for node in ("n0", "n1", "n2", "n3"):
        (folder / node / "dev").mkdir(parents=True)
        (folder / node / "dev/kmsg").touch()
    return f"health.root={folder}/{{node}}"


def kernel_says(folder: Path, node: str, text: bytes) -> None:
    with (folder / node / "dev/kmsg").open("ab") as file:
        file.write(text)


def node_of(job: Job, rank: int) -> str:
    active = (n for n in job.status()["nodes"] if n["role"] == "active")
    return next(str(n["node"]) for n in active if n["ranks"] == str(rank))


def test_a_lost_gpu_evicts_its_node(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "machines"
    job = start("--nnodes", "2", "--standbys", "1", "--set", machines(root), "--set", "health.kernel_s=0.2")
    job.trains()
    job.until(lambda: [n for n in job.status()["nodes"] if n["role"] == "ready"], "a standby")
    bad = node_of(job, 1)
    kernel_says(root, bad, REMAPPED)
    job.until(lambda: "has a memory error that was mended" in job.text(), "a person is told")
    assert job.status()["generation"] == 1, "what was mended stops nobody"
    kernel_says(root, bad, XID)
    job.trains(generation=2)
    assert node_of(job, 1) != bad
    job.finish()
    job.ends(0)
    assert main(["report", "--json", str(job.run_dir)]) == 0
    [record] = json.loads(capsys.readouterr().out)["incidents"]
    assert (record["kind"], record["klass"], record["evicted"]) == ("lines", "gpu_lost_bus", [bad])
    assert job.check_replay() > 5


@pytest.mark.slow
def test_in_shadow_mode_nobody_is_stopped(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "machines"
    quick = ("--set", "health.kernel_s=0.2", "--set", "lines.stance=notify")
    job = start("--nnodes", "2", "--standbys", "1", "--set", machines(root), *quick)
    job.trains()
    kernel_says(root, node_of(job, 1), XID)
    job.until(lambda: "has lost the GPU at 0000:3b:00" in job.text(), "a person is told")
    assert job.status()["generation"] == 1
    job.finish()
    job.ends(0)
