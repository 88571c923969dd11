"""Logs of ranks that write too much."""

from pathlib import Path

import msgspec
import pytest

from holdfast.agent.rank.log_rotation import LogRotation
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
