"""What every list of blocked hosts must do, in a file or in a database: several writers, entries that expire."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from holdfast.controller.access.block_list_file import (
    BlockListError,
    BlockListFile,
    BlockListThreads,
    SharedBlockList,
)
from tests.controller.test_block_list_file import entry

Open = Callable[[], SharedBlockList]


@pytest.fixture(params=["file", "database"])
def open_list(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same list, which is empty, as another process would."""
    if request.param == "file":
        yield lambda: BlockListFile(tmp_path / "new" / "blocked.json")
        return
    url = request.getfixturevalue("shared_postgres")
    from holdfast.controller.access.block_list_database import BlockListDatabase

    BlockListDatabase(url).change(0.0, lambda entries: ())
    yield lambda: BlockListDatabase(url)
    BlockListDatabase(url).change(0.0, lambda entries: ())


def test_many_write_at_once_and_nothing_is_lost(open_list: Open) -> None:
    assert open_list().read_entries() == ()
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda n: open_list().add_entry(entry(f"h{n}")), range(24)))
    assert sorted(e.host for e in open_list().read_entries()) == sorted(f"h{n}" for n in range(24))


def test_entries_expire_and_newer_ones_take_their_place(open_list: Open) -> None:
    blocked = open_list()
    blocked.add_entry(entry("old", 1.0))
    blocked.add_entry(entry("h", 50.0, "GPU-1"))
    blocked.add_entry(entry("h", 60.0, "GPU-2"))
    assert [(e.host, e.at) for e in open_list().read_entries()] == [("old", 1.0), ("h", 50.0), ("h", 60.0)]
    blocked.add_entry(entry("h", 120.0, "GPU-1", "GPU-2"))
    assert [(e.host, e.at) for e in open_list().read_entries()] == [("h", 120.0)]


def test_a_short_block_takes_no_longer_one_away(open_list: Open) -> None:
    year = msgspec.structs.replace(entry("h"), who="ann", until=1000.0)
    open_list().add_entry(year)
    open_list().add_entry(entry("h", 60.0))
    assert open_list().read_entries() == (year, entry("h", 60.0))


def test_a_change_that_is_refused_changes_nothing(open_list: Open) -> None:
    refusal = BlockListError("not this one")

    def refuse(entries: object) -> tuple[()]:
        raise refusal

    open_list().add_entry(entry("a"))
    with pytest.raises(BlockListError) as raised:
        open_list().change(1.0, refuse)
    assert raised.value is refusal
    assert open_list().read_entries() == (entry("a"),)


def test_the_controller_gets_its_answers_from_threads(open_list: Open) -> None:
    listed = BlockListThreads(open_list(), "")
    assert listed.add_entry(entry("a")).result(60) is None
    assert listed.read_entries().result(60) == (entry("a"),)


@pytest.mark.parametrize("kind", ["file", "database"])
def test_a_list_that_cannot_be_used_says_so(kind: str, tmp_path: Path) -> None:
    (tmp_path / "blocked.json").write_bytes(b"{")
    listed: SharedBlockList = BlockListFile(tmp_path / "blocked.json")
    if kind == "database":
        pytest.importorskip("psycopg", reason="the extra postgres is not installed")
        from holdfast.controller.access.block_list_database import BlockListDatabase

        listed = BlockListDatabase(f"postgres:///none?host={tmp_path}")
    threads = BlockListThreads(listed, "")
    assert isinstance(threads.read_entries().result(60), BlockListError)
    assert isinstance(threads.add_entry(entry("b")).result(60), BlockListError)
