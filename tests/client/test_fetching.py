"""A state out of a file, piece by piece, by streams that do their work in any order."""

import os
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.state import StateError
from holdfast.client import fetching
from holdfast.client.fetching import Fetching
from tests.client.fake_streams import FakeStreams

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PIECE_BYTES", 64)
    monkeypatch.setattr(fetching, "_share", lambda: 3)


def test_all_arrives_whatever_order_the_gpu_chooses(tmp_path: Path) -> None:
    content = os.urandom(4096)
    (tmp_path / "arena").write_bytes(content)
    seeds = iter(range(100))
    one = Fetching(lambda: FakeStreams(next(seeds)))  # type: ignore[arg-type,return-value]
    tensors = [(0, torch.zeros(7, 3)), (200, torch.zeros((), dtype=torch.int64)), (300, torch.zeros(0))]
    tensors += [(1000, torch.zeros(1000, dtype=torch.uint8)), (2100, torch.zeros(40, 10, dtype=torch.bfloat16))]
    with one.of(str(tmp_path / "arena"), 100) as fetch:
        for at, tensor in tensors:
            fetch(at, tensor)
    for at, tensor in tensors:
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert raw == content[100 + at : 100 + at + tensor.nbytes]


def test_a_file_that_is_too_short_is_told(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(b"x" * 100)
    one = Fetching(lambda: FakeStreams(0))  # type: ignore[arg-type,return-value]
    path = str(tmp_path / "arena")
    with pytest.raises(StateError, match="ended before its end"), one.of(path, 0) as fetch:
        fetch(90, torch.zeros(20, dtype=torch.uint8))
    assert not [fd for fd in os.listdir("/proc/self/fd") if _leads_to(fd, tmp_path)]


def _leads_to(fd: str, where: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(where))
    except OSError:
        return False
