"""What tells a host from others: the board's id before the system's, and its name only if it has neither."""

import socket
from pathlib import Path

import pytest

from holdfast.linux.host_identity import HOST_ID, read_host_id

BOARD, SYSTEM = "sys/class/dmi/id/product_uuid", "etc/machine-id"


def write(root: Path, place: str, text: str) -> None:
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text(text)


def test_the_machine_is_known_by_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_host_id(tmp_path) == socket.gethostname()
    write(tmp_path, SYSTEM, "1f0c3a5be7d94c21a8b6f7e0d9c8b7a6\n")
    system = read_host_id(tmp_path)
    assert len(system) == 16 and "1f0c3a5b" not in system, "the machine's own id is not shown around"
    for placeholder in ("", "Not Settable", "00000000-0000-0000-0000-000000000000", "uninitialized"):
        write(tmp_path, BOARD, placeholder)
        assert read_host_id(tmp_path) == system
    write(tmp_path, BOARD, "4C4C4544-0042-3510-8054-B7C04F503233\n")
    board = read_host_id(tmp_path)
    assert board not in (system, socket.gethostname())
    write(tmp_path, SYSTEM, "another system on the same board")
    assert read_host_id(tmp_path) == board
    monkeypatch.setenv(HOST_ID, "rack7-host3")
    assert read_host_id(tmp_path) == "rack7-host3"


@pytest.mark.parametrize("given", ["two words", "x" * 101, "a/b", "\x1b[31m", "rack\u0435"])
def test_a_given_id_must_be_one(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ID, given)
    with pytest.raises(ValueError, match=HOST_ID):
        read_host_id()
