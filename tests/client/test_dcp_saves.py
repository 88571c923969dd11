"""What torch's own writer and reader keep, ours keep too: every save, under the name it was given, to the byte."""

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.checkpoint.dcp import Reader, Writer
from holdfast.checkpoint.image_layout import EXTRA
from holdfast.checkpoint.state_image import StateError
from holdfast.wire import rank_keeper_messages
from holdfast.wire.progress_environment import KEEPER
from tests.client.fake_keeper import FakeKeeper

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(number: int, writer: Writer, checkpoint_id: Any = None, planner: SavePlanner | None = None) -> None:
    state = {"x": torch.full((3,), number), "n": number}
    torch_dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer, planner=planner)


def loaded(reader: Reader, checkpoint_id: Any = None) -> int:
    state: dict[str, Any] = {"x": torch.zeros(3, dtype=torch.int64), "n": -1}
    torch_dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
    assert state["x"].tolist() == [state["n"]] * 3
    return int(state["n"])


@pytest.fixture
def plans() -> Iterator[None]:
    """No plan of another test is remembered, and none of this one."""
    caches = [getattr(SavePlanner, name) for name in vars(SavePlanner) if name.startswith("_cached")]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


@pytest.mark.usefixtures("plans")
def test_a_planner_that_keeps_its_plans(tmp_path: Path) -> None:
    writers = [Writer(tmp_path), Writer(tmp_path)]
    for number, writer in enumerate([writers[0], writers[0], writers[1], writers[1]]):
        save(number, writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert loaded(Reader(tmp_path)) == number


@pytest.mark.usefixtures("plans")
def test_a_plan_that_was_kept_for_torch_s_writer(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    torch_dcp.save({"x": torch.zeros(3, dtype=torch.int64), "n": 0}, checkpoint_id=tmp_path / "torch", planner=planner)
    save(4, Writer(tmp_path / "ours"), planner=planner)
    assert loaded(Reader(tmp_path / "ours")) == 4


@pytest.mark.usefixtures("plans")
def test_a_planner_that_keeps_its_plans_in_memory(keeper: FakeKeeper, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints")
    for number in range(3):
        save(number, writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert loaded(Reader(tmp_path / "checkpoints")) == number


def test_a_new_writer_counts_on(tmp_path: Path) -> None:
    save(1, Writer(tmp_path), "step-10")
    save(2, Writer(tmp_path))
    assert loaded(Reader(tmp_path)) == 2
    assert (tmp_path / "step-00000011").exists()


def test_two_writers_count_together(tmp_path: Path) -> None:
    first, second = Writer(tmp_path), Writer(tmp_path)
    for number, writer in enumerate([first, second, second, second, first]):
        save(number, writer)
        assert loaded(Reader(tmp_path)) == number


def test_an_id_is_for_one_save(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    save(1, writer, "step-7")
    odd = {"x": torch.eye(3).to_sparse()}
    with pytest.raises(CheckpointException, match="sparse"):
        torch_dcp.save(odd, checkpoint_id="step-5", storage_writer=writer)
    save(2, writer)
    assert loaded(Reader(tmp_path)) == 2


def test_a_new_writer_counts_on_from_memory(
    keeper: FakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1, Writer(tmp_path / "checkpoints"), "step-10")
    monkeypatch.setattr(Writer, "_reached", {}, raising=False)  # as in a new process
    save(2, Writer(tmp_path / "checkpoints"))
    assert loaded(Reader(tmp_path / "checkpoints")) == 2


@pytest.mark.parametrize("name", ["step-10", "10", "global_step10", "epoch=1-step=10", "ckpt_0010"])
def test_an_id_is_found_where_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    url = tmp_path / "ckpt"
    writer = Writer(url)
    save(1, writer, name)
    save(2, writer)
    for known in (name, f"ckpt/{name}", url / name):
        assert loaded(Reader("ckpt"), known) == 1
    assert loaded(Reader(url), url) == loaded(Reader(url)) == 2
    save(3, writer, url / name)
    assert loaded(Reader(url), name) == 3, "saved again"


@pytest.mark.parametrize("name", ["final", "run7/final", "gpt2-final", "2026-11-16", "run7/step-10"])
def test_an_id_that_cannot_be_found_again_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="checkpoint id"):
        save(1, Writer(tmp_path / "ckpt"), name)
    with pytest.raises(StateError, match="checkpoint id"):
        save(1, Writer(tmp_path / "ckpt"), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_unknown_id_is_not_found(tmp_path: Path) -> None:
    save(1, Writer(tmp_path), "step-1")
    with pytest.raises(CheckpointException, match="'step-2'"):
        loaded(Reader(tmp_path), "step-2")


def test_an_id_comes_before_memory(keeper: FakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as alone:
        alone.delenv(KEEPER)
        save(1, Writer(tmp_path / "checkpoints"), "step-1")
    save(2, Writer(tmp_path / "checkpoints"), "step-2")
    reader = Reader(tmp_path / "checkpoints")
    assert [loaded(reader), loaded(reader, "step-1"), loaded(reader, "step-2")] == [2, 1, 2]


def test_ranks_that_wrote_elsewhere_are_not_waited_for(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    save(1, writer)
    elsewhere = WriteResult(MetadataIndex(EXTRA), 0, "elsewhere")
    with pytest.raises(StateError, match="elsewhere"):
        writer.finish(Metadata({}), [[elsewhere]])


def test_overwrite(tmp_path: Path) -> None:
    writer = Writer(tmp_path, overwrite=False)
    save(1, writer, "step-1")
    with pytest.raises(CheckpointException, match=r"step 1\b.*overwrite=False"):
        save(2, writer, "step-1")
    save(3, writer, "step-3")
    assert loaded(Reader(tmp_path), "step-1") == 1
    save(2, Writer(tmp_path), "step-1")
    assert loaded(Reader(tmp_path), "step-1") == 2


class Verbatim(DefaultSavePlanner):
    """Bytes are saved as they are."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object) if write_item.type == WriteItemType.BYTE_IO else object


class Taking(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = value.read()


VALUES = {"none": b"", "one": b"\0", "some": b"x" * 100, "round": b"\0" * 64, "long": bytes(range(256)) * 300}


def taken(**where: Any) -> dict[str, bytes]:
    planner: LoadPlanner = Taking()
    torch_dcp.load(dict.fromkeys(VALUES, b""), planner=planner, **where)
    return planner.found  # type: ignore[attr-defined, no-any-return]


def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step, values in enumerate([VALUES, {**VALUES, "long": b"short"}]):  # into the room of a longer one
        torch_dcp.save(dict(values), checkpoint_id=str(step), storage_writer=writer, planner=Verbatim())
        assert taken(storage_reader=Reader(tmp_path)) == values
        assert taken(checkpoint_id=tmp_path / f"step-0000000{step}") == values, "by torch's own reader"


def test_bytes_come_back_from_memory_as_they_were(keeper: FakeKeeper, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints")
    for step, values in enumerate([VALUES, {**VALUES, "long": b"short"}]):
        torch_dcp.save(dict(values), checkpoint_id=str(step), storage_writer=writer, planner=Verbatim())
        assert taken(storage_reader=Reader(tmp_path / "checkpoints")) == values
        keeper.write_checkpoint(step, folder := tmp_path / f"written-{step}")
        assert taken(checkpoint_id=folder) == values, "by torch's own reader"
        places = FileSystemReader(folder).read_metadata().storage_data
        assert {index.fqn: place.length for index, place in places.items()} == {k: len(v) for k, v in values.items()}
    assert len(keeper.wants) == 1


def test_a_keeper_that_cannot_write_to_storage_collects_few_files(keeper: FakeKeeper, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "checkpoints")
    for step in range(40):
        save(step, writer, str(step))
    named = rank_keeper_messages.step_metadata_path(keeper.wants[0].metadata_path, 0)[:-1]
    files = [path for path in keeper.path.parent.iterdir() if str(path).startswith(named)]
    assert len(files) <= 16 and Path(f"{named}39") in files


def test_a_keeper_that_has_lost_the_lengths_of_a_step_writes_values_with_their_room(
    keeper: FakeKeeper, tmp_path: Path
) -> None:
    """Torch loads them all the same, if they were saved in its own format."""
    save(7, Writer(tmp_path / "checkpoints"), "7")
    own = Path(rank_keeper_messages.step_metadata_path(keeper.wants[0].metadata_path, 7))
    own.unlink()
    keeper.write_checkpoint(7, folder := tmp_path / "written")
    state: dict[str, Any] = {"x": torch.zeros(3, dtype=torch.int64), "n": -1}
    torch_dcp.load(state, checkpoint_id=folder)
    assert state["n"] == 7 and state["x"].tolist() == [7] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "made of others"])
def test_other_kinds_of_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    made: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "made of others": lambda: TwoTensor(torch.ones(300, 300), torch.ones(300, 300)),
    }
    with pytest.raises(CheckpointException, match=r"\bodd .*(sparse_coo|TwoTensor)"):
        torch_dcp.save({"x": torch.ones(3), "odd": made[kind]()}, storage_writer=Writer(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()


def quantized(scale: float) -> dict[str, Any]:
    row = torch.arange(6.0).view(2, 3)
    each = torch.tensor([scale, 2 * scale])
    return {
        **{str(kind): torch.quantize_per_tensor(row, scale, 3, kind) for kind in (torch.qint8, torch.quint8)},
        "large": torch.quantize_per_tensor(row, scale, 0, torch.qint32),
        "by rows": torch.quantize_per_channel(row, each, torch.tensor([0, 1]), 0, torch.qint8),
        "part": torch.quantize_per_tensor(torch.arange(4000.0), scale, 3, torch.qint8)[8:10],
        "plain": row + scale,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("where", ["ours", "torch", "memory"])
def test_quantized_tensors_keep_their_scale(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Torch's own writer and reader leave the scale of the tensor that is loaded into."""
    if where == "memory":
        request.getfixturevalue("keeper")
    path = tmp_path / "checkpoints"
    writer = Writer(path)
    for step, scale in ((1, 0.1), (2, 0.25)):
        torch_dcp.save(quantized(scale), checkpoint_id=str(step), storage_writer=writer)
        found = quantized(0.5)
        read = {"checkpoint_id": path / f"step-0000000{step}"} if where == "torch" else {"storage_reader": Reader(path)}
        torch_dcp.load(found, **read)
        for name, tensor in quantized(scale).items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    if where == "torch":
        assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 400_000


def test_many_small_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As quick as torch, by processor time, as machines are busy; a tenth more is for noise."""
    state = {f"layer{n}": torch.full((n % 7 + 1,), float(n)) for n in range(1000)}
    torch_dcp.save(state, checkpoint_id="1", storage_writer=Writer(tmp_path / "ours"))
    torch_dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "torch"))
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def seconds(**where: Any) -> float:
        begun_at = time.process_time()
        torch_dcp.load(empty, **where)
        return time.process_time() - begun_at

    ratio = seconds(storage_reader=Reader(tmp_path / "ours")) / seconds(checkpoint_id=tmp_path / "torch")
    with capsys.disabled():
        print(f" loading {len(state)} tensors: {ratio:.2f} of torch's time ", end="")
    assert ratio < 1.1
    assert all(torch.equal(empty[name], tensor) for name, tensor in state.items())
