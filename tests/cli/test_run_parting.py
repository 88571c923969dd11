"""A job that ends on purpose leaves its newest state on storage, and the next run goes on exactly there."""

import re
import signal
import time
from pathlib import Path

import pytest

from holdfast.checkpoint import stored_checkpoints
from holdfast.cli.terminal.quantity_text import storage_said
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_run_state import TRAIN, said
from tests.cli.test_update_command import holdfast
from tests.conftest import ROOT

pytestmark = pytest.mark.e2e
SELDOM = TRAIN.replace('"every": 5', '"every": 1000')


def steps_at(path: Path) -> list[int]:
    return [found.step for found in stored_checkpoints.find_checkpoints(str(path)) if found.ok]


def stored_step(job: Job) -> int:
    """What the report says that is on storage."""
    kept = job.report().storage
    return kept.step if kept and not kept.missed else -1


def test_a_stopped_run_goes_on_bit_for_bit_in_the_next(start: Start, tmp_path: Path) -> None:
    """Two nodes, as each holds a part; and the step is no multiple of `every`, which never comes."""
    store = tmp_path / "store"
    calm = start("--nproc-per-node", "2", script=SELDOM, name="calm", HOLDFAST_STEPS="40")
    calm.ends(0)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start("--nnodes", "2", script=SELDOM, name="stopped", HOLDFAST_STORE=str(store))
    job.trains()
    job.until(lambda: job.status()["step"] > 5, "some steps")
    job.process.send_signal(signal.SIGTERM)
    job.ends(143)
    [step] = steps_at(store)
    assert 5 < step < 40
    assert stored_step(job) == step
    job.run_dir.rename(job.folder / "stopped-run")
    again = start("--nnodes", "2", script=SELDOM, name="again", HOLDFAST_STORE=str(store), HOLDFAST_STEPS="40")
    again.ends(0)
    assert said(again, "from") == [[str(step), "storage"]] * 2
    assert {words[0] for words in said(again, "weights")} == {words[0] for words in said(calm, "weights")}
    assert steps_at(store) == [40, step]  # the end of a run is no multiple either


def test_a_final_state_that_storage_does_not_take_shows_in_the_code(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    job = start("--nproc-per-node", "1", script=TRAIN, HOLDFAST_STORE=str(store))
    job.trains()
    job.until(lambda: (job.status()["storage"] or {}).get("step", -1) > 5, "a checkpoint")
    store.rename(tmp_path / "away")
    store.write_text("no folder")
    job.until(lambda: job.status()["storage"]["missed"], "a checkpoint that is not written")
    job.finish()
    job.ends(94)
    report = job.report()
    kept = steps_at(tmp_path / "away")[0]
    assert report.storage and report.storage.missed and report.code == 94
    assert (report.storage.step, report.storage.missed.step) == (kept, report.step) and kept < report.step
    closing = job.sentences()[-1]
    assert storage_said(report.storage) in closing and report.storage.missed.why in closing
    shown = holdfast("report", str(job.run_dir), folder=tmp_path)
    assert report.storage.missed.why in " ".join(shown.stdout.split())


# A fleet of local nodes that takes them all away at the instant in a file, and has no others.
ENDING_FLEET = """
import os
import msgspec
import holdfast.fleet.local_process_fleet as local
survey, acquire = local.survey_node, local.LocalFleet.acquire
def survey_node(folder):
    seen = survey(folder)
    if seen.state == "up" and os.path.exists({note!r}):
        at, _, why = open({note!r}).read().partition(" ")
        seen = msgspec.structs.replace(seen, ends_at=float(at), reason=why)
    return seen
async def acquire_first(fleet, count, evicted=()):
    return () if os.path.exists({note!r}) and fleet.nodes() else await acquire(fleet, count, evicted)
local.survey_node, local.LocalFleet.acquire = survey_node, acquire_first
"""
# Each rank prints what it has saved.
MADE = SELDOM.replace("    ckpt.save(step)\n", "    ckpt.save(step)\n    print('made', step, flush=True)\n")


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [True, False])
def test_a_run_whose_nodes_are_all_taken_away_is_on_storage(start: Start, tmp_path: Path, preempted: bool) -> None:
    """A preemption is told while the job trains, a time limit is known from the start."""
    note, site, store = tmp_path / "ends-at", tmp_path / "site", tmp_path / "store"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ENDING_FLEET.format(note=str(note)))
    env = {"OWN_SERVER": "1", "PYTHONPATH": f"{site}:{ROOT}", "HOLDFAST_STORE": str(store)}
    if not preempted:
        note.write_text(f"{time.time() + 80}")
    job = start("--nnodes", "2", "--set", "recovery.leave_s=20", script=MADE, **env)
    job.trains()
    job.until(lambda: job.status()["step"] > 5, "some steps")
    if preempted:
        note.write_text(f"{time.time() + 20} preempted")
    job.ends(95, patience_s=100)
    [step] = steps_at(store)
    least = min(newest_made(job).values())
    assert 0 <= step - least <= 1, "the last step that both had made: what is printed comes a moment later"
    assert stored_step(job) == step and not job.report().incidents
    note.unlink()
    job.run_dir.rename(tmp_path / "first-run")
    again = start("--nnodes", "2", script=SELDOM, name="again", HOLDFAST_STORE=str(store), HOLDFAST_STEPS=str(step + 3))
    again.ends(0)
    assert said(again, "from") == [[str(step), "storage"]] * 2


def newest_made(job: Job) -> dict[str, int]:
    """The newest step that each rank has printed."""
    found = (re.fullmatch(r"\[rank (\d+)\] made (\d+)", line) for line in job.text().splitlines())
    return {one[1]: int(one[2]) for one in found if one}


# A file system that takes five seconds for 32 MiB; its entry point makes it known to fsspec.
SLOW_DISK = """
import time
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
class SlowFile(LocalFileOpener):
    def write(self, block):
        time.sleep(len(block) * 5 / (32 << 20))
        return super().write(block)
class SlowDisk(LocalFileSystem):
    protocol = "slowdisk"
    def _open(self, path, mode="rb", **kwargs):
        kind = SlowFile if "w" in mode else LocalFileOpener
        return kind(self._strip_protocol(path), mode, fs=self)
"""
LARGE = """
import os, sys, time
import torch
import holdfast
net = torch.nn.Linear(4000, 3000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ckpt = holdfast.Checkpointer(model=net, optimizer=optimizer, path=os.environ["HOLDFAST_STORE"], every=100000)
step = ckpt.restore() or 0
while not os.path.exists(f"{sys.argv[1]}/finish"):
    time.sleep(0.05)
    step += 1
    ckpt.save(step)
    holdfast.step(step)
"""


@pytest.mark.slow
def test_a_last_write_that_takes_long_shows_how_far_it_is(start: Start, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "slowdisk-1.0.dist-info").mkdir(parents=True)
    (packages / "slowdisk.py").write_text(SLOW_DISK)
    (packages / "slowdisk-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slowdisk\nVersion: 1.0\n"
    )
    entry = "[fsspec.specs]\nslowdisk = slowdisk:SlowDisk\n"
    (packages / "slowdisk-1.0.dist-info" / "entry_points.txt").write_text(entry)
    url, flags = f"slowdisk://{tmp_path}/store", ("--nproc-per-node", "1", "--shutdown-timeout", "60")
    job = start(*flags, script=LARGE, PYTHONPATH=str(packages), HOLDFAST_STORE=url)
    job.trains()
    job.process.send_signal(signal.SIGTERM)
    job.ends(143)
    [step] = steps_at(tmp_path / "store")
    form = rf"holdfast: n0: writing step {step} to {url}: (\S+) MiB of (\S+) MiB of rank 0 after (\d+) s"
    told = [found for line in job.sentences() if (found := re.fullmatch(form, line))]
    shown = [(float(one[1]), float(one[2]), int(one[3])) for one in told]
    assert shown and 5 <= shown[0][2] < 10, job.sentences()
    assert shown == sorted(shown) and all(8.0 <= written < whole < 48.0 for written, whole, _ in shown)
    assert stored_step(job) == step


@pytest.mark.slow
def test_the_next_run_does_not_go_on_from_what_is_in_doubt(start: Start, tmp_path: Path) -> None:
    """From step 23 on the loss is bad, in every launch, and each time it is on storage before anybody knows."""
    bad = """
    if step >= 23 and "HOLDFAST_GOOD" not in os.environ:
        ckpt.wait(20)
        loss = float("nan")
    holdfast.step(step, loss=loss)"""
    script = TRAIN.replace('"every": 5', '"every": 1').replace("\n    holdfast.step(step, loss=loss)", bad)
    store = tmp_path / "store"
    job = start("--nproc-per-node", "1", script=script, HOLDFAST_STORE=str(store))
    job.ends(93, patience_s=90)
    found = stored_checkpoints.find_checkpoints(str(store))
    assert [one.step for one in found if one.doubted and one.step > 22], "some were written"
    assert max(steps_at(store), default=0) < 23
    job.run_dir.rename(tmp_path / "bad-run")
    again = start(script=script, name="again", HOLDFAST_STORE=str(store), HOLDFAST_STEPS="40", HOLDFAST_GOOD="1")
    again.ends(0)
    assert int(said(again, "from")[0][0]) == max((one.step for one in found if one.ok), default=0)
    assert steps_at(store)[0] == 40


@pytest.mark.slow
def test_a_run_that_a_person_ends_is_on_storage(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    job = start("--nnodes", "2", script=SELDOM, HOLDFAST_STORE=str(store))
    job.trains()
    job.until(lambda: job.status()["step"] > 5, "some steps")
    done = holdfast("stop", "--run", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    job.until(lambda: job.process.poll() is not None, "the end of the job")
    [step] = steps_at(store)
    assert step > 5 and stored_step(job) == step


@pytest.mark.slow
def test_a_run_that_is_given_up_is_on_storage(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    always = "    if step == 12: raise KeyError('always')\n    optimizer.zero_grad()\n"
    script = SELDOM.replace("    optimizer.zero_grad()\n", always)
    job = start("--nnodes", "2", script=script, HOLDFAST_STORE=str(store))
    job.ends(93)
    [step] = steps_at(store)
    assert step == 11, "what all ranks held when it was raised"
    assert stored_step(job) == step
