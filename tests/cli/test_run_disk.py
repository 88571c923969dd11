"""States on local disks: the memory of all nodes is lost at once, and the job goes on from what their disks hold."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.cli.commands import ckpt_command
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_run_state import TRAIN, said

pytestmark = pytest.mark.e2e


def lose_all_memory(job: Job) -> None:
    """Kill the holders of all nodes, as a loss of power does; everything below them goes with them."""
    for node in ("n0", "n1"):
        os.kill(job.holder(node), signal.SIGKILL)


def test_all_memory_is_lost_and_the_disks_have_it(start: Start) -> None:
    calm = start("--nproc-per-node", "2", script=TRAIN, name="calm", HOLDFAST_STEPS="40")
    calm.ends(0)
    calm.run_dir.rename(calm.folder / "calm-run")
    disk = calm.folder / "disk"
    flags = ("--nnodes", "2", "--set", f"disk.path={disk}", "--set", "disk.every_s=0.5")
    (calm.folder / "slow-0-1").touch()  # until it is struck
    job = start(*flags, script=TRAIN, HOLDFAST_STEPS="40")
    job.trains()
    job.until(lambda: job.status()["disk"] > 3, "a step on both disks")
    least = job.status()["disk"]
    lose_all_memory(job)
    job.trains(generation=2)
    job.ends(0, patience_s=90)
    [record] = job.report().incidents
    assert record.resumed_from is not None and record.resumed_from >= least
    restored = [words for words in said(job, "from") if words[0] != "0"]
    assert restored == [[str(record.resumed_from), "disk"]] * 2
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}
    [folder] = disk.iterdir()
    kept = job.report().storage
    assert kept and (kept.step, kept.disk) == (-1, 40) and str(folder) in job.text()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.glob("rank-*/step-*/*")} == {0o600}


def test_a_standby_leaves_the_final_state_of_the_nodes_beside_it(start: Start, tmp_path: Path) -> None:
    """Nodes of one host share the run's folder, and the standby, which has no state, is the last to leave."""
    flags = ("--nnodes", "2", "--standbys", "1", "--set", f"disk.path={tmp_path}/disk", "--set", "silence.silence_s=20")
    job = start(*flags, script=TRAIN)
    job.trains()
    standby = next(node["node"] for node in job.status()["nodes"] if not node["ranks"])
    os.kill(job.agent(standby), signal.SIGSTOP)
    job.finish()
    job.until(lambda: job.text().count(" stays on disk in ") == 2, "the final state of both nodes on disk")
    os.kill(job.agent(standby), signal.SIGCONT)
    job.ends(0)
    [folder] = (tmp_path / "disk").iterdir()
    step, kept = job.report().step, job.report().storage
    assert kept and (kept.step, kept.disk) == (-1, step) and str(folder) in job.text()
    assert {path.parts[-3] for path in folder.glob(f"rank-*/step-{step:08d}/.metadata")} == {"rank-0", "rank-1"}


@pytest.mark.slow
def test_a_final_state_that_only_disks_have_is_gathered_and_gone_on_from(start: Start, tmp_path: Path) -> None:
    calm = start("--nproc-per-node", "2", script=TRAIN, name="calm", HOLDFAST_STEPS="40")
    calm.ends(0)
    calm.run_dir.rename(calm.folder / "calm-run")
    disk, store = tmp_path / "disk", tmp_path / "ckpt"
    job = start("--nnodes", "2", "--set", f"disk.path={disk}", script=TRAIN, name="first", HOLDFAST_STEPS="20")
    job.ends(0)
    job.run_dir.rename(calm.folder / "first-run")
    [folder] = disk.iterdir()
    assert ckpt_command.main(["gather", str(folder), str(store), "--step", "20"]) == 0
    job = start("--nnodes", "2", script=TRAIN, HOLDFAST_STEPS="40", HOLDFAST_STORE=str(store))
    job.ends(0)
    assert said(job, "from") == [["20", "storage"]] * 2
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}


@pytest.mark.slow
def test_a_loss_of_power_takes_the_controller_too(start: Start, tmp_path: Path) -> None:
    """Everything dies at once, and a person starts the run again on the same host."""
    flags = ("--nnodes", "2", "--set", f"disk.path={tmp_path}/disk", "--set", "disk.every_s=0.5")
    job = start(*flags, script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["disk"] > 3, "a step on both disks")
    least = job.status()["disk"]
    os.kill(job.process.pid, signal.SIGKILL)
    os.kill(job.controller(), signal.SIGKILL)
    lose_all_memory(job)
    job.start("--resume", str(job.run_dir))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    told = job.says("from the disks of 2 nodes")
    step = int(told.split("step ")[1].split()[0])
    assert step >= least and said(job, "from")[-1] == [str(step), "disk"]


@pytest.mark.slow
def test_a_flipped_byte_costs_the_steps_since_the_state_before(start: Start, tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--set", f"disk.path={tmp_path}/disk", "--set", "disk.every_s=0.5")
    job = start(*flags, script=TRAIN)
    job.trains()
    job.until(lambda: len([*tmp_path.glob("disk/*/rank-1/step-*")]) > 1, "two steps on disk")
    agent = job.agent("n1")
    os.kill(agent, signal.SIGSTOP)  # so that nothing newer is written
    newest = max(tmp_path.glob("disk/*/rank-1/step-*"))
    image = newest / "__0_0.distcp"
    content = bytearray(image.read_bytes())
    content[5000] ^= 1
    image.write_bytes(content)
    lose_all_memory(job)
    job.trains(generation=3)
    job.finish()
    job.ends(0)
    job.says("dropped the damaged state of rank 1")
    restored = [int(step) for step, source in said(job, "from") if source == "disk"]
    assert len(set(restored[-2:])) == 1 and restored[-1] < int(newest.name.removeprefix("step-"))
