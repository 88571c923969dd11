"""A Checkpointer without an agent: checkpoints are made by the rank itself."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.state import StateError
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
    assert "step-00000003 is left out: __0_0.distcp: block 0" in capfd.readouterr().err
    for file in files[:2]:
        _flip(file)
    with pytest.raises(StateError, match="none can be restored"):
        Job(1, **asked).ckpt.restore()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_storage_that_fails_stops_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    job = Job(0, path=tmp_path / "file" / "checkpoints", every=1)
    job.train(1, 1)
    job.ckpt.close()
    assert job.ckpt.save(2)
    job.ckpt.close()
    assert "step 1 was not written" in capfd.readouterr().err


def test_retention(tmp_path: Path) -> None:
    job = Job(0, path=tmp_path, every=1, keep=2, keep_every=4)
    for step in range(1, 8):
        job.train(step, step)
        job.ckpt.close()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (4, 6, 7)]
