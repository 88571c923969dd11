"""The list of blocked hosts on disk: who may read it, and files that nobody should believe."""

import os
import re
import threading
from pathlib import Path

import msgspec
import pytest

from holdfast.controller.access.block_list_file import BlockListError, BlockListFile, BlockListThreads
from holdfast.core.membership.host_blocking import BlockedHost


def entry(name: str, at: float = 1.0, *gpus: str) -> BlockedHost:
    return BlockedHost(host=name, id=name, gpus=gpus, reason="bad", run_id="r", at=at, until=at + 100)


def test_a_list_for_everybody_is_readable_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = BlockListFile(tmp_path / "blocked.json")
    blocked.add_entry(entry("a"))
    blocked.path.chmod(0o644)
    seen: list[int] = []

    def replace_and_look(part: Path, path: Path) -> None:
        os.replace(part, path)
        seen.append(path.stat().st_mode & 0o777)

    monkeypatch.setattr(Path, "replace", replace_and_look)
    blocked.add_entry(entry("b"))
    assert seen == [0o644], "a crash right after the change leaves it so"


@pytest.mark.parametrize("spoil", ["write", "damage", "link", "folder"])
def test_what_cannot_be_believed_is_said_and_kept(tmp_path: Path, spoil: str) -> None:
    blocked = BlockListFile(tmp_path / "blocked.json")
    blocked.add_entry(entry("a"))
    if spoil == "write":
        blocked.path.chmod(0o620)
    elif spoil == "damage":
        blocked.path.write_bytes(b'[{"host": "a"')
    elif spoil == "link":
        blocked.path.rename(tmp_path / "elsewhere")
        blocked.path.symlink_to(tmp_path / "elsewhere")
    else:
        blocked.path.unlink()
        blocked.path.mkdir()
    for use in (blocked.read_entries, lambda: blocked.add_entry(entry("b"))):
        with pytest.raises(BlockListError, match=f" {re.escape(str(blocked.path))} "):
            use()
    if spoil == "write":
        blocked.path.chmod(0o600)
        assert [e.host for e in blocked.read_entries()] == ["a"]


def test_another_users_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = BlockListFile(tmp_path / "blocked.json")
    blocked.add_entry(entry("a"))
    me = blocked.path.stat().st_uid
    if me == 0:
        os.chown(blocked.path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(BlockListError, match="another user"):
        blocked.read_entries()


def test_entries_of_a_newer_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "blocked.json"
    path.write_bytes(msgspec.json.encode([msgspec.to_builtins(entry("a")) | {"more": 1}]))
    path.chmod(0o600)
    assert BlockListFile(path).read_entries() == (entry("a"),)


def test_a_file_system_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, answers = BlockListFile(tmp_path / "blocked.json"), threading.Event()
    monkeypatch.setattr(listed, "read_entries", lambda: answers.wait(60) and ())
    reading = BlockListThreads(listed, "").read_entries()
    assert not reading.done() and not reading.cancel()
    answers.set()
    assert reading.result(60) == ()
