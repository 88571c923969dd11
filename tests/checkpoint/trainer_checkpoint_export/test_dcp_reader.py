"""Checkpoints of torch.distributed.checkpoint as Megatron and TorchTitan write them, as whole named tensors."""

import pickle  # noqa: TID251  # of this test's own making
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.trainer_checkpoint_export.trainer_checkpoint_converter import (
    ExportForm,
    export_trainer_checkpoint,
)
from tests.checkpoint.trainer_checkpoint_export.test_zero_export import difference

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"decoder.weight": torch.arange(15.0).reshape(5, 3), "decoder.bias": torch.arange(7.0)}
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"


def write_chunks(folder: Path, tensors: dict[str, torch.Tensor], objects: tuple[str, ...] = ()) -> Path:
    """Each of two ranks writes one half of every tensor, along its first dimension."""
    folder.mkdir()
    metadata = Metadata({name: BytesStorageMetadata() for name in objects}, storage_data={})
    for rank in (0, 1):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            for name, tensor in tensors.items():
                half = len(tensor) // 2
                part = (tensor[half:] if rank else tensor[:half]).clone()
                offsets = torch.Size([rank * half, *[0] * (tensor.dim() - 1)])
                known = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [])
                found = metadata.state_dict_metadata.setdefault(name, known)
                assert isinstance(found, TensorStorageMetadata)
                found.chunks.append(ChunkStorageMetadata(offsets, part.shape))
                start = file.tell()
                torch.save(part, file)
                place = _StorageInfo(f"__{rank}_0.distcp", start, file.tell() - start)
                metadata.storage_data[MetadataIndex(name, offsets)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def megatron_states(weights: str) -> dict[str, torch.Tensor]:
    """As Megatron names them: 16 bits in the model, and masters and averages of 32."""
    found = {name: tensor.bfloat16() for name, tensor in WEIGHTS.items()}
    for n, kind in enumerate((weights, "exp_avg", "exp_avg_sq")):
        found |= {f"optimizer.state.{kind}.{name}": tensor + n + 0.001 for name, tensor in WEIGHTS.items()}
    return found


def write_megatron(folder: Path, weights: str = "param") -> Path:
    write_chunks(folder, megatron_states(weights), ("rng_state/shard_0_2", "rng_state/shard_1_2"))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    groups = [{"lr": 0.1, "step": 9}, {"lr": 0.1, "step": 9}]
    torch.save({"iteration": 9, "optimizer": {"optimizer": {"param_groups": groups}}}, folder / "common.pt")
    return folder


@pytest.mark.parametrize("weights", ["param", "fp32_param"])
def test_megatron(weights: str, tmp_path: Path) -> None:
    source = write_megatron(tmp_path / "iter_0000009", weights)
    made = export_trainer_checkpoint(str(source), tmp_path / "weights", ExportForm(prefix="model.", step=9))
    assert made.left_out == ("rng_state/shard_0_2", "rng_state/shard_1_2")
    expected = {name: tensor + 0.001 for name, tensor in WEIGHTS.items()}
    assert difference(load_file(made.files[0]), dict(sorted(expected.items()))) == ""
    export_trainer_checkpoint(str(source), tmp_path / "dcp", ExportForm(is_dcp=True, step=9))
    blank = {name: torch.zeros(tensor.shape) for name, tensor in WEIGHTS.items()}
    kept = {
        name: {"step": torch.tensor(0.0), "exp_avg": blank[name].clone(), "exp_avg_sq": blank[name].clone()}
        for name in blank
    }
    state: dict[str, Any] = {"model": blank, "optimizer": {"state": kept}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["step"] == 9 and difference(blank, expected) == ""
    for name, tensor in WEIGHTS.items():
        averages = {"exp_avg": tensor + 1 + 0.001, "exp_avg_sq": tensor + 2 + 0.001}
        assert difference(kept[name], {"step": torch.tensor(9.0)} | averages) == ""


def test_torchtitan(tmp_path: Path) -> None:
    averages = {f"optimizer.state.{name}.exp_avg": tensor + 1 for name, tensor in WEIGHTS.items()}
    source = write_chunks(tmp_path / "step-5", WEIGHTS | averages, ("dataloader", "optimizer.param_groups.lr"))
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(prefix="", step=5))
    names = {f"model.{name}": tensor for name, tensor in WEIGHTS.items()} | averages
    assert difference(load_file(made.files[0]), dict(sorted(names.items()))) == ""


def test_buckets_of_megatron_hold_nobody_knows_whose_values(tmp_path: Path) -> None:
    source = write_chunks(tmp_path / "iter_0000009", WEIGHTS | {BUCKET: torch.ones(22)})
    made = export_trainer_checkpoint(str(source), tmp_path / "weights", ExportForm(prefix="model."))
    assert load_file(made.files[0]).keys() == WEIGHTS.keys()
    with pytest.raises(StorageError, match=r"gbuf_idx_0.* fully_reshardable"):
        export_trainer_checkpoint(str(source), tmp_path / "dcp", ExportForm(is_dcp=True))
    with pytest.raises(StorageError):
        export_trainer_checkpoint(str(source), tmp_path / "ranks", ExportForm(ranks=2))


def change_metadata(folder: Path, how: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    how(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_out(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"


def leave_hole(metadata: Metadata) -> None:
    known = metadata.state_dict_metadata["decoder.bias"]
    assert isinstance(known, TensorStorageMetadata)
    known.chunks.pop()


def forget(metadata: Metadata) -> None:
    metadata.storage_data.popitem()


def enlarge(metadata: Metadata) -> None:
    known = metadata.state_dict_metadata["decoder.bias"]
    assert isinstance(known, TensorStorageMetadata)
    known.size = torch.Size([1 << 50])
    known.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 50]))]


def swap_sizes(metadata: Metadata) -> None:
    known = metadata.state_dict_metadata["decoder.bias"]
    assert isinstance(known, TensorStorageMetadata)
    known.chunks = [ChunkStorageMetadata(chunk.offsets, torch.Size([100])) for chunk in known.chunks]


@pytest.mark.parametrize("spoil", [lead_out, leave_hole, forget, enlarge, swap_sizes])
@pytest.mark.parametrize("form", [ExportForm(prefix="model."), ExportForm(is_dcp=True)], ids=["weights", "dcp"])
def test_hostile_metadata(
    spoil: Callable[[Metadata], object], form: ExportForm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_chunks(tmp_path / "step-5", WEIGHTS)
    change_metadata(source, spoil)
    with pytest.raises(StorageError) as caught:
        export_trainer_checkpoint(str(source), tmp_path / "to", form)
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""
    assert not [*(tmp_path / "to").iterdir()]


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict[str, Any] | None = None


def test_metadata_of_an_older_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_chunks(tmp_path / "step-5", WEIGHTS)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    with monkeypatch.context() as within:
        name = "megatron.core.dist_checkpointing.strategies.torch"
        module = ModuleType(name)
        within.setattr(module, "MCoreMetadata", MCoreMetadata, raising=False)
        within.setattr(MCoreMetadata, "__module__", name)
        for part in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
            within.setitem(sys.modules, part, ModuleType(part))
        within.setitem(sys.modules, name, module)
        content = pickle.dumps(MCoreMetadata(**vars(metadata)))
    (source / ".metadata").write_bytes(content)
    made = export_trainer_checkpoint(str(source), tmp_path / "to", ExportForm(prefix="model."))
    assert difference(load_file(made.files[0]), dict(sorted(WEIGHTS.items()))) == ""
