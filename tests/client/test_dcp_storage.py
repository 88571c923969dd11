"""Users of torch.distributed.checkpoint change one argument: the same state, from memory where there is an agent."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from holdfast.checkpoint import checkpoint_publication
from holdfast.checkpoint.dcp import Reader, Writer, decode_metadata
from holdfast.checkpoint.manifest import MANIFEST
from holdfast.checkpoint.storage_errors import CorruptError, TakenOverError
from holdfast.wire.progress_environment import KEEPER
from tests.client.conftest import ROOT, Ended, Zygote
from tests.client.fake_keeper import FakeKeeper
from tests.client.job import same

Group = Callable[[], list[dict[str, str]]]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Linear(50, 5).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return {
        **state,
        "epoch": seed,
        "names": ["x"] * (100 * seed),
        "deep": {"list": [torch.full((3,), seed), {"k": 1.5 * seed}]},
    }


def test_on_storage(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), keep=2)
    for step in (3, 5, 8):
        torch_dcp.save(state_of(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000005", "step-00000008"]
    for reader in (Reader(str(tmp_path)), Reader(str(tmp_path / "step-00000008"))):
        loaded = state_of(1)
        torch_dcp.load(loaded, storage_reader=reader)
        assert same(loaded, state_of(8))
    older = state_of(1)
    torch_dcp.load(older, checkpoint_id=tmp_path / "step-00000005")  # by torch's own reader
    assert same(older, state_of(5))


def test_two_writers_of_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other is well; of two at the same time one is refused, and told what it needs."""
    first, second = Writer(str(tmp_path)), Writer(str(tmp_path))
    torch_dcp.save(state_of(1), checkpoint_id="step-1", storage_writer=first)
    torch_dcp.save(state_of(2), checkpoint_id="step-2", storage_writer=second)
    collect = checkpoint_publication.collect_parts

    def interrupted(*args: Any) -> Any:
        monkeypatch.undo()
        torch_dcp.save(state_of(4), checkpoint_id="step-4", storage_writer=second)
        return collect(*args)

    monkeypatch.setattr(checkpoint_publication, "collect_parts", interrupted)
    with pytest.raises(CheckpointException, match=TakenOverError.__name__):
        torch_dcp.save(state_of(3), checkpoint_id="step-3", storage_writer=first)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 4)]


def test_two_writers_of_one_step(tmp_path: Path) -> None:
    """The second is told so, and replaces nothing; its own step a writer may save again."""
    first, second = Writer(str(tmp_path)), Writer(str(tmp_path))
    for seed in (1, 2):
        torch_dcp.save(state_of(seed), checkpoint_id="step-1", storage_writer=first)
    told = f"another writer of this job has saved step 1 in {tmp_path}: each needs a path of its own"
    with pytest.raises(CheckpointException, match=told):
        torch_dcp.save(state_of(3), checkpoint_id="step-1", storage_writer=second)
    loaded = state_of(1)
    torch_dcp.load(loaded, storage_reader=Reader(str(tmp_path)))
    assert same(loaded, state_of(2))


def test_steps_count_by_themselves(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path), keep=0)
    for number in range(3):
        torch_dcp.save(state_of(number), storage_writer=writer)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in range(3)]


def test_in_memory(keeper: FakeKeeper, tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "checkpoints"), slots=2)
    for step in (7, 2, 3):
        torch_dcp.save(state_of(step), checkpoint_id=str(step), storage_writer=writer)
    want = keeper.wants[0]
    assert [(sealed.step, sealed.flags) for sealed in keeper.arena().list_sealed()] == [(3, 4), (2, 4)]
    assert want.storage is not None and want.storage.url == str(tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists(), "writing is the keeper's work"
    loaded = state_of(6)
    torch_dcp.load(loaded, storage_reader=Reader(str(tmp_path / "checkpoints")))
    assert same(loaded, state_of(3))
    # What the keeper would write is a checkpoint that torch alone can read.
    folder = tmp_path / "by-hand"
    folder.mkdir()
    image = keeper.arena().slot_image(keeper.arena().list_sealed()[0].slot)
    (folder / "__0_0.distcp").write_bytes(b"".join(image[start:end] for start, end in want.share))
    metadata = Path(want.metadata_path).read_bytes()
    (folder / ".metadata").write_bytes(metadata)
    assert "model.0.weight" in decode_metadata(metadata).state_dict_metadata
    again = state_of(6)
    torch_dcp.load(again, checkpoint_id=folder)
    assert same(again, state_of(3))


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=MANIFEST):
        torch_dcp.load(state_of(1), storage_reader=Reader(str(tmp_path)))


def test_which_are_in_doubt_is_unknown(tmp_path: Path) -> None:
    torch_dcp.save(state_of(1), checkpoint_id="1", storage_writer=Writer(str(tmp_path)))
    (tmp_path / ".holdfast-doubts.json").write_bytes(b"")
    with pytest.raises(CheckpointException, match=re.escape(f" {tmp_path}/.holdfast-doubts.json ")):
        torch_dcp.load(state_of(2), storage_reader=Reader(str(tmp_path)))


def test_a_flipped_byte(tmp_path: Path) -> None:
    torch_dcp.save(state_of(1), checkpoint_id="1", storage_writer=Writer(str(tmp_path)))
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointException, match=CorruptError.__name__):
        torch_dcp.load(state_of(2), storage_reader=Reader(str(tmp_path)))


RANKS = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from holdfast.checkpoint.dcp import Reader, Writer
from tests.client.rank_job import made

how, step, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")

def state(seed):
    model = made(how, seed)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "seed": seed}

writer = Writer(path)
if step:
    for number in range(1, step + 1):
        dcp.save(state(number), checkpoint_id=str(number), storage_writer=writer)
loaded = state(99)
dcp.load(loaded, storage_reader=Reader(path))
wanted = state(loaded["seed"])
local = lambda tensor: getattr(tensor, "_local_tensor", tensor)
assert all(torch.equal(local(t), local(wanted["model"][name])) for name, t in loaded["model"].items())
print(loaded["seed"], flush=True)
os._exit(0)
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    [
        "ddp alone",
        "fsdp agent",
        pytest.param("ddp agent", marks=pytest.mark.slow),
        pytest.param("fsdp alone", marks=pytest.mark.slow),
    ],
)
def test_ranks(warm: Zygote, group: Group, keeper: FakeKeeper, tmp_path: Path, case: str) -> None:
    how, agent = case.split()[0], case.endswith("agent")
    script, path = tmp_path / "script.py", str(tmp_path / "checkpoints")
    script.write_text(RANKS)
    told = {"WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), KEEPER: str(keeper.path) if agent else ""}

    def run(*argv: str) -> list[Ended]:
        envs = [env | told for env in group()[:2]]
        return [warm.wait(rank) for rank in warm.forks(envs, str(script), *argv)]

    for steps in ("3", "0"):
        ended = run(how, steps, path)
        assert [(one.code, one.out) for one in ended] == [(0, "3\n")] * 2, ended
    assert Path(path).exists() != agent
