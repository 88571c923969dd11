"""What a host that takes a run over finds in the database: keys, sealed, and releases."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.model.event import Begin, Decision, Entry, Limits
from holdfast.model.job_and_seats import Job

pytest.importorskip("psycopg", reason="the extra postgres is not installed")
from holdfast.cli.launch import run_handover
from holdfast.cli.launch.run_handover import HandoverNotes, restore_run
from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

SECRET = "0b1c8e93d7a24f56b8e1902c7d3f4a65"
SMALL, LARGE = "a" * 64, "b" * 64


def made_run_dir(folder: Path) -> Path:
    folder.mkdir()
    run_directory.write_door_secret(folder, SECRET)
    run_directory.open_authority(folder)
    (folder / "releases").mkdir()
    (folder / "releases" / f"{SMALL}.tar").write_bytes(bytes(range(256)) * 9000)  # of three chunks
    (folder / "releases" / f"{LARGE}.tar").write_bytes(b"too large")
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def hand_over(notes: HandoverNotes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            await notes.run()


def test_another_host_gets_keys_and_releases(
    shared_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, said = made_run_dir(tmp_path / "run"), list[str]()
    monkeypatch.setattr(run_handover, "MOST_BYTES", 256 * 9000)
    (run_dir / "releases" / f"{LARGE}.tar").write_bytes(bytes(256 * 9000 + 1))
    journal = PostgresJournal(shared_postgres, str(tmp_path), LeaseHolder(name="one"))
    begin = Begin(
        job=Job(run_id=str(tmp_path), min_nodes=1, max_nodes=2, standbys=0, max_restarts=None), limits=Limits()
    )
    journal.append(Entry(seq=1, at=1.0, event=begin, decision=Decision()), durable=True)
    notes = HandoverNotes(journal, run_dir, said.append)
    asyncio.run(hand_over(notes))
    assert len(said) == 1 and LARGE[:12] in said[0]
    stored = [journal.get_note(name) for name in journal.list_notes("")]
    assert not any(b"PRIVATE KEY" in content or SECRET.encode() in content for content in stored)

    reader = PostgresJournal(shared_postgres, str(tmp_path))
    (tmp_path / "other").mkdir()
    assert restore_run(reader, tmp_path / "other", SECRET) == begin
    assert content_of(tmp_path / "other" / "door") == content_of(run_dir / "door")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "other" / "door").iterdir()} == {0o600}
    found = content_of(tmp_path / "other" / "releases")
    assert found == {f"{SMALL}.tar": (run_dir / "releases" / f"{SMALL}.tar").read_bytes()}

    (tmp_path / "stranger").mkdir()
    with pytest.raises(UsageError, match="set HOLDFAST_TOKEN to the same value"):
        restore_run(reader, tmp_path / "stranger", SECRET[::-1])
    notes.forget_keys()
    assert reader.get_note("door") == b""
    reader.close()
    journal.close()
