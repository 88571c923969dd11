"""Rows of checkpoints in Postgres: what a listing puts and removes, who may write, and versions of the table."""

import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.core.snapshots.checkpoint_listing import CheckpointListing, ListedCheckpoint

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.journal import checkpoint_table, postgres_lease, postgres_schema
from holdfast.journal.checkpoint_table import CheckpointRow
from holdfast.journal.journal_errors import JournalError, LeaseLostError
from holdfast.journal.postgres_link import PostgresLink
from tests.journal.test_postgres_journal import SHORT_S, DeafLink, entry, succeeded, writer

BASE = "/data/ckpt"


def listing(*steps: int, base: str = BASE, since: int = 0, doubted: tuple[int, ...] = ()) -> CheckpointListing:
    found = tuple(
        ListedCheckpoint(
            name=f"step-{step:08d}", step=step, at=1000.0 + step, generation=2, run="gpt.1f", world=8, bytes=step * 10,
            doubted=step in doubted, why="the loss went wrong" if step in doubted else "",
        )
        for step in steps
    )  # fmt: skip
    return CheckpointListing(generation=2, base=base, checkpoints=found, since=since)


def rows(url: str, place: Path) -> list[CheckpointRow]:
    link = PostgresLink(url)
    found = checkpoint_table.list_checkpoints(link, str(place))
    link.close()
    return found


def steps(url: str, place: Path) -> list[int]:
    return [row.step for row in rows(url, place)]


def test_a_listing_becomes_rows_and_the_next_one_replaces_them(shared_postgres: str, tmp_path: Path) -> None:
    journal = writer(shared_postgres, tmp_path)
    journal.put_listing(listing(20, 10, doubted=(20,)))
    assert rows(shared_postgres, tmp_path) == [], "not before the next flush"
    journal.flush()
    newest, older = rows(shared_postgres, tmp_path)
    assert abs(newest.seen_at.timestamp() - time.time()) < 600 and newest.written_at is not None
    assert newest.written_at.timestamp() == 1020.0
    assert msgspec.structs.replace(newest, seen_at=older.seen_at, written_at=older.written_at) == CheckpointRow(
        str(tmp_path), BASE, f"{BASE}/step-00000020", 20, 2, "gpt.1f", 8, 200, True, "the loss went wrong",
        older.written_at, older.seen_at,
    )  # fmt: skip
    assert (older.step, older.doubted, older.why) == (10, False, "")
    journal.put_listing(listing(20, base=f"{BASE}/doubted", doubted=(20,)))
    journal.put_listing(listing(30, 20))  # 10 is retired, 20 is no longer in doubt
    journal.flush()
    told = [(row.base, row.step, row.doubted) for row in rows(shared_postgres, tmp_path)]
    assert told == [(BASE, 30, False), (BASE, 20, False), (f"{BASE}/doubted", 20, True)]
    journal.put_listing(listing())
    journal.close()
    assert [row.base for row in rows(shared_postgres, tmp_path)] == [f"{BASE}/doubted"]


def test_a_listing_of_the_newest_leaves_older_rows_alone(shared_postgres: str, tmp_path: Path) -> None:
    journal = writer(shared_postgres, tmp_path)
    for told in (listing(10, 5), listing(40, 30, 20, since=20), listing(50, 40, since=20)):
        journal.put_listing(told)
        journal.flush()
    journal.close()
    assert steps(shared_postgres, tmp_path) == [50, 40, 10, 5]


def test_an_unknown_size_is_no_number(shared_postgres: str, tmp_path: Path) -> None:
    journal = writer(shared_postgres, tmp_path)
    broken = ListedCheckpoint(name="step-00000007", step=7, why="holdfast.json is not as it was written")
    journal.put_listing(CheckpointListing(generation=1, base="s3://bucket/gpt/", checkpoints=(broken, broken)))
    journal.close()
    [row] = rows(shared_postgres, tmp_path)
    assert row.place == "s3://bucket/gpt/step-00000007"
    assert (row.bytes, row.ranks, row.written_at, row.why) == (None, None, None, broken.why)


def test_an_older_controller_changes_no_row(shared_postgres: str, tmp_path: Path) -> None:
    old = writer(shared_postgres, tmp_path, lease_s=SHORT_S)
    old.put_listing(listing(10))
    old.flush()
    new = succeeded(shared_postgres, tmp_path)
    new.put_listing(listing(20))
    new.flush()
    old.put_listing(listing(10, 5))
    with pytest.raises(LeaseLostError):
        old.flush()
    # Even one that has just renewed its lease, and lost it since: the statement itself refuses.
    lease: dict[str, object] = {"run": str(tmp_path), "epoch": 1, "holder": "one"}
    link = PostgresLink(shared_postgres)
    assert not checkpoint_table.write_listing(link, lease, listing(10, 5))
    assert not checkpoint_table.write_listing(link, lease | {"holder": "two"}, listing(10, 5))
    assert steps(shared_postgres, tmp_path) == [20]
    link.close()
    new.close()
    old.close()


def test_a_controller_that_loses_its_lease_between_two_statements_ends(
    shared_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = writer(shared_postgres, tmp_path)
    old.put_listing(listing(10))
    monkeypatch.setattr(old, "_commit", lambda: taken_over(shared_postgres, tmp_path))
    with pytest.raises(LeaseLostError):
        old.flush()
    monkeypatch.undo()
    with pytest.raises(LeaseLostError):
        old.append(entry(1), durable=True)
    assert rows(shared_postgres, tmp_path) == []
    old.close()


def taken_over(url: str, place: Path) -> None:
    link = PostgresLink(url)
    link.execute("update holdfast.run set expires_at = clock_timestamp() where run_id = %(run)s", {"run": str(place)})
    link.close()
    writer(url, place, "two").close()


def test_an_answer_that_is_lost_is_asked_for_again(
    shared_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = writer(shared_postgres, tmp_path)
    monkeypatch.setattr(journal, "_commit", lambda: None)
    real = journal._link
    monkeypatch.setattr(journal, "_link", DeafLink(real, 1))
    journal.put_listing(listing(10))
    journal.flush()
    assert journal._listings, "nobody knows whether it was written"
    journal.flush()
    assert not journal._listings and steps(shared_postgres, tmp_path) == [10]
    monkeypatch.undo()
    journal.close()


def test_a_table_that_cannot_be_written_ends_no_job(
    shared_postgres: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, link = writer(shared_postgres, tmp_path), PostgresLink(shared_postgres)
    link.execute("alter table holdfast.checkpoint rename to elsewhere")
    try:
        journal.put_listing(listing(10))
        with caplog.at_level(logging.WARNING, "holdfast.journal"):
            journal.flush()
        assert BASE in caplog.text
        journal.append(entry(1), durable=True)
    finally:
        link.execute("alter table holdfast.elsewhere rename to checkpoint")
    journal.put_listing(listing(10))
    journal.close()
    assert steps(shared_postgres, tmp_path) == [10]
    link.close()


def test_a_run_that_is_forgotten_has_no_rows(shared_postgres: str, tmp_path: Path) -> None:
    journal, link = writer(shared_postgres, tmp_path), PostgresLink(shared_postgres)
    journal.put_listing(listing(10))
    journal.close()
    assert steps(shared_postgres, tmp_path) == [10]
    assert str(tmp_path) in {row.run_id for row in checkpoint_table.list_checkpoints(link)}
    link.execute("update holdfast.run set phase = 'done' where run_id = %(run)s", {"run": str(tmp_path)})
    postgres_lease.forget_run(link, str(tmp_path))
    assert rows(shared_postgres, tmp_path) == []
    link.close()


def test_the_version_before_has_no_rows_that_nobody_updates(shared_postgres: str, tmp_path: Path) -> None:
    journal, link = writer(shared_postgres, tmp_path), PostgresLink(shared_postgres)
    journal.put_listing(listing(10))
    journal.flush()
    assert postgres_schema.migrate_schema(link, 4) == 5
    assert steps(shared_postgres, tmp_path) == []
    journal.append(entry(1), durable=True)
    journal.put_listing(listing(20))  # this controller is of the newer version, and goes on meanwhile
    journal.flush()
    assert postgres_schema.migrate_schema(link, 5) == 4
    assert steps(shared_postgres, tmp_path) == [20]
    journal.close()
    link.close()


def test_tables_of_version_4_are_brought_forward(own_tables: PostgresLink, tmp_path: Path) -> None:
    """As an older holdfast has left them: without the table."""
    postgres_schema.migrate_schema(own_tables, 5)
    own_tables.execute("drop table holdfast.checkpoint")
    own_tables.execute("update holdfast.version set version = 4")
    with pytest.raises(JournalError, match=r" --schema 5$"):
        postgres_schema.require_schema(own_tables)
    journal = writer(own_tables.url, tmp_path)
    journal.put_listing(listing(10))
    journal.close()
    assert steps(own_tables.url, tmp_path) == [10]


@pytest.fixture
def own_tables(shared_postgres: str) -> Iterator[PostgresLink]:
    """A database of this test alone, of the server that all tests share."""
    name = f"tables_{uuid.uuid4().hex}"
    link = PostgresLink(shared_postgres)
    link.execute(f"create database {name}")
    link.close()
    link = PostgresLink(shared_postgres.replace("///postgres?", f"///{name}?"))
    yield link
    link.close()
