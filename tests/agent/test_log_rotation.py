"""Logs of ranks that write too much: the bound on what they take of the disk."""

import resource
import stat
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.rank.log_rotation import LogRotation, rotate_file
from holdfast.wire.holder_messages import RankKey
from tests.fleet.places import TEMPLATE


def test_a_flood_is_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = msgspec.structs.replace(TEMPLATE.settings.logs, file_bytes=1 << 16)
    settings = msgspec.structs.replace(TEMPLATE.settings, logs=small)
    node = msgspec.structs.replace(TEMPLATE, log_dir=str(tmp_path / "logs"), settings=settings)
    rotating = LogRotation(node)
    path = tmp_path / "logs" / "gen-1" / "rank-0" / "stdout.log"
    path.parent.mkdir(parents=True)
    for _ in range(3):
        path.write_bytes(bytes(1 << 17))
        rotating.rotate_logs([RankKey(1, 0), RankKey(1, 1)])
        assert path.stat().st_size == 0
    assert caplog.text.count("rank 0 writes more than logs.file_bytes") == 1


def test_rotation_keeps_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    assert not rotate_file(path, 100), "there is no such file"
    path.write_bytes(b"a" * 100)
    assert not rotate_file(path, 100)
    with path.open("ab", buffering=0) as writer:  # as a rank holds it
        writer.write(b"b" * 50)
        assert rotate_file(path, 100)
        assert path.read_bytes() == b""
        assert (tmp_path / "stdout.log.1").read_bytes() == b"a" * 50 + b"b" * 50
        assert stat.S_IMODE((tmp_path / "stdout.log.1").stat().st_mode) == 0o600
        writer.write(b"c")
        assert path.read_bytes() == b"c", "its writers are none the wiser"
        writer.write(b"d" * 1000)
        assert rotate_file(path, 100)
    assert (tmp_path / "stdout.log.1").read_bytes() == b"d" * 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stdout.log", "stdout.log.1"]


def test_rotation_where_there_is_no_room_for_the_old(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"a" * 200)
    (tmp_path / "stdout.log.1").mkdir()  # cannot be opened for writing, nor removed
    assert not rotate_file(path, 100)
    (tmp_path / "stdout.log.1").rmdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))  # half of what is to be kept
    try:
        assert rotate_file(path, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b""
    assert not (tmp_path / "stdout.log.1").exists()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, (1 << 20) + 1])
def test_rotation_of_any_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(bytes(range(256)) * (size // 256 + 1))
    before = path.read_bytes()
    rotate_file(path, size)
    assert (tmp_path / "stderr.log.1").read_bytes() == before[len(before) - size :]
