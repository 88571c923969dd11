"""A script that may be replayed: what it is told, and that a replay keeps nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import dcp
from holdfast.checkpoint.keeper_client import KeeperClient
from holdfast.client.training import script_replay
from holdfast.client.training.parameter_hash import hash_tensors
from holdfast.model.replay_task import ReplayTask
from holdfast.wire.progress_environment import KEEPER
from holdfast.wire.replay_environment import NOTE, decode_signatures, replay_variables, signature_path
from tests.client.conftest import ENV, Zygote
from tests.client.fake_keeper import FakeKeeper
from tests.client.job import Job
from tests.client.one_rank_group import one_rank_group


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_replay, "_this", script_replay.ScriptReplay())


def replay_here(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: int = 3, not_after: int = -1) -> None:
    told = ReplayTask(name="1-1-h0", steps=steps, not_after=not_after)
    for name, value in replay_variables(told, str(folder / "replay")).items():
        monkeypatch.setenv(name, value)


def test_in_training_it_changes_nothing() -> None:
    before = torch.random.get_rng_state()
    replay = holdfast.replayable(seed=1)
    assert not replay and not replay.is_replay
    assert torch.equal(torch.random.get_rng_state(), before)
    assert replay.path("out/w.pt") == "out/w.pt"
    tensor = torch.ones(3)
    assert replay.boundary(tensor) is tensor
    assert not replay.done(1, [tensor])
    assert replay.marks == {}


def test_the_node_is_told_that_it_may_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEPER, str(tmp_path / "keeper.sock"))
    monkeypatch.setenv("HOLDFAST_GENERATION", "7")
    holdfast.replayable(seed=1)
    assert json.loads((tmp_path / NOTE).read_text()) == {"generation": 7, "seeded": True}
    holdfast.replayable()
    assert json.loads((tmp_path / NOTE).read_text())["seeded"] is False
    assert os.listdir(tmp_path) == [NOTE]
    (tmp_path / NOTE).unlink()
    monkeypatch.setenv("LOCAL_RANK", "1")
    holdfast.replayable(seed=1)
    assert os.listdir(tmp_path) == []


def test_what_a_replay_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path, steps=2)
    monkeypatch.setenv("RANK", "3")
    replay = holdfast.replayable(seed=5)
    assert replay and (replay.name, replay.steps) == ("1-1-h0", 2)
    assert Path(replay.folder).is_dir()
    assert Path(replay.path("s3://bucket/run/w.pt")) == tmp_path / "replay" / "w.pt"
    drawn = torch.rand(2)
    torch.manual_seed(5 + 3)
    assert torch.equal(torch.rand(2), drawn)
    tensor = torch.ones(4)
    assert not replay.done(1, [tensor])
    assert replay.done(2, [tensor])
    assert len(replay.marks) == 2 and replay.marks[1] != replay.marks[2]


@pytest.mark.parametrize(
    ("ranks", "shape", "layers"),
    [
        (8, (32, 1), 8),
        (8, (32, 4), 8),
        (8, (30, 4), 4),
        (8, (2, 2), 2),
        (1, (4, 4), 4),
        (32, (32, 4), 32),
        (0, (32, 4), 32),
    ],
)
def test_a_group_builds_its_part_of_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, shape: tuple[int, int], layers: int
) -> None:
    assert holdfast.replayable(seed=1).layers(*shape) == shape[0]
    told = ReplayTask(name="1-1-h0", steps=3, ranks=ranks, job_ranks=32)
    for name, value in replay_variables(told, str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(script_replay, "_this", script_replay.ScriptReplay())
    replay = holdfast.replayable(seed=1)
    assert (replay.ranks, replay.job_ranks) == (ranks, 32)
    assert replay.layers(*shape) == layers


def test_marks_tell_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path)

    def marks(flip: int, at: int) -> dict[int, int]:
        found = script_replay.ScriptReplay()
        for step in range(3):
            sent = torch.linspace(0, 1, 50)
            if step == at:
                sent.view(torch.int32)[7] ^= 1 << flip
            found.boundary(sent)
            found.done(step, [torch.ones(3)])
        return found.marks

    clean = marks(0, -1)
    for flip in (0, 13, 31):
        struck = marks(flip, 1)
        assert struck[0] == clean[0]
        assert struck[1] != clean[1] and struck[2] != clean[2], "what went wrong once stays visible"


def test_signatures_of_parts_add_up() -> None:
    parts = [torch.randn(10) for _ in range(4)]
    total = sum(int(hash_tensors([part])) for part in parts)
    assert total == sum(int(hash_tensors([part])) for part in reversed(parts))
    one = hash_tensors([torch.tensor([1.0, 2.0])])
    assert int(one) != int(hash_tensors([torch.tensor([1.0, 2.0000002])]))


def test_what_was_signed_reaches_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path)
    monkeypatch.setenv("RANK", "3")
    replay = holdfast.replayable(seed=1)
    replay.done(4, [torch.ones(2)])
    replay.boundary(torch.ones(3))
    replay.done(5, [torch.ones(2)])
    told = Path(signature_path(replay.folder, 3)).read_bytes()
    sent = int(hash_tensors([torch.ones(3)])) & (2**64 - 1)
    assert list(decode_signatures(told)) == [(4, replay.marks[4], None), (5, replay.marks[5], sent)]
    assert next(decode_signatures(b"1.0 2 -\nnonsense\n" + told)) == (4, replay.marks[4], None), (
        "nor is what we did not write"
    )
    assert list(decode_signatures(told[:-1])) == [(4, replay.marks[4], None)], "a line that is not whole is not read"


@pytest.mark.parametrize("wrapped", [True, False])
def test_gradients_are_signed_before_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    replay_here(monkeypatch, tmp_path)
    replay = holdfast.replayable(seed=1)
    with one_rank_group():
        net = torch.nn.Linear(3, 2)
        model = torch.nn.parallel.DistributedDataParallel(net) if wrapped else net
        script_replay.sign_gradients(model)
        model(torch.ones(1, 3)).sum().backward()
        replay.done(1)
    [(_, _, sent)] = decode_signatures(Path(signature_path(replay.folder, 0)).read_bytes())
    grads = sum(int(hash_tensors([p.grad])) for p in net.parameters() if p.grad is not None)
    assert sent == (grads & (2**64 - 1) if wrapped else None)


def test_sparse_gradients_are_signed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path)
    replay = holdfast.replayable(seed=1)
    with one_rank_group():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
        script_replay.sign_gradients(model)
        model(torch.tensor([1, 3, 1])).sum().backward()
        replay.done(1)
    [(_, _, sent)] = decode_signatures(Path(signature_path(replay.folder, 0)).read_bytes())
    assert sent


def test_a_checkpointer_keeps_nothing_in_a_replay(
    keeper: FakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {"path": tmp_path / "ckpt", "every": 1}
    monkeypatch.delenv(KEEPER)
    trained = Job(0, **asked)
    for step in (1, 2, 3):
        trained.train(step, step)
        trained.ckpt.close()
    before = sorted(path.name for path in (tmp_path / "ckpt").rglob("*"))
    monkeypatch.setenv(KEEPER, str(keeper.path))
    replay_here(monkeypatch, tmp_path, not_after=2)
    assert KeeperClient.for_this_rank() is None
    marks = []
    for _ in range(2):
        script_replay._this.read_environment()
        replay = holdfast.replayable(seed=0)
        again = Job(1, **asked)
        assert again.ckpt.restore() == 2, "no checkpoint after the one that was named"
        again.train(3, 5, save=False)
        assert not again.ckpt.save(5) and not again.ckpt.save(6)
        again.ckpt.close()
        marks.append(dict(replay.marks))
    assert marks[0] == marks[1] and list(marks[0]) == [5, 6]
    assert sorted(path.name for path in (tmp_path / "ckpt").rglob("*")) == before
    assert keeper.wants == {}, "the memory of the job was not touched"
    assert capfd.readouterr().err.count("holdfast: this is a replay") == 2


def test_torch_checkpoints_go_to_the_replay_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path)
    holdfast.replayable()
    assert dcp.Writer("s3://bucket/ckpt").checkpoint_id == str(tmp_path / "replay" / "ckpt")


def test_who_did_not_opt_in_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_here(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match=r"holdfast\.replayable\(\)"):
        Job(0)


SCRIPT = """
import os, sys, torch, holdfast
if len(sys.argv) > 1:
    holdfast.replayable()
p = torch.nn.Parameter(torch.ones(2))
opt = torch.optim.SGD([p], lr=0.1)
for step in range(5):
    p.grad = torch.ones(2)
    opt.step()
    holdfast.step(step)
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_in_a_fresh_interpreter_too(tmp_path: Path, arena: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = ENV | replay_variables(ReplayTask(name="1-1-h0", steps=3), str(tmp_path / "replay"))
    env["HOLDFAST_SLOT"] = f"{arena[0]}:0"
    for more, code in (([], script_replay.REFUSED), (["yes"], 0)):
        ended = subprocess.run([sys.executable, str(script), *more], env=env, timeout=100, check=False)
        assert ended.returncode == code


def test_it_ends_at_the_first_step_otherwise(warm: Zygote, tmp_path: Path, arena: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = replay_variables(ReplayTask(name="1-1-h0", steps=3), str(tmp_path / "replay"))
    env |= {"HOLDFAST_SLOT": f"{arena[0]}:0", "HOLDFAST_GENERATION": "2"}
    ended = warm.wait(warm.forks([env], str(script))[0])
    assert (ended.code, ended.out) == (script_replay.REFUSED, "")
    assert "holdfast.replayable()" in ended.err
    env["HOLDFAST_SLOT"] = f"{arena[0]}:1"
    assert warm.wait(warm.forks([env], str(script), "yes")[0]).out == "done\n"


def test_importing_it_costs_little() -> None:
    code = "import sys, holdfast; holdfast.replayable(seed=1); assert not {'torch', 'msgspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, timeout=60)
