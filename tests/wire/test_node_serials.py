"""Who is in a job, as it is kept: by a line for each, and whole whatever was cut short."""

import os
from pathlib import Path

import pytest

from holdfast.wire.credentials import node_serials


def test_one_more_is_one_line_more(tmp_path: Path) -> None:
    """To write all of them anew for each would be the square of their number."""
    node_serials.add_serial(tmp_path, "n0", "00")
    before = (tmp_path / "nodes.json").stat()
    for number in range(1, 200):
        node_serials.add_serial(tmp_path, f"n{number}", f"{number:02X}")
    after = (tmp_path / "nodes.json").stat()
    assert after.st_ino == before.st_ino and after.st_mode & 0o777 == 0o600
    assert node_serials.read_serials(tmp_path).serials == {f"n{number}": f"{number:02X}" for number in range(200)}
    assert os.listdir(tmp_path) == ["nodes.json"]


def test_what_was_cut_short_costs_nobody_else(tmp_path: Path) -> None:
    """The power went while a line was written; and a run of an older version has all of its nodes in one."""
    assert node_serials.read_serials(tmp_path).serials == {}
    (tmp_path / "nodes.json").write_text('{"a": "01", "b": "02"}')
    node_serials.add_serial(tmp_path, "c", "03")
    with (tmp_path / "nodes.json").open("a") as file:
        file.write('\n{"d": "0')
    node_serials.add_serial(tmp_path, "e", "05")
    node_serials.add_serial(tmp_path, "a", "06")
    assert node_serials.read_serials(tmp_path).serials == {"a": "06", "b": "02", "c": "03", "e": "05"}


@pytest.mark.parametrize("content", [b"\n7\n", b'\n["a"]\n', b"\xff\n", b'\n{"a": 7}\n', b"\n" + b"[" * 100_000])
def test_lines_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "nodes.json").write_bytes(content)
    assert node_serials.read_serials(tmp_path).serials == {}


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    node_serials.add_serial(tmp_path, "n0", "07E7")
    node_serials.add_serial(tmp_path, "n1", "07E8")
    path = tmp_path / "nodes.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            found = node_serials.read_serials(tmp_path)
            assert found.serials.items() <= {"n0": "07E7", "n1": "07E8"}.items(), (at, bit)
            assert found.damaged or len(found.serials) == 2, (at, bit)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        node_serials.add_serial(tmp_path, "a", "01")
    assert not (tmp_path / "theirs").exists()
