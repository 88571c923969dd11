"""One process, both ways: what we write torch reads, what torch writes we read; hostile bytes make nothing."""

import os
import pickle  # noqa: TID251 to forge metadata with
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.dcp import Reader, Writer
from holdfast.checkpoint.dcp.torch_metadata import NOT_METADATA

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]
# These have no numbers that all of torch can make: they are looked at as bytes.
RARE = [torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32]
RARE += [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]
WAYS = [("ours", "torch"), ("torch", "ours"), ("ours", "ours")]


def state_of(dtype: torch.dtype, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    made = {"scalar": (), "one": (1,), "row": (1, 9), "cube": (2, 3, 4), "empty": (0, 4)}
    tensors: dict[str, Any] = {name: torch.randint(0, 2, shape).to(dtype) for name, shape in made.items()}
    tensors["turned"] = torch.randint(0, 2, (4, 6)).to(dtype).T
    tensors["part"] = torch.randint(0, 2, (8, 6)).to(dtype)[::2, 1:3]
    return {"deep": tensors, "value": [seed, "text", None], "number": seed / 3}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {k: v for k, v in found.items() if k != "deep"} == {k: v for k, v in wanted.items() if k != "deep"}
    for name, tensor in wanted["deep"].items():
        assert found["deep"][name].dtype == tensor.dtype
        assert torch.equal(found["deep"][name].to(torch.complex128), tensor.to(torch.complex128)), name


def reader_of(how: str, path: Path) -> Any:
    return Reader(path) if how == "ours" else FileSystemReader(next(path.glob("step-*"), path))


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, way: tuple[str, str]) -> None:
    writer = Writer(tmp_path) if way[0] == "ours" else FileSystemWriter(tmp_path)
    torch_dcp.save(state_of(dtype, 3), storage_writer=writer)
    found = state_of(dtype, 4)
    torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path))
    assert_same(found, state_of(dtype, 3))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("dtype", RARE, ids=str)
def test_every_bit_of_rare_dtypes(tmp_path: Path, dtype: torch.dtype, way: tuple[str, str]) -> None:
    assert len({*DTYPES, *RARE}) >= 20
    writer = Writer(tmp_path) if way[0] == "ours" else FileSystemWriter(tmp_path)
    wanted = torch.arange(256, dtype=torch.uint8)
    torch_dcp.save({"x": wanted.view(dtype), "rows": wanted.view(dtype).view(4, -1)}, storage_writer=writer)
    none = torch.zeros(256, dtype=torch.uint8)
    found = {"x": none.clone().view(dtype), "rows": none.clone().view(dtype).view(4, -1)}
    torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path))
    for tensor in found.values():
        assert tensor.dtype == dtype and torch.equal(tensor.view(torch.uint8).flatten(), wanted)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_nothing_is_flattened(tmp_path: Path, way: tuple[str, str]) -> None:
    writer = Writer(tmp_path) if way[0] == "ours" else FileSystemWriter(tmp_path)
    saved = {"x": torch.ones(3), "y": [1, 2]}
    torch_dcp.save(saved, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    found: dict[str, Any] = {"x": torch.zeros(3), "y": []}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path), planner=planner)
    assert torch.equal(found["x"], torch.ones(3)) and found["y"] == [1, 2]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_some_of_it(tmp_path: Path, way: tuple[str, str]) -> None:
    writer = Writer(tmp_path) if way[0] == "ours" else FileSystemWriter(tmp_path)
    torch_dcp.save({"x": torch.ones(3), "y": torch.ones(2)}, storage_writer=writer)
    found = {"x": torch.zeros(3), "new": torch.full((2,), 7.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path), planner=planner)
    assert found["x"].tolist() == [1] * 3 and found["new"].tolist() == [7] * 2
    with pytest.raises(CheckpointException, match=r"Missing key\b.* new\."):
        torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path))


@pytest.mark.parametrize(
    "options", [{"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}], ids=str
)
def test_forms_of_torch_s_files(tmp_path: Path, options: dict[str, Any]) -> None:
    torch_dcp.save(state_of(torch.float32, 3), storage_writer=FileSystemWriter(tmp_path, **options))
    found = state_of(torch.float32, 4)
    torch_dcp.load(found, storage_reader=Reader(tmp_path))
    assert_same(found, state_of(torch.float32, 3))


def test_torch_s_files_on_remote_storage(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    torch_dcp.save(state_of(torch.float32, 3), storage_writer=FsspecWriter(url, sync_files=False))
    found = state_of(torch.float32, 4)
    torch_dcp.load(found, storage_reader=Reader(url))
    assert_same(found, state_of(torch.float32, 3))


def test_ours_are_newer_than_what_torch_left_there(tmp_path: Path) -> None:
    torch_dcp.save(state_of(torch.float32, 1), storage_writer=FileSystemWriter(tmp_path))
    torch_dcp.save(state_of(torch.float32, 2), storage_writer=Writer(tmp_path))
    found = state_of(torch.float32, 4)
    torch_dcp.load(found, storage_reader=Reader(tmp_path))
    assert_same(found, state_of(torch.float32, 2))


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_saved_aside(tmp_path: Path, way: tuple[str, str]) -> None:
    """By async_save; what the state becomes meanwhile does not matter."""
    writer = Writer(tmp_path) if way[0] == "ours" else FileSystemWriter(tmp_path)
    state = {"x": torch.ones(1000)}
    saved: Any = torch_dcp.async_save(state, storage_writer=writer)
    state["x"].zero_()
    saved.result()
    found = {"x": torch.zeros(1000)}
    torch_dcp.load(found, storage_reader=reader_of(way[1], tmp_path))
    assert found["x"].sum() == 1000


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


CHANGES_PATH = b"\x80\x02cpathlib\nPath\n(N(dX\x09\x00\x00\x00read_textcpathlib\nPurePosixPath\nstb0"
HOSTILE = [pickle.dumps(Evil()), pickle.dumps([]), b"", b"\x80\x04\x95", b"nonsense"]
HOSTILE += [CHANGES_PATH + pickle.dumps(Metadata({}, {}, {}), protocol=2)[2:]]


@pytest.mark.parametrize("content", HOSTILE)
def test_nothing_is_made_of_hostile_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointException, match=NOT_METADATA):
        torch_dcp.load({"x": torch.ones(1)}, storage_reader=Reader(tmp_path))
    assert not (tmp_path / "evil").exists()
    assert (tmp_path / ".metadata").read_bytes() == content and Path(__file__).read_text(), "classes are as they were"
