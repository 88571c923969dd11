"""A state out of a file, piece by piece, by streams that do their work in any order."""

import os
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.image_layout import arrange_image
from holdfast.checkpoint.state_image import (
    StateError,
    StateImage,
    TensorHolders,
    extra_spec,
    flatten_state,
    record_sizes,
)
from holdfast.client.snapshot import gpu_upload
from holdfast.client.snapshot.gpu_upload import GpuUpload
from holdfast.client.snapshot.state_item_locations import load_image
from tests.client.fake_streams import FakeStreams


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_upload, "PIECE_BYTES", 64)
    monkeypatch.setattr(gpu_upload, "_cpu_share", lambda: 3)


def test_all_arrives_whatever_order_the_gpu_chooses(tmp_path: Path) -> None:
    content = os.urandom(4096)
    (tmp_path / "arena").write_bytes(content)
    seeds = iter(range(100))
    one = GpuUpload(lambda: FakeStreams(next(seeds)))  # type: ignore[arg-type,return-value]
    tensors = [(0, torch.zeros(7, 3)), (200, torch.zeros((), dtype=torch.int64)), (300, torch.zeros(0))]
    tensors += [(1000, torch.zeros(1000, dtype=torch.uint8)), (2100, torch.zeros(40, 10, dtype=torch.bfloat16))]
    with one.from_file(str(tmp_path / "arena"), 100) as fetch:
        for at, tensor in tensors:
            fetch(at, tensor)
    for at, tensor in tensors:
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert raw == content[100 + at : 100 + at + tensor.nbytes]


def test_a_file_that_is_too_short_is_told(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(b"x" * 100)
    one = GpuUpload(lambda: FakeStreams(0))  # type: ignore[arg-type,return-value]
    path = str(tmp_path / "arena")
    with pytest.raises(StateError, match=r"\w"), one.from_file(path, 0) as fetch:
        fetch(90, torch.zeros(20, dtype=torch.uint8))
    assert not [fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd, tmp_path)]


def _leads_to(fd: str, where: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(where))
    except OSError:
        return False


def test_nothing_is_said_to_be_there_before_it_is() -> None:
    state = {"a": torch.arange(4.0), "b": torch.ones(3)}
    found = flatten_state(state, lambda _: TensorHolders((0,), (0,)))
    layout = arrange_image([*found.specs, extra_spec(512, 0, 1)], record_sizes, rank=0, world=1)
    image = StateImage(layout, memoryview(bytearray(layout.image_bytes)))
    image.write_frames()
    order: list[str] = []
    into = {"a": torch.zeros(4), "b": torch.zeros(3)}
    with image.fetched_by(lambda at, tensor: None, lambda: order.append("settled")):
        load_image(image, (), lambda path: into[str(path[0])], lambda path, value: order.append("put"))
    assert order == ["settled"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_piece_that_never_came_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may die of what nobody thought of."""
    (tmp_path / "arena").write_bytes(b"x" * 1000)

    def dies(fd: int, into: memoryview, at: int) -> None:
        raise SystemExit  # which ends a thread without a word

    monkeypatch.setattr(gpu_upload, "_read_fully", dies)
    one = GpuUpload(lambda: FakeStreams(0))  # type: ignore[arg-type,return-value]
    with pytest.raises(StateError, match=r"\d pieces"), one.from_file(str(tmp_path / "arena"), 0) as fetch:
        fetch(0, torch.zeros(500, dtype=torch.uint8))
