"""A job that ends on purpose leaves its newest state on storage, and the next run goes on exactly there."""

import signal
from pathlib import Path

import pytest

from holdfast.checkpoint import stored_checkpoints
from holdfast.cli.terminal.quantity_text import storage_said
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_run_state import TRAIN, said
from tests.cli.test_update_command import holdfast

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
