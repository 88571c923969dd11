"""Checkpoints that trainers write: they are found, and what is missing, cut short or damaged is told.

The files are of the forms that DeepSpeed, Megatron and torch.distributed.checkpoint write.
"""

import json
import pickle  # noqa: TID251  # of this test's own making
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as torch_dcp

from holdfast.checkpoint.manifest import MANIFEST
from holdfast.checkpoint.pickle_outline import Blank, OutlineError, outline_pickle
from holdfast.checkpoint.trainer_checkpoints import find_trainer_checkpoints, verify_trainer_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write_deepspeed(folder: Path, replicas: int = 2, slices: int = 1, *, told: bool = True) -> Path:
    """Files as the engine names them, with the counts that it keeps in each part of the model."""
    folder.mkdir(parents=True)
    counts = {"dp_world_size": replicas, "mp_world_size": slices} if told else {}
    for part in range(slices):
        model = {"module": {"weight": torch.ones(50)}, "global_steps": 10, "args": Path("x"), **counts}
        torch.save(model, folder / f"mp_rank_{part:02d}_model_states.pt")
        for replica in range(replicas):
            name = f"bf16_zero_pp_rank_{replica}_mp_rank_{part:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": {"step": torch.ones(9)}}, folder / name)
    return folder


def write_distcp(folder: Path) -> Path:
    torch_dcp.save({"weight": torch.ones(100), "step": 7}, checkpoint_id=folder, no_dist=True)
    return folder


def write_megatron(folder: Path) -> Path:
    write_distcp(folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"iteration": 20, "args": None}, folder / "common.pt")
    return folder


def write_old_megatron(folder: Path) -> Path:
    for rank in ("mp_rank_00", "mp_rank_01"):
        (folder / rank).mkdir(parents=True)
        torch.save({"iteration": 20, "model": torch.ones(60)}, folder / rank / "model_optim_rng.pt")
    return folder


def remove(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = content.index(torch.ones(4).numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)


WRITERS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "global_step10": (write_deepspeed, "DeepSpeed", "mp_rank_00_model_states.pt"),
    "iter_0000020": (write_megatron, "Megatron", "__0_0.distcp"),
    "iter_0000030": (write_old_megatron, "Megatron", "mp_rank_01/model_optim_rng.pt"),
    "step-40": (write_distcp, "torch.distributed.checkpoint", "__0_0.distcp"),
}


def test_they_are_found_with_their_steps_newest_first(tmp_path: Path) -> None:
    for name, (write, _, _) in WRITERS.items():
        write(tmp_path / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metadata.json").write_text("{}")  # of something else
    ours = write_distcp(tmp_path / "step-00000050")
    (ours / MANIFEST).write_text("{}")
    found = find_trainer_checkpoints(str(tmp_path))
    assert [(one.step, Path(one.url).name, one.trainer, one.ok) for one in found] == [
        (int(name.strip("abcdefghijklmnopqrstuvwxyz_-")), name, trainer, True)
        for name, (_, trainer, _) in reversed(WRITERS.items())
    ]
    assert found[-1].files == 3 and found[-1].bytes > 1000
    assert find_trainer_checkpoints("s3://bucket/x") == find_trainer_checkpoints(str(tmp_path / "none")) == ()


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_missing_or_cut_short_is_seen_at_a_look_and_damage_when_read(name: str, tmp_path: Path) -> None:
    write, _, file = WRITERS[name]
    folder = write(tmp_path / name)
    assert verify_trainer_checkpoint(str(folder)).fault == ""
    whole = (folder / file).read_bytes()
    for damage, seen in ((cut_short, True), (remove, True), (flip_bit, False)):
        (folder / file).write_bytes(whole)
        damage(folder / file)
        [one] = find_trainer_checkpoints(str(tmp_path))
        assert (one.ok, bool(one.why)) == (not seen, seen)
        assert not seen or file in one.why or Path(file).name in one.why
        assert Path(file).name in verify_trainer_checkpoint(str(folder)).fault, damage


def test_a_part_of_deepspeed_that_is_missing_is_known_by_the_counts(tmp_path: Path) -> None:
    last = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    told = write_deepspeed(tmp_path / "a" / "global_step5", slices=2)
    untold = write_deepspeed(tmp_path / "b" / "best", told=False)
    assert [one.step for one in find_trainer_checkpoints(str(tmp_path / "b"))] == [10], "its tag has no number"
    checked = "6 files, the CRC-32 of every record, and that all parts are there"
    assert verify_trainer_checkpoint(str(told)).checked == checked
    parts = "whether parts with higher numbers are missing, as it does not tell how many it has"
    assert verify_trainer_checkpoint(str(untold)).unchecked == f"{parts}; whether all files are of one write"
    for path in told.glob("*rank_1_*"):
        path.unlink()
    [one] = find_trainer_checkpoints(str(tmp_path / "a"))
    assert one.why == "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"
    write_deepspeed(tmp_path / "c" / "global_step5", slices=2)
    (tmp_path / "c" / "global_step5" / last).unlink()
    assert find_trainer_checkpoints(str(tmp_path / "c"))[0].why == f"{last} is missing"


def test_a_write_of_dcp_that_was_broken_off_has_no_metadata(tmp_path: Path) -> None:
    (write_distcp(tmp_path / "step-9") / ".metadata").unlink()
    [one] = find_trainer_checkpoints(str(tmp_path))
    assert (one.step, one.why) == (9, ".metadata is missing: it is written last")
    assert verify_trainer_checkpoint(one.url).fault == ".metadata is missing"


def test_metadata_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = write_distcp(tmp_path / "step-9")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../etc/passwd"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    [one] = find_trainer_checkpoints(str(tmp_path))
    assert "'../../etc/passwd'" in one.why
    assert "'../../etc/passwd'" in verify_trainer_checkpoint(one.url).fault


class Spiteful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return sys.exit, (3,)


def test_a_pickle_runs_nothing() -> None:
    found = outline_pickle(pickle.dumps({"a": 1, "b": Spiteful(), "c": [Path("x"), 2]}))
    assert found["a"] == 1 and isinstance(found["b"], Blank) and found["c"][1] == 2
    with pytest.raises(OutlineError):
        outline_pickle(b"\x80\x04")
    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(Blank())


def test_neither_torch_nor_a_trainer_is_needed() -> None:
    code = "import sys, holdfast.checkpoint.trainer_checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
