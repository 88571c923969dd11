"""Unix sockets at long paths."""

from pathlib import Path

import pytest

from holdfast.wire import unix_sockets


def test_a_long_path_and_a_stale_socket(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 150) / "a.sock"
    path.parent.mkdir()
    with pytest.raises(OSError, match="No such file"):
        unix_sockets.connect(path)
    unix_sockets.listen(path).close()  # what a killed process leaves behind
    with pytest.raises(ConnectionRefusedError):
        unix_sockets.connect(path)
    with unix_sockets.listen(path) as listener, unix_sockets.connect(path) as peer:
        assert path.stat().st_mode & 0o777 == 0o600
        accepted, _ = listener.accept()
        with accepted:
            peer.send(b"hello")
            assert accepted.recv(10) == b"hello"
        with pytest.raises(FileExistsError):
            unix_sockets.listen(path)
