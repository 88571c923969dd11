"""The list of blocked hosts on disk: several writers, entries that expire, and files that nobody should believe."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from holdfast.controller.access.block_list_file import BlockListError, BlockListFile, BlockListThreads
from holdfast.core.membership.host_blocking import BlockedHost


def entry(name: str, at: float = 1.0, *gpus: str) -> BlockedHost:
    return BlockedHost(host=name, id=name, gpus=gpus, reason="bad", run_id="r", at=at, until=at + 100)


def test_many_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "new" / "blocked.json"
    assert BlockListFile(path).read_entries() == ()
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda n: BlockListFile(path).add_entry(entry(f"h{n}")), range(24)))
    assert sorted(e.host for e in BlockListFile(path).read_entries()) == sorted(f"h{n}" for n in range(24))
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.name for p in path.parent.iterdir()} == {"blocked.json", "blocked.json.lock"}


def test_entries_expire_and_newer_ones_take_their_place(tmp_path: Path) -> None:
    blocked = BlockListFile(tmp_path / "blocked.json")
    blocked.add_entry(entry("old", 1.0))
    blocked.add_entry(entry("h", 50.0, "GPU-1"))
    blocked.add_entry(entry("h", 60.0, "GPU-2"))
    assert [(e.host, e.at) for e in blocked.read_entries()] == [("old", 1.0), ("h", 50.0), ("h", 60.0)]
    blocked.add_entry(entry("h", 120.0, "GPU-1", "GPU-2"))
    assert [(e.host, e.at) for e in blocked.read_entries()] == [("h", 120.0)]


def test_a_short_block_takes_no_longer_one_away(tmp_path: Path) -> None:
    blocked = BlockListFile(tmp_path / "blocked.json")
    year = msgspec.structs.replace(entry("h"), who="ann", until=1000.0)
    blocked.add_entry(year)
    blocked.add_entry(entry("h", 60.0))
    assert blocked.read_entries() == (year, entry("h", 60.0))


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
        with pytest.raises(BlockListError, match=f"list of blocked hosts {blocked.path}"):
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


def test_the_controller_gets_its_answers_from_threads(tmp_path: Path) -> None:
    listed = BlockListThreads(BlockListFile(tmp_path / "blocked.json"))
    assert listed.add_entry(entry("a")).result(60) is None
    assert listed.read_entries().result(60) == (entry("a"),)
    (tmp_path / "blocked.json").write_bytes(b"{")
    assert isinstance(listed.read_entries().result(60), BlockListError)
    assert isinstance(listed.add_entry(entry("b")).result(60), BlockListError)


def test_a_file_system_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, answers = BlockListFile(tmp_path / "blocked.json"), threading.Event()
    monkeypatch.setattr(listed, "read_entries", lambda: answers.wait(60) and ())
    reading = BlockListThreads(listed).read_entries()
    assert not reading.done() and not reading.cancel()
    answers.set()
    assert reading.result(60) == ()
