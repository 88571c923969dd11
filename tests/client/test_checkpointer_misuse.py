"""A Checkpointer that is used wrongly says so at once, in one sentence."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.wire import rank_keeper_messages
from tests.client.fake_keeper import FakeKeeper
from tests.client.job import Job


def test_extras_that_outgrow_their_room(keeper: FakeKeeper, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(0).train(1, 1)
    job.extra["epoch"] = "x" * 1_000_000
    assert not job.ckpt.save(2) and not job.ckpt.save(3)
    assert len(capfd.readouterr().err.splitlines()) == 1, "it is said once"
    job.extra["epoch"] = 1
    assert job.ckpt.save(4)
    assert Job(1).ckpt.restore() == 4


def two_tensors() -> nn.Module:
    """A layer whose weights only stand for others, as quantized weights and 8-bit optimizers' states do."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    return layer


MISUSES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "nothing": (ValueError, "model, or state_dict", {}),
    "both": (ValueError, "state_dict", {"model": nn.Linear(1, 1), "state_dict": {}}),
    "load": (ValueError, "load=", {"model": nn.Linear(1, 1), "load": print}),
    "no module": (TypeError, "model is a dict, not a module", {"model": {}}),
    "no optimizer": (TypeError, "optimizer is a int", {"model": nn.Linear(1, 1), "optimizer": [3]}),
    "strange": (
        ValueError,
        "AdamW has 1 parameters",
        {"model": nn.Linear(1, 1), "optimizer": torch.optim.AdamW([torch.ones(1, requires_grad=True)])},
    ),
    "meta": (ValueError, "^weight .*meta", {"model": nn.Linear(1, 1, device="meta")}),
    "every": (ValueError, "^every ", {"model": nn.Linear(1, 1), "path": "x", "every": "soon"}),
    "every 0": (ValueError, "^every ", {"model": nn.Linear(1, 1), "path": "x", "every": 0}),
    "no path": (ValueError, "path=", {"model": nn.Linear(1, 1), "every": 5}),
    "keep": (ValueError, "keep and keep_every", {"model": nn.Linear(1, 1), "path": "x", "keep": -1}),
    "slots": (ValueError, "slots", {"model": nn.Linear(1, 1), "slots": 1}),
    "extra": (StateError, r"extra\['f'\] gives a function", {"model": nn.Linear(1, 1), "extra": {"f": print}}),
    "made of others": (
        StateError,
        r"^w is a TwoTensor, .*state_dict=",
        {"state_dict": {"w": TwoTensor(torch.zeros(300, 300), torch.zeros(300, 300))}},
    ),
    "weights made of others": (StateError, r"^model\.weight is a TwoTensor", {"model": two_tensors()}),
    "sparse": (StateError, "^x ", {"state_dict": {"x": torch.eye(2).to_sparse()}}),
}


@pytest.mark.parametrize("how", MISUSES)
def test_misuse(how: str) -> None:
    error, sentence, asked = MISUSES[how]
    if how == "extra":
        asked = asked | {"extra": {"f": lambda: 1}}
    with pytest.raises(error, match=sentence):
        Checkpointer(**asked)


def test_misuse_of_steps() -> None:
    ckpt = Checkpointer(model=nn.Linear(1, 1))
    for step in (-1, 1.0, None, "3", True):
        with pytest.raises(ValueError, match=re.escape(repr(step))):
            ckpt.save(step)  # type: ignore[arg-type]
    assert ckpt.save(0) and ckpt.save(5)
    with pytest.raises(ValueError, match=r"step 5\b.*step 5\b"):
        ckpt.save(5)
    with pytest.raises(RuntimeError, match=r"restore\(\)"):
        ckpt.restore()


def stored(path: Path, model: nn.Module, *, optimized: bool = True) -> None:
    """A checkpoint of step 4."""
    optimizer = torch.optim.AdamW(model.parameters()) if optimized else None
    ckpt = Checkpointer(model=model, optimizer=optimizer, path=path)
    ckpt.save(4)
    ckpt.close()


def told(model: nn.Module, path: Path, *, optimized: bool = True) -> str:
    """What restoring it raises; nothing is removed."""
    before = sorted(path.rglob("*"))
    optimizer = torch.optim.AdamW(model.parameters()) if optimized else None
    ckpt = Checkpointer(model=model, optimizer=optimizer, path=path)
    with pytest.raises(StateError) as raised:
        ckpt.restore()
    assert sorted(path.rglob("*")) == before
    assert raised.value.__cause__ is None and raised.value.__context__ is None, "one fact, one traceback"
    return str(raised.value)


def test_an_optimizer_that_was_forgotten(tmp_path: Path) -> None:
    stored(tmp_path, nn.Linear(3, 2))
    sentence = told(nn.Linear(3, 2), tmp_path, optimized=False)
    assert sentence.startswith(f"{tmp_path}/step-00000004 ")
    assert "optimizer.state.bias.exp_avg and 5 more" in sentence and "optimizer=" in sentence


def test_an_optimizer_that_was_not_there_before(tmp_path: Path) -> None:
    stored(tmp_path, nn.Linear(3, 2), optimized=False)
    assert "optimizer.state.bias.exp_avg is 2 here" in told(nn.Linear(3, 2), tmp_path)


def test_a_model_that_was_changed(tmp_path: Path) -> None:
    stored(tmp_path, nn.Linear(3, 2))
    sentence = told(nn.Linear(3, 4), tmp_path)
    assert sentence.startswith(f"{tmp_path}/step-00000004 ")
    assert "model.bias is 2 there and 4 here" in sentence and "5 more" in sentence
    assert "model.bias is 2 there" in told(nn.Linear(3, 2, bias=False), tmp_path)


def test_a_path_that_is_in_use(tmp_path: Path) -> None:
    """Who starts anew beside a newer checkpoint has most likely forgotten to restore it."""
    stored(tmp_path, nn.Linear(3, 2))
    ckpt = Checkpointer(model=nn.Linear(3, 2), path=tmp_path, every=1, keep=1)
    with pytest.raises(StateError, match=rf"{tmp_path} .*step 4\b.*step 1\b.*restore\(\)"):
        ckpt.save(1)
    ckpt.close()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]
    later = Checkpointer(model=nn.Linear(3, 2), path=tmp_path, every=1)
    assert later.save(5), "who goes on by means of his own may"
    later.close()


@pytest.mark.parametrize("where", ["file/ckpt", "/proc/nobody/makes/this", "/proc/self/cmdline"])
def test_a_path_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match=str(tmp_path / where)):
        Checkpointer(model=nn.Linear(1, 1), path=tmp_path / where)


def test_a_path_that_could_be_written_before(
    tmp_path: Path, keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that has come far is not ended for storage that is away for a while."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOLDFAST_GENERATION", "2")
    Checkpointer(model=nn.Linear(1, 1), path=tmp_path / "ckpt").save(3)
    again = Checkpointer(model=nn.Linear(1, 1), path=tmp_path / "file" / "ckpt")
    assert capfd.readouterr().err.startswith("holdfast: cannot write checkpoints: ")
    slot = keeper.arena().list_sealed()[0].slot
    keeper.answer = rank_keeper_messages.StateGrant(source="memory", step=3, arena=keeper._path(0), slot=slot)
    assert again.restore() == 3


def test_no_life_begins_at_step_0_without_its_storage(
    tmp_path: Path, keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOLDFAST_GENERATION", "2")
    for begin in (Checkpointer.restore, lambda ckpt: ckpt.save(1)):  # some scripts never call restore()
        again = Checkpointer(model=nn.Linear(1, 1), path=tmp_path / "file")
        with pytest.raises(StateError, match=f"{tmp_path}/file .*: {os.strerror(errno.ENOTDIR)}"):
            begin(again)


def test_many_ranks_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(StateError, match="init_process_group"):
        Checkpointer(model=nn.Linear(1, 1))


@pytest.mark.slow
def test_importing_holdfast_stays_light() -> None:
    code = "import sys, holdfast; assert 'torch' not in sys.modules; print(holdfast.Checkpointer.__name__)"
    told = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert told.stdout == "Checkpointer\n"


def test_holdfast_has_its_names_and_no_others() -> None:
    assert holdfast.Checkpointer is Checkpointer
    with pytest.raises(AttributeError, match=r"'holdfast'.*'nothing'"):
        _ = holdfast.nothing
