"""Whoever can write to the database, and lacks the job's secret, changes a run: the next controller refuses it."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Event, Order, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.journal.entry_chain import make_row, parse_row
from holdfast.journal.journal_errors import JournalDamagedError, LeaseLostError
from holdfast.journal.journal_key import JournalKey
from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal
from holdfast.journal.postgres_link import PostgresLink

SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
EVIL = "e" * 64
JOB = Job(run_id="run", min_nodes=1, max_nodes=1, standbys=0, max_restarts=None)
BEGIN = Begin(job=JOB, limits=Limits(), release=Release(number=1, digest="a" * 64))
UPDATE = Order(verb="update", who="me", release=Release(number=2, env={"NAME": "topsecretenv"}))
EVENTS: tuple[Event, ...] = (BEGIN, Tick(), UPDATE, Tick())


def open_writer(
    url: str, run: str, secret: str = SECRET, name: str = "one", *, adopts: bool = False
) -> PostgresJournal:
    holder = LeaseHolder(name=name, lease_s=60.0)
    return PostgresJournal(url, run, holder, JournalKey(secret, run), adopts=adopts)


def written(url: str, run: str) -> list[Entry]:
    """A run with entries and notes, whose controller has gone."""
    entries = [Entry(seq=i, at=float(i), event=event, decision=Decision()) for i, event in enumerate(EVENTS, 1)]
    with contextlib.closing(open_writer(url, run)) as journal:
        journal.put_note("door", b"no token is used")
        for entry in entries[:2]:
            journal.append(entry, durable=False)
        journal.put_note("door", b"a token is used")
        journal.put_note("plan", b"of the last launch")
        for entry in entries[2:]:
            journal.append(entry, durable=True)
    return entries


def went_on(url: str, run: str, *, adopts: bool = False) -> list[Entry]:
    """What the next controller of the run believes."""
    with contextlib.closing(open_writer(url, run, adopts=adopts)) as journal:
        found = list(journal.read())
        assert journal.get_note("door") == b"a token is used" and journal.get_note("plan") == b"of the last launch"
        return found


class Forger:
    """Somebody who may write to the database, and knows how holdfast does."""

    def __init__(self, url: str, run: str) -> None:
        self.link, self._run = PostgresLink(url), run

    def do(self, statement: str, **values: object) -> list[tuple[object, ...]]:
        return self.link.execute(statement, {"run": self._run, **values})

    def rewrite_history(self) -> None:
        """Name another tree in the first entry, and compute all checksums again."""
        self.do("update holdfast.run set chain = %(chain)s where run_id = %(run)s", chain=self.rewrite_entries())

    def rewrite_entries(self) -> bytes:
        [(chain,)] = self.do("select start from holdfast.run where run_id = %(run)s")
        columns = "seq, at, event, decision, epoch, chain"
        for values in self.do(f"select {columns} from holdfast.entry where run_id = %(run)s order by seq"):
            row = parse_row(values)
            assert row and isinstance(chain, bytes)
            entry = row.entry
            if isinstance(entry.event, Begin):
                release = msgspec.structs.replace(entry.event.release, digest=EVIL)
                entry = msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, release=release))
            new = make_row(entry, row.epoch, chain)
            put = "update holdfast.entry set event = %(event)s, chain = %(chain)s"
            self.do(f"{put} where run_id = %(run)s and seq = %(seq)s", event=new.event, chain=new.chain, seq=new.seq)
            chain = new.chain
        assert isinstance(chain, bytes)
        return chain

    def add_entry(self) -> None:
        """Append an order after the last entry, and leave all else alone."""
        [(seq, chain)] = self.do("select seq, chain from holdfast.run where run_id = %(run)s")
        assert isinstance(seq, int) and isinstance(chain, bytes)
        order = Order(verb="update", who="me", release=Release(number=3, digest=EVIL))
        row = make_row(Entry(seq=seq + 1, at=9.0, event=order, decision=Decision()), 1, chain)
        values = msgspec.structs.asdict(row)
        names = ", ".join(f"%({name})s" for name in values)
        self.do(f"insert into holdfast.entry values (%(run)s, {names})", **values)

    def cut_history(self) -> None:
        """Remove the last entry, and what the row of the run says of it."""
        self.do("delete from holdfast.entry where run_id = %(run)s and seq = 4")
        self.do(
            "update holdfast.run set seq = 3, chain = (select chain from holdfast.entry where run_id = %(run)s and "
            "seq = 3) where run_id = %(run)s"
        )

    def lose_entries(self) -> None:
        self.do("delete from holdfast.entry where run_id = %(run)s and seq > 2")

    def swap_notes(self) -> None:
        self.do("update holdfast.note set name = 'spare' where run_id = %(run)s and name = 'door'")
        self.do("update holdfast.note set name = 'door' where run_id = %(run)s and name = 'plan'")
        self.do("update holdfast.note set name = 'plan' where run_id = %(run)s and name = 'spare'")

    def remove_note(self) -> None:
        self.do("delete from holdfast.note where run_id = %(run)s and name = 'plan'")

    def add_note(self) -> None:
        self.do("insert into holdfast.note values (%(run)s, %(name)s, 'tar')", name=f"release/{EVIL}")

    def remove_proof(self) -> None:
        self.do("update holdfast.run set proof = '' where run_id = %(run)s")


@pytest.fixture
def forger(shared_postgres: str, tmp_path: Path) -> Iterator[Forger]:
    made = Forger(shared_postgres, str(tmp_path))
    with contextlib.closing(made.link):
        yield made


@pytest.mark.parametrize(
    "forge",
    [
        Forger.rewrite_history,
        Forger.rewrite_entries,
        Forger.add_entry,
        Forger.cut_history,
        Forger.lose_entries,
        Forger.swap_notes,
        Forger.remove_note,
        Forger.add_note,
        Forger.remove_proof,
    ],
)
def test_a_run_that_somebody_changed_is_refused(
    forge: Callable[[Forger], object], forger: Forger, shared_postgres: str, tmp_path: Path
) -> None:
    entries = written(shared_postgres, str(tmp_path))
    assert went_on(shared_postgres, str(tmp_path)) == entries
    forge(forger)
    with pytest.raises(JournalDamagedError, match=r"not known|no proof|is damaged"):
        went_on(shared_postgres, str(tmp_path))
    with contextlib.closing(PostgresJournal(shared_postgres, str(tmp_path))) as reader:
        assert next(iter(reader.read())).seq == 1, "whoever only looks sees what is there"


def test_an_older_note_put_back_is_refused(forger: Forger, shared_postgres: str, tmp_path: Path) -> None:
    """A token that was used once could be used again."""
    run = str(tmp_path)
    journal = open_writer(shared_postgres, run)
    journal.put_note("door", b"no token is used")
    [(older,)] = forger.do("select content from holdfast.note where run_id = %(run)s and name = 'door'")
    journal.close()
    written(shared_postgres, run)
    forger.do("update holdfast.note set content = %(older)s where run_id = %(run)s and name = 'door'", older=older)
    with pytest.raises(JournalDamagedError, match=f" {re.escape(run)} .* HOLDFAST_TOKEN "):
        open_writer(shared_postgres, run)


def test_a_note_that_is_changed_under_a_controller_is_refused(
    forger: Forger, shared_postgres: str, tmp_path: Path
) -> None:
    written(shared_postgres, str(tmp_path))
    with contextlib.closing(open_writer(shared_postgres, str(tmp_path))) as journal:
        forger.swap_notes()
        with pytest.raises(JournalDamagedError, match=r"\bnote door\b"):
            journal.get_note("door")


def test_another_secret_opens_nothing(shared_postgres: str, tmp_path: Path) -> None:
    written(shared_postgres, str(tmp_path))
    with pytest.raises(JournalDamagedError, match=" HOLDFAST_TOKEN "):
        open_writer(shared_postgres, str(tmp_path), SECRET[::-1])


def test_who_has_lost_the_lease_does_not_take_its_successor_for_a_forger(
    forger: Forger, shared_postgres: str, tmp_path: Path
) -> None:
    written(shared_postgres, str(tmp_path))
    slow = open_writer(shared_postgres, str(tmp_path))
    reading = slow.read()
    forger.do("update holdfast.run set expires_at = clock_timestamp() where run_id = %(run)s")
    with contextlib.closing(open_writer(shared_postgres, str(tmp_path), name="two")) as journal:
        journal.append(Entry(seq=5, at=5.0, event=Tick(), decision=Decision()), durable=True)
        journal.put_note("plan", b"of the next launch")
        with pytest.raises(LeaseLostError):
            list(reading)
        with pytest.raises(LeaseLostError):
            slow.get_note("plan")
    slow.close()


def test_a_run_of_an_older_version_goes_on_where_its_run_directory_is(
    forger: Forger, shared_postgres: str, tmp_path: Path
) -> None:
    entries = written(shared_postgres, str(tmp_path))
    for name, content in (("door", b"a token is used"), ("plan", b"of the last launch")):  # as they were in the clear
        put = "update holdfast.note set content = %(content)s where run_id = %(run)s and name = %(name)s"
        forger.do(put, name=name, content=content)
    forger.remove_proof()
    with pytest.raises(JournalDamagedError, match=" holdfast run --resume "):
        open_writer(shared_postgres, str(tmp_path))
    assert went_on(shared_postgres, str(tmp_path), adopts=True) == entries
    assert went_on(shared_postgres, str(tmp_path)) == entries, "it has a proof by now"


def test_values_of_the_environment_are_for_who_has_the_key(
    forger: Forger, shared_postgres: str, tmp_path: Path
) -> None:
    entries = written(shared_postgres, str(tmp_path))
    found = forger.do(
        "select event, decision from holdfast.entry where run_id = %(run)s union all "
        "select content, content from holdfast.note where run_id = %(run)s"
    )
    assert not any(b"topsecretenv" in bytes(part) for row in found for part in row if isinstance(part, bytes))
    for key in (JournalKey(SECRET, str(tmp_path)), None):
        with contextlib.closing(PostgresJournal(shared_postgres, str(tmp_path), key=key)) as reader:
            assert (list(reader.read()) == entries) == (key is not None)
