"""What is Postgres's own: the lease, fencing, a server that goes away and comes back, and versions of the tables."""

import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.model.decider_events import Tick
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.postgres_server import PostgresServer

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.journal import postgres_lease, postgres_schema
from holdfast.journal.journal_errors import JournalAwayError, JournalDamagedError, JournalError, LeaseLostError
from holdfast.journal.journal_key import JournalKey
from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal
from holdfast.journal.postgres_link import PostgresLink, why_no_url

LONG_S, SHORT_S = 60.0, 0.3
SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"


def entry(seq: int, phase: Phase = Phase.TRAINING) -> Entry:
    return Entry(seq=seq, at=float(seq), event=Tick(), decision=Decision(phase=phase))


def writer(url: str, place: Path, name: str = "one", lease_s: float = LONG_S) -> PostgresJournal:
    holder = LeaseHolder(name=name, address=f"{name}:29500", lease_s=lease_s)
    return PostgresJournal(url, str(place), holder, JournalKey(SECRET, str(place)))


def seqs(url: str, place: Path) -> list[int]:
    reader = PostgresJournal(url, str(place))
    found = [one.seq for one in reader.read()]
    reader.close()
    return found


def succeeded(url: str, place: Path, name: str = "two") -> PostgresJournal:
    """A writer that waits for the lease of another."""
    until = time.monotonic() + 30
    while True:
        try:
            return writer(url, place, name)
        except LeaseLostError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_nobody_else_writes_as_long_as_the_lease_lasts(shared_postgres: str, tmp_path: Path) -> None:
    one = writer(shared_postgres, tmp_path)
    with pytest.raises(LeaseLostError, match=f" {re.escape(str(tmp_path))} "):
        writer(shared_postgres, tmp_path, "two")
    one.append(entry(1), durable=True)
    again = writer(shared_postgres, tmp_path)  # the next controller of the same front, which knows that one is gone
    assert again.epoch == 2
    with pytest.raises(LeaseLostError):
        one.append(entry(2), durable=True)
    again.close()
    one.close()
    two = writer(shared_postgres, tmp_path, "two")  # a journal that was closed is anybody's at once
    assert two.epoch == 3 and two.alive_at > time.time() - 600
    two.close()


def test_an_older_controller_can_neither_write_nor_act(shared_postgres: str, tmp_path: Path) -> None:
    old = writer(shared_postgres, tmp_path, lease_s=SHORT_S)
    old.append(entry(1), durable=True)
    new = succeeded(shared_postgres, tmp_path)
    new.append(entry(2), durable=True)
    new.put_note("plan", b"of the new one")
    with pytest.raises(LeaseLostError, match=r" two:29500$"):
        _ = old.epoch  # what every errand asks for
    acts: tuple[Callable[[], None], ...] = (
        lambda: old.append(entry(2), durable=True),
        old.flush,
        lambda: old.put_note("plan", b"of the old one"),
        lambda: old.raise_epoch(9),
    )
    for act in acts:
        with pytest.raises(LeaseLostError):
            act()
    assert seqs(shared_postgres, tmp_path) == [1, 2] and new.get_note("plan") == b"of the new one"
    new.append(entry(3), durable=True)
    new.close()
    old.close()


def test_a_note_of_an_older_controller_does_not_count_even_at_once(shared_postgres: str, tmp_path: Path) -> None:
    """It has not looked at its lease since, and is refused by the statement itself."""
    old = writer(shared_postgres, tmp_path, lease_s=SHORT_S)
    new = succeeded(shared_postgres, tmp_path)
    with pytest.raises(LeaseLostError):
        old.put_note("plan", b"of the old one")
    assert new.get_note("plan") == b""
    new.close()
    old.close()


def test_a_lease_that_expired_and_that_nobody_took_goes_on(shared_postgres: str, tmp_path: Path) -> None:
    one = writer(shared_postgres, tmp_path, lease_s=SHORT_S)
    time.sleep(2 * SHORT_S)
    assert one.epoch == 1
    one.append(entry(1), durable=True)
    one.close()


def test_a_claim_of_a_front_ends_the_writer_before_it(shared_postgres: str, tmp_path: Path) -> None:
    old = writer(shared_postgres, tmp_path, lease_s=SHORT_S)
    link = PostgresLink(shared_postgres)
    until = time.monotonic() + 30
    while not postgres_lease.claim_run(link, str(tmp_path), "two", "", LONG_S):
        assert time.monotonic() < until
        time.sleep(0.02)
    with pytest.raises(LeaseLostError):
        old.append(entry(1), durable=True)
    old.close()
    new = writer(shared_postgres, tmp_path, "two")
    assert new.epoch == 2, "a claim is no epoch: the first controller of a run is number 1"
    new.append(entry(1, Phase.DONE), durable=True)
    new.close()
    assert not postgres_lease.claim_run(link, str(tmp_path), "three", "", LONG_S), "nobody takes over what is done"
    assert postgres_lease.claim_run(link, str(tmp_path), "two", "", 0.0), "but for its own front"
    assert postgres_lease.claim_run(link, str(tmp_path), "three", "", LONG_S, ended=True), "or one that goes on with it"
    link.close()


class DeafLink:
    """A link whose answers are lost: the server has carried the statement out."""

    def __init__(self, real: PostgresLink, times: int) -> None:
        self._real, self._times = real, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, statement: str, values: Any = None) -> Any:
        found = self._real.execute(statement, values)
        if self._times:
            self._times -= 1
            raise JournalAwayError("the answer is lost")
        return found


def test_an_answer_that_is_lost_writes_nothing_twice(
    shared_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = writer(shared_postgres, tmp_path)
    monkeypatch.setattr(journal, "_link", DeafLink(journal._link, 2))
    journal.append(entry(1), durable=False)
    journal.append(entry(2), durable=True)
    journal.append(entry(3), durable=True)
    assert seqs(shared_postgres, tmp_path) == [1, 2, 3]
    journal.close()


def test_damage_is_named(shared_postgres: str, tmp_path: Path) -> None:
    journal = writer(shared_postgres, tmp_path)
    for number in range(1, 4):
        journal.append(entry(number), durable=True)
    link = PostgresLink(shared_postgres)
    link.execute("update holdfast.entry set at = 7 where run_id = %(run)s and seq = 2", {"run": str(tmp_path)})
    with pytest.raises(JournalDamagedError, match=r": entry 2 "):
        list(journal.read())
    link.execute("update holdfast.run set chain = '' where run_id = %(run)s", {"run": str(tmp_path)})
    with pytest.raises(JournalError, match=f" {re.escape(str(tmp_path))}, ") as raised:
        journal.append(entry(4), durable=True)
    assert raised.type is JournalError, "neither a lost lease, nor a server that is away"
    journal.close()
    link.close()


def test_addresses_that_are_refused() -> None:
    for kept in ("me:secret@host/db", "host/db?password=p", "host/db?sslpassword=p"):
        assert "~/.pgpass" in why_no_url(f"postgres://{kept}"), kept
    assert not why_no_url("postgres://host/db?passfile=/a/file&sslkey=/a/key")
    assert "postgres://HOST/DATABASE" in why_no_url("mysql://host/db")
    assert '"nonsense"' in why_no_url("postgres://host/db?nonsense=1")
    assert not why_no_url("postgres://me@one,two/db?target_session_attrs=read-write")


def test_tables_go_forward_and_one_back(shared_postgres: str, tmp_path: Path) -> None:
    journal = writer(shared_postgres, tmp_path)
    journal.append(entry(1), durable=True)
    link = PostgresLink(shared_postgres)
    assert postgres_schema.migrate_schema(link, postgres_schema.SCHEMA - 1) == postgres_schema.SCHEMA
    journal.append(entry(2), durable=True)  # a controller of either version goes on meanwhile
    with pytest.raises(JournalError, match=f" holdfast journal .* --schema {postgres_schema.SCHEMA}$"):
        PostgresJournal(shared_postgres, str(tmp_path))
    later = writer(shared_postgres, tmp_path)  # whoever writes brings them forward
    assert seqs(shared_postgres, tmp_path) == [1, 2]
    link.execute("update holdfast.version set version = 99")
    for refused in (lambda: writer(shared_postgres, tmp_path), lambda: postgres_schema.migrate_schema(link, 4)):
        with pytest.raises(JournalError, match="version 99, of a newer holdfast"):
            refused()
    link.execute(f"update holdfast.version set version = {postgres_schema.SCHEMA}")
    with pytest.raises(JournalError, match="not to 0"):
        postgres_schema.migrate_schema(link, 0)
    later.close()
    journal.close()
    link.close()


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.e2e
def test_a_server_that_goes_away(own_postgres: PostgresServer, tmp_path: Path) -> None:
    """What was durable is there; a write waits for a server that comes back, but no longer than the lease lasts."""
    url = own_postgres.url
    journal = writer(url, tmp_path, lease_s=LONG_S)
    journal.append(entry(1), durable=True)
    own_postgres.kill()
    writing = beside(lambda: journal.append(entry(2), durable=True))
    own_postgres.up()  # the server ends with the thread that started it
    writing.join()
    assert seqs(url, tmp_path) == [1, 2]

    hasty = PostgresJournal(url, "hasty", LeaseHolder(name="one", lease_s=2.0), JournalKey(SECRET, "hasty"))
    own_postgres.freeze()
    began_at = time.monotonic()
    try:
        with pytest.raises(JournalAwayError, match="no answer"):
            hasty.append(entry(1), durable=True)
    finally:
        own_postgres.freeze(signal.SIGCONT)
    assert time.monotonic() - began_at < 30
    with pytest.raises(JournalAwayError):  # it may have got further than the server knows, and writes no more
        hasty.append(entry(2), durable=True)
    hasty.close()
    own_postgres.kill()
    with pytest.raises(JournalAwayError, match=f" {re.escape(url)} "):
        seqs(url, tmp_path)
    journal._link.close()
