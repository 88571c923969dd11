"""A Checkpointer without an agent: checkpoints are made by the rank itself."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.state_image import StateError
from holdfast.checkpoint.stored_checkpoints import find_checkpoints, mark_doubts
from holdfast.client.checkpointing import rival_run
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.model.state_doubt import Doubt
from tests.client.conftest import Zygote
from tests.client.job import OPTIMIZERS, Job, same


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_from_storage(tmp_path: Path, how: str) -> None:
    asked: dict[str, Any] = {"path": tmp_path / "checkpoints", "every": 5}
    first = Job(0, OPTIMIZERS[how], **asked)
    assert first.ckpt.restore() == 0
    first.train(1, 5)
    first.ckpt.close()
    wanted = first.train(6, 9, save=False).everything()
    again = Job(1, OPTIMIZERS[how], **asked)
    assert again.ckpt.restore() == 5
    assert again.ckpt.restored_from == "storage"
    assert same(again.train(6, 9).everything(), wanted)
    again.ckpt.close()


def test_a_corrupt_checkpoint_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"path": tmp_path / "checkpoints", "every": 1}
    first = Job(0, **asked)
    for step in (1, 2, 3):
        first.train(step, step)
        first.ckpt.close()
    files = sorted((tmp_path / "checkpoints").glob("step-*/__0_0.distcp"))
    assert len(files) == 3
    _flip(files[2])
    again = Job(1, **asked)
    assert again.ckpt.restore() == 2
    assert re.search(r"step-00000003 .*__0_0\.distcp: block 0", capfd.readouterr().err)
    for file in files[:2]:
        _flip(file)
    with pytest.raises(StateError, match=str(tmp_path)):
        Job(1, **asked).ckpt.restore()


def test_no_checkpoint_whose_standing_is_unknown_is_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"path": tmp_path, "every": 1}
    first = Job(0, **asked)
    first.train(1, 3)
    first.ckpt.close()
    (tmp_path / ".holdfast-doubts.json").write_text("[{")
    again = Job(1, **asked)
    with pytest.raises(StateError, match=f"{tmp_path}/.holdfast-doubts.json "):
        again.ckpt.restore()
    [said] = [line for line in capfd.readouterr().err.splitlines() if f"{tmp_path}/.holdfast-doubts.json " in line]
    count = len(list(tmp_path.glob("step-*")))  # a step that comes while another one is being written is left out
    assert said.startswith(f"holdfast: {count} of {count} checkpoints ")
    with pytest.raises(StateError, match=rf"{tmp_path} .* step 3\b.* step 1\b"):
        Job(1, **asked).train(1, 1)
    (tmp_path / ".holdfast-doubts.json").unlink()
    assert Job(1, **asked).ckpt.restore() == 3


def test_a_start_from_step_0_despite_checkpoints_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"path": tmp_path, "every": 1}
    first = Job(0, **asked)
    for step in (1, 2, 3):
        first.train(step, step)
        first.ckpt.close()
    run = find_checkpoints(str(tmp_path))[0].author.run
    mark_doubts(str(tmp_path), run, (Doubt(generation=sys.maxsize, not_after=0),))
    capfd.readouterr()
    assert Job(1, **asked).ckpt.restore() == 0
    [told] = [line for line in capfd.readouterr().err.splitlines() if "from step 0" in line]
    assert f"all 3 checkpoints in {tmp_path} " in told


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_path_that_another_run_writes_to_is_read_and_not_written(tmp_path: Path, warm: Zygote) -> None:
    path = tmp_path / "checkpoints"
    first = Job(0, path=path, every=1)
    first.train(1, 1)
    first.ckpt.wait()
    other = tmp_path / "other.py"
    other.write_text(f"""
import torch, holdfast
model = torch.nn.Linear(2, 1)
ckpt = holdfast.Checkpointer(model=model, path={str(path)!r}, every=1)
ckpt.save(7)
""")
    done = warm.run(str(other))
    refused = done.err.splitlines()[-1]
    assert done.code == 1 and f"(pid {os.getpid()} " in refused and f" {path} now (step 1" in refused, done.err
    assert [one.step for one in find_checkpoints(str(path))] == [1]
    first.ckpt.close()
    done = warm.run(str(other))
    assert done.code == 0 and [one.step for one in find_checkpoints(str(path))] == [7, 1], done.err


def test_a_run_that_began_to_write_later_is_seen_at_the_first_checkpoint(tmp_path: Path, warm: Zygote) -> None:
    """Both were started before either had written: the second one trained to its end, and nothing of it was kept."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, signal, time
import torch, holdfast
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.storage_owner import take_ownership
url = {str(tmp_path / "checkpoints")!r}
ckpt = holdfast.Checkpointer(model=torch.nn.Linear(2, 1), path=url, every=2)
told, tell = os.pipe()
if not (rival := os.fork()):
    take_ownership(url, Author(1, "first"))
    os.write(tell, b"!")
    time.sleep(600)
os.read(told, 1)
try:
    ckpt.save(1)
    print("saved 1", flush=True)
    ckpt.save(2)
finally:
    os.kill(rival, signal.SIGKILL)
    os.waitpid(rival, 0)
""")
    done = warm.run(str(script))
    assert done.code == 1 and "saved 1" in done.out, done.err
    assert StateError.__name__ in done.err.splitlines()[-1] and "run first " in done.err, done.err


def test_of_two_runs_that_came_to_the_path_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["", "", "RIVAL", "", "", "", "too late"]
    monkeypatch.setattr(rival_run, "find_rival", lambda url, run_id: found.pop(0))
    rival = rival_run.RivalRun("/checkpoints", RankWorld(), with_agent=False)
    rival.check_due()
    with pytest.raises(StateError, match="RIVAL"):
        rival.check_due()
    alone = rival_run.RivalRun("/checkpoints", RankWorld(), with_agent=False)
    for _ in range(3):
        alone.check_due()
    assert found == ["too late"], "the third checkpoint costs no look"


def test_storage_that_fails_stops_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(0, path=tmp_path / "checkpoints", every=1)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("in the way")
    job.train(1, 1)
    job.ckpt.close()
    assert job.ckpt.save(2)
    job.ckpt.close()
    assert re.search(r"step 1\b.*checkpoints", capfd.readouterr().err)


def steps_in(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(str(folder)) if found.ok]


def test_the_end_keeps_the_newest_step(tmp_path: Path) -> None:
    job = Job(0, path=tmp_path, every=20).train(1, 49)
    job.ckpt.wait()
    assert steps_in(tmp_path) == [40, 20]
    job.ckpt.close()
    assert steps_in(tmp_path) == [49, 40, 20]
    job.ckpt.close()
    assert steps_in(tmp_path) == [49, 40, 20], "once"
    again = Job(1, path=tmp_path, every=20)
    assert again.ckpt.restore() == 49
    again.ckpt.close()
    assert steps_in(tmp_path) == [49, 40, 20], "what was restored lies there"


@pytest.mark.slow
def test_a_script_that_does_not_close_keeps_it_too(tmp_path: Path) -> None:
    script = f"""
import torch, holdfast
net = torch.nn.Linear(2, 2)
ckpt = holdfast.Checkpointer(model=net, path={str(tmp_path / "ckpt")!r}, every=1000)
ckpt.restore()
ckpt.save(7)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 3
    assert steps_in(tmp_path / "ckpt") == [7]


def test_a_step_that_is_forced(tmp_path: Path) -> None:
    job = Job(0, path=tmp_path, every=1000).train(1, 3)
    assert job.ckpt.save(4, force=True) and job.ckpt.save(5, force=True)
    job.ckpt.wait()
    assert steps_in(tmp_path) == [5, 4]
    with pytest.raises(ValueError, match="path="):
        Job(0).ckpt.save(1, force=True)


def test_retention(tmp_path: Path) -> None:
    job = Job(0, path=tmp_path, every=1, keep=2, keep_every=4)
    for step in range(1, 8):
        job.train(step, step)
        job.ckpt.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (4, 6, 7)]
