"""Of a trainer's own checkpoints the newest whole one is found, whatever a kill has left of the others."""

import pickle  # noqa: TID251 to write what Megatron writes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

from holdfast.checkpoint.foreign_file_faults import distcp_fault, first_fault
from holdfast.trainers import newest_trainer_checkpoint
from holdfast.trainers.newest_trainer_checkpoint import OwnCheckpoint, find_own_checkpoint
from tests.trainers.played_ranks import PlayedRanks

FILES = ("model.safetensors", "optimizer.pt", "state.json")


class LocalRank(dict[str, str]):
    """The environment of ranks of which a node has two."""

    def __init__(self, ranks: PlayedRanks) -> None:
        self._ranks = ranks

    def get(self, name: str, default: Any = None) -> Any:
        return str(self._ranks.rank % 2) if name == "LOCAL_RANK" else default


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
        f"holdfast: {tmp_path}/checkpoint-11 is left out: model.safetensors is cut short; "
        f"{tmp_path}/checkpoint-10, the newest whole one, is used\n"
    )


def test_none_is_read_that_is_older_than_a_whole_one(tmp_path: Path) -> None:
    for step in (9, 10, 11, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    read = []

    def fault_of_newest(folder: Path) -> str:
        read.append(folder.name)
        return "is half" if folder.name == "checkpoint-12" else ""

    found = find_own_checkpoint(tmp_path, r"checkpoint-(\d+)", fault_of_newest)
    assert found and found.step == 11
    assert read == ["checkpoint-12", "checkpoint-11"]


def test_every_node_must_find_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 2 are the first of two nodes; the second does not see step 12 yet, and cannot read 11."""
    for step in (9, 10, 11, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    ranks, read, listed = PlayedRanks(4), list[tuple[int, str]](), newest_trainer_checkpoint.list_newest_first
    monkeypatch.setattr(newest_trainer_checkpoint, "RankWorld", lambda: ranks)
    monkeypatch.setattr(newest_trainer_checkpoint, "os", SimpleNamespace(environ=LocalRank(ranks)))
    monkeypatch.setattr(newest_trainer_checkpoint, "list_newest_first", lambda *args: listed(*args)[ranks.rank == 2 :])

    def fault_of_eleven(folder: Path) -> str:
        read.append((ranks.rank, folder.name))
        return "it is half" if folder.name == "checkpoint-11" and ranks.rank == 2 else ""

    found = ranks.run(lambda rank: find_own_checkpoint(tmp_path, r"checkpoint-(\d+)", fault_of_eleven))
    assert found == [OwnCheckpoint(10, str(tmp_path / "checkpoint-10"))] * 4
    assert sorted(read) == [(rank, f"checkpoint-{step}") for rank in (0, 2) for step in (10, 11)]
    used = f"{tmp_path}/checkpoint-10, the newest whole one, is used\n"
    assert capsys.readouterr().err == (
        f"holdfast: {tmp_path}/checkpoint-12 is left out: not every node sees it; {used}"
        f"holdfast: {tmp_path}/checkpoint-11 is left out: it is half; {used}"
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


# Of an archive of torch.save: where an entry of the directory begins, a byte in it, and a bit of that.
PLACES = {
    "a name that is no text": (b"PK\1\2", 46, 0x80),
    "more bytes than there are": (b"PK\1\2", 26, 0x80),
    "more bytes than it had": (b"PK\1\2", 22, 0x80),
    "compressed": (b"PK\1\2", 10, 0x08),
    "a directory behind the file": (b"PK\6\6", 53, 0x80),
    "a directory before the file": (b"PK\6\6", 40, 0x01),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", PLACES)
def test_damage_to_the_directory_of_an_archive_is_a_fault_like_any_other(place: str, tmp_path: Path) -> None:
    entry, at, bit = PLACES[place]
    torch_dcp.save({"weight": torch.ones(100), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"moment": torch.ones(100)}, tmp_path / "optimizer.pt")
    assert not distcp_fault(tmp_path) and not first_fault([tmp_path / "optimizer.pt"])
    for name in ("__0_0.distcp", "optimizer.pt"):
        content = bytearray((tmp_path / name).read_bytes())
        content[content.index(entry) + at] ^= bit
        (tmp_path / name).write_bytes(content)
    assert distcp_fault(tmp_path) and first_fault([tmp_path / "optimizer.pt"])


@pytest.mark.parametrize("header", [b'{"a":{"data_offset":[0,4]}}', b'{"a":7}', b"[]"])
def test_damage_to_the_header_of_safetensors_is_a_fault_like_any_other(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert first_fault([path]).startswith("model.safetensors ")


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


def test_what_is_left_out_is_told_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An index of a checkpoint may name any file as missing."""
    newest_trainer_checkpoint.say_left_out({"ckpt/checkpoint-7": "x\x1b[2J\nholdfast: all is well is missing"}, "")
    assert capsys.readouterr().err == (
        "holdfast: ckpt/checkpoint-7 is left out: x holdfast: all is well is missing; none is whole\n"
    )
