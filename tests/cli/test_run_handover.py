"""What a host that takes a run over finds in the database: keys, encrypted, and releases."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.config import Settings
from holdfast.model.decider_events import Begin
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.cli.launch import run_handover
from holdfast.cli.launch.journal_and_notes import open_record
from holdfast.cli.launch.run_handover import HandoverNotes, restore_run
from holdfast.journal.journal_errors import JournalDamagedError, JournalError
from holdfast.journal.journal_key import JournalKey
from holdfast.journal.lease_term import no_lease
from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal
from holdfast.journal.postgres_link import PostgresLink

SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
SMALL, LARGE = "a" * 64, "b" * 64


def made_run_dir(folder: Path) -> Path:
    folder.mkdir()
    run_dir_secrets.write_door_secret(folder, SECRET)
    run_dir_secrets.open_authority(folder)
    (folder / "releases").mkdir()
    (folder / "releases" / f"{SMALL}.tar").write_bytes(bytes(range(256)) * 9000)  # of three chunks
    (folder / "releases" / f"{LARGE}.tar").write_bytes(b"too large")
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def hand_over(journal: PostgresJournal, run_dir: Path) -> tuple[HandoverNotes, str]:
    """Until it says that the large release is not handed over, which comes last."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    notes = HandoverNotes(journal, run_dir, said.set_result)
    handing = asyncio.create_task(notes.run())
    async with asyncio.timeout(60):
        await said
    handing.cancel()
    return notes, said.result()


def test_another_host_gets_keys_and_releases(
    shared_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made_run_dir(tmp_path / "run")
    monkeypatch.setattr(run_handover, "MOST_BYTES", 256 * 9000)
    (run_dir / "releases" / f"{LARGE}.tar").write_bytes(bytes(256 * 9000 + 1))
    key = JournalKey(SECRET, str(tmp_path))
    journal = PostgresJournal(shared_postgres, str(tmp_path), LeaseHolder(name="one"), key)
    begin = Begin(
        job=Job(run_id=str(tmp_path), min_nodes=1, max_nodes=2, standbys=0, max_restarts=None), limits=Limits()
    )
    journal.append(Entry(seq=1, at=1.0, event=begin, decision=Decision()), durable=True)
    notes, said = asyncio.run(hand_over(journal, run_dir))
    assert LARGE[:12] in said
    link, ours = PostgresLink(shared_postgres), {"run": str(tmp_path)}
    stored = link.execute("select content from holdfast.note where run_id = %(run)s", ours)
    secrets = (b"PRIVATE KEY", SECRET.encode(), bytes(range(256)))
    assert len(stored) == 5 and not any(secret in content for (content,) in stored for secret in secrets)

    reader = PostgresJournal(shared_postgres, str(tmp_path), key=key)
    (tmp_path / "other").mkdir()
    assert restore_run(reader, tmp_path / "other", SECRET) == begin
    assert content_of(tmp_path / "other" / "door") == content_of(run_dir / "door")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "other" / "door").iterdir()} == {0o600}
    found = content_of(tmp_path / "other" / "releases")
    assert found == {f"{SMALL}.tar": (run_dir / "releases" / f"{SMALL}.tar").read_bytes()}

    (tmp_path / "stranger").mkdir()
    with pytest.raises(JournalDamagedError, match=r"\b2 entries\b.* 1 now\b"):
        restore_run(reader, tmp_path / "stranger", SECRET, 2)
    link.execute("update holdfast.note set content = '' where run_id = %(run)s and name = 'door'", ours)
    stranger = PostgresJournal(shared_postgres, str(tmp_path), key=JournalKey(SECRET[::-1], str(tmp_path)))
    for refused in (reader, stranger):
        with pytest.raises(JournalDamagedError, match=r"\bHOLDFAST_TOKEN\b"):
            restore_run(refused, tmp_path / "stranger", SECRET)
    assert not list((tmp_path / "stranger").iterdir()), "nothing of it was believed"
    notes.forget_keys()
    assert journal.get_note("door") == b""
    for opened in (reader, stranger, journal, link):
        opened.close()


def test_only_a_run_directory_of_an_older_version_goes_on_without_a_proof(shared_postgres: str, tmp_path: Path) -> None:
    """In the run directory of a newer one stands that there must be a proof: who removes it gains nothing."""
    run_dir, ours = made_run_dir(tmp_path / "run"), {"run": str(tmp_path)}
    run = RunSpec(
        job=Job(run_id=str(tmp_path), min_nodes=1, max_nodes=1, standbys=0, max_restarts=None),
        entry=EntryPoint(argv=("train.py",)),
        settings=Settings(),
        fleet="join",
        nproc=1,
        log_dir="",
        journal=shared_postgres,
        proven=True,
    )
    older = msgspec.structs.replace(run, proven=False)
    open_record(run, run_dir, "one", print, no_lease).journal.close()
    link = PostgresLink(shared_postgres)
    link.execute("update holdfast.run set proof = '' where run_id = %(run)s", ours)
    with pytest.raises(JournalDamagedError, match=r"\bproof\b.*\bholdfast run --resume\b"):
        open_record(run, run_dir, "one", print, no_lease)
    open_record(older, run_dir, "one", print, no_lease).journal.close()
    open_record(run, run_dir, "one", print, no_lease).journal.close()
    run_dir_secrets.forget_secrets(run_dir)
    with pytest.raises(JournalError, match=rf"^{run_dir} .*\bsecret\b"):
        open_record(run, run_dir, "one", print, no_lease)
    link.close()
