"""Of a trainer's own checkpoints the newest whole one is found, whatever a kill has left of the others."""

import pickle  # noqa: TID251 to write what Megatron writes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

from holdfast.checkpoint.file_faults import distcp_fault, first_fault
from holdfast.trainers.own_checkpoints import OwnCheckpoint, find_own_checkpoint

FILES = ("model.safetensors", "optimizer.pt", "state.json")


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(100)}, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save({"moment": torch.ones(100)}, folder / "optimizer.pt")
    (folder / "state.json").write_text('{"step": 1}')
    return folder


def fault_of(folder: Path) -> str:
    return first_fault(folder / name for name in FILES)


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(torch.ones(2).numpy().tobytes())  # in the middle of the tensor
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, damage) for name in FILES for damage in (remove, empty, cut_short)), ("optimizer.pt", flip_bit)],
)
def test_a_damaged_file_is_named(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint-1")
    assert fault_of(folder) == ""
    damage(folder / name)
    assert fault_of(folder).startswith(f"{name} ")


def test_the_newest_whole_one_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 10, 11):
        make_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    cut_short(tmp_path / "checkpoint-11" / "model.safetensors")
    found = find_own_checkpoint(tmp_path, r"checkpoint-(\d+)", fault_of)
    assert found == OwnCheckpoint(10, str(tmp_path / "checkpoint-10"))
    assert capsys.readouterr().err == (
        f"holdfast: {tmp_path}/checkpoint-11 is left out: model.safetensors is cut short\n"
    )


@pytest.mark.parametrize("there", [False, True])
def test_there_may_be_none(there: bool, tmp_path: Path) -> None:
    if there:
        remove(make_checkpoint(tmp_path / "out" / "checkpoint-1") / "state.json")
    assert find_own_checkpoint(tmp_path / "out", r"checkpoint-(\d+)", fault_of) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("__0_0.distcp", remove, "__0_0.distcp is missing"),
        ("__0_0.distcp", cut_short, "__0_0.distcp is cut short"),
        ("__0_0.distcp", flip_bit, "__0_0.distcp is damaged"),
        (".metadata", remove, ".metadata is missing"),
        (".metadata", empty, "it is not whole"),
    ],
)
def test_every_record_of_a_checkpoint_of_torch_is_read(
    name: str, damage: Callable[[Path], None], fault: str, tmp_path: Path
) -> None:
    torch_dcp.save({"weight": torch.ones(100), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    assert distcp_fault(tmp_path) == ""
    damage(tmp_path / name)
    assert distcp_fault(tmp_path).startswith(fault)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_plans_that_megatron_keeps_beside_the_rest_do_not_matter(tmp_path: Path) -> None:
    """As its `.metadata` holds them: the plan of every rank, which says once more what the rank has written."""
    state = {"weight": torch.ones(100), "step": 7}
    metadata = torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    planner = torch_dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    metadata.all_local_plans = [planner.create_local_plan()]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert distcp_fault(tmp_path) == ""
