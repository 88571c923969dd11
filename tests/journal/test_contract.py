"""What every journal must do. A second implementation joins JOURNALS and passes the same tests."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.controller_interfaces import Journal
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Entry
from tests.core.transcript import Scenario
from tests.postgres_server import named_url

ROOT = Path(__file__).parents[2]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """How to open one sort of journal that lives under a place, to write and to read."""

    name: str
    write: Callable[[Path], Journal]
    read: Callable[[Path], Journal]
    word: str  # in every sentence about what cannot be opened


JOURNALS = (
    Kind(
        name="sqlite",
        write=lambda place: SqliteJournal(place / "journal.db"),
        read=lambda place: SqliteJournal(place / "journal.db", read_only=True),
        word="journal.db",
    ),
    Kind(
        name="shared",  # as on a file system of several hosts
        write=lambda place: SqliteJournal(place / "journal.db", shared=True),
        read=lambda place: SqliteJournal(place / "journal.db", read_only=True),
        word="journal.db",
    ),
    Kind(
        name="postgres",
        write=lambda place: open_postgres(place, "to write"),
        read=lambda place: open_postgres(place),
        word="holdfast-pg-",
    ),
)


def open_postgres(place: Path, holder: str = "") -> Journal:
    """A journal in the server that all tests share; the place is its name."""
    from holdfast.journal.journal_key import JournalKey
    from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

    lease, key = (LeaseHolder(name=holder), JournalKey("", str(place))) if holder else (None, None)
    return PostgresJournal(named_url(), str(place), lease, key)


@pytest.fixture(params=[kind.name for kind in JOURNALS])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "postgres":
        request.getfixturevalue("shared_postgres")
    return named(request.param)


def named(name: str) -> Kind:
    return next(kind for kind in JOURNALS if kind.name == name)


def program(body: str, kind: Kind, place: Path) -> list[str]:
    """A command that opens the journal at this place in a process of its own and runs this body."""
    head = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "from holdfast.model.decider_events import Tick\n"
        "from holdfast.model.journal_entry import Decision, Entry\n"
        "from tests.journal.test_contract import JournalError, entries, named\n"
        "kind, place = named(sys.argv[1]), Path(sys.argv[2])\n"
        "if kind.name == 'postgres': import holdfast.journal.postgres_journal\n"
    )
    return [sys.executable, "-c", head + body, kind.name, str(place)]


def entries(scenario: str = "silence_after_echoes") -> list[Entry]:
    played = Scenario(scenario)
    played.play()
    return played.entries


def fill(journal: Journal, found: list[Entry], durable: bool = True) -> None:
    for entry in found:
        journal.append(entry, durable)


def test_entries_come_back_as_they_were_in_order(kind: Kind, tmp_path: Path) -> None:
    written = entries()
    journal = kind.write(tmp_path)
    for entry in written:
        journal.append(entry, durable=bool(entry.decision.actions))
    assert list(journal.read()) == written
    assert list(journal.read(after=5)) == written[5:]
    assert list(journal.read(after=len(written))) == []
    journal.close()


def test_what_was_closed_is_there_when_it_is_opened_again(kind: Kind, tmp_path: Path) -> None:
    written = entries()
    journal = kind.write(tmp_path)
    fill(journal, written[:5], durable=False)
    journal.close()
    journal = kind.write(tmp_path)
    assert list(journal.read()) == written[:5]
    fill(journal, written[5:])
    journal.close()
    reader = kind.read(tmp_path)
    assert list(reader.read()) == written
    reader.close()


def test_a_reader_sees_what_is_durable_while_it_is_written(kind: Kind, tmp_path: Path) -> None:
    written = entries()
    journal = kind.write(tmp_path)
    fill(journal, written[:3])
    reader = kind.read(tmp_path)
    assert list(reader.read()) == written[:3]
    journal.append(written[3], durable=False)
    assert list(reader.read()) in (written[:3], written[:4])
    journal.append(written[4], durable=True)
    assert list(reader.read()) == written[:5]
    slow = reader.read()
    assert next(slow) == written[0]
    fill(journal, written[5:])  # a reader in the middle of it holds nobody up
    assert list(slow)[:4] == written[1:5]
    journal.close()
    reader.close()


@pytest.mark.e2e
def test_durable_means_that_not_even_a_kill_takes_it_back(kind: Kind, tmp_path: Path) -> None:
    written = entries()
    body = (
        "journal = kind.write(place)\n"
        "for entry in entries()[:8]:\n"
        "    journal.append(entry, durable=entry.seq == 8)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(program(body, kind, tmp_path), cwd=ROOT, timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    journal = kind.write(tmp_path)
    assert list(journal.read()) == written[:8]
    fill(journal, written[8:])
    assert list(journal.read()) == written
    journal.close()


@pytest.mark.e2e
def test_what_survives_a_kill_has_no_gaps(kind: Kind, tmp_path: Path) -> None:
    body = (
        "journal = kind.write(place)\n"
        "for seq in range(1, 1_000_000):\n"
        "    journal.append(Entry(seq=seq, at=float(seq), event=Tick(), decision=Decision()), durable=seq % 10 == 0)\n"
        "    if seq % 10 == 0: print(seq, flush=True)\n"
    )
    process = subprocess.Popen(program(body, kind, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    told = 0
    while told < 500:
        told = int(process.stdout.readline())
    process.kill()
    told = max([told, *(int(line) for line in process.stdout if line.strip())])
    process.stdout.close()
    process.wait(60)
    reader = kind.write(tmp_path)
    found = [entry.seq for entry in reader.read()]
    reader.close()
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= told


def test_an_entry_is_never_written_over(kind: Kind, tmp_path: Path) -> None:
    written = entries()
    journal = kind.write(tmp_path)
    fill(journal, written[:3])
    with pytest.raises(JournalError):
        journal.append(Entry(seq=3, at=9.0, event=Tick(), decision=written[0].decision), durable=True)
    assert list(journal.read()) == written[:3]
    journal.close()


def test_reading_what_is_not_there(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        kind.read(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.e2e
def test_a_place_that_may_not_be_written(kind: Kind, tmp_path: Path) -> None:
    if kind.name == "postgres" and os.geteuid() != 0:
        pytest.skip("the server is our own user's")
    kind.write(tmp_path).close()
    tmp_path.chmod(0o700)
    # Permissions do not bind root, so the other process gives that up once it has imported what it needs.
    body = (
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "else: os.chmod(place, 0o000)\n"
        "try: kind.write(place)\n"
        "except JournalError as e: print(json.dumps(str(e)))\n"
    )
    command = program(body, kind, tmp_path)
    run = subprocess.run(command, cwd=ROOT, timeout=60, check=False, capture_output=True, text=True)
    tmp_path.chmod(0o700)
    assert run.returncode == 0, run.stderr
    assert kind.word in json.loads(run.stdout)
