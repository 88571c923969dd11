"""Values of `update --env` are not in the clear in a run directory, and ranks get them all the same."""

from pathlib import Path

import pytest

from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.journal import local_env_cipher
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.journal_key import ENCRYPTED
from holdfast.journal.local_env_cipher import LocalEnvCipher
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Order, Tick
from holdfast.model.journal_entry import Decision, Entry

VALUE = "correct-horse-battery"
RELEASE = Release(number=2, digest="ab" * 32, env={"HUB_PASSWORD": VALUE, "LR": ""})


def open_journal(folder: Path, *, writes: bool = True) -> SqliteJournal:
    cipher = LocalEnvCipher(folder / run_dir_secrets.JOURNAL_KEY, writes=writes)
    mark = folder / "journal.mark"
    return SqliteJournal(folder / "journal.db", read_only=not writes, mark_path=mark, cipher=cipher)


def written(folder: Path, *releases: Release) -> None:
    journal = open_journal(folder)
    journal.append(Entry(seq=1, at=1.0, event=Tick(), decision=Decision()), durable=True)
    for seq, release in enumerate(releases, 2):
        order = Order(verb="update", who="ann", release=release)
        journal.append(Entry(seq=seq, at=1.0, event=order, decision=Decision()), durable=True)
    journal.close()


def environments(journal: SqliteJournal) -> list[dict[str, str]]:
    orders = [entry.event for entry in journal.read()]
    journal.close()
    return [order.release.env for order in orders if isinstance(order, Order) and order.release]


def test_no_file_has_a_value_but_by_the_key(tmp_path: Path) -> None:
    written(tmp_path, RELEASE)
    key = tmp_path / run_dir_secrets.JOURNAL_KEY
    assert key.stat().st_mode & 0o777 == 0o600
    assert not [path.name for path in tmp_path.iterdir() if VALUE.encode() in path.read_bytes()]
    assert environments(open_journal(tmp_path)) == [RELEASE.env]
    assert environments(open_journal(tmp_path, writes=False)) == [RELEASE.env]
    run_dir_secrets.forget_secrets(tmp_path)
    assert not key.exists()
    [env] = environments(open_journal(tmp_path, writes=False))
    assert list(env) == ["HUB_PASSWORD", "LR"] and all(value.startswith(ENCRYPTED) for value in env.values())
    [same] = environments(SqliteJournal(tmp_path / "journal.db", read_only=True))
    assert same == env


def test_both_know_what_is_encrypted() -> None:
    assert ENCRYPTED.encode() == local_env_cipher.ENCRYPTED


def test_a_job_without_such_values_has_no_key(tmp_path: Path) -> None:
    written(tmp_path, Release(number=2, digest="ab" * 32))
    assert not (tmp_path / run_dir_secrets.JOURNAL_KEY).exists()
    assert environments(open_journal(tmp_path)) == [{}]


@pytest.mark.parametrize("key", [None, b"", b"0" * 32, b"\xff"], ids=["gone", "empty", "another", "no text"])
def test_a_controller_without_the_key_starts_no_rank_with_what_is_no_value(tmp_path: Path, key: bytes | None) -> None:
    written(tmp_path, RELEASE)
    path = tmp_path / run_dir_secrets.JOURNAL_KEY
    path.unlink()
    if key is not None:
        path.write_bytes(key)
    with pytest.raises(JournalError, match=f"^{path} .*update --env"):
        environments(open_journal(tmp_path))


def test_a_journal_of_an_older_version_is_read(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db", mark_path=tmp_path / "journal.mark")
    order = Order(verb="update", who="ann", release=RELEASE)
    journal.append(Entry(seq=1, at=1.0, event=order, decision=Decision()), durable=True)
    journal.close()
    assert environments(open_journal(tmp_path)) == [RELEASE.env]


def test_a_key_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / run_dir_secrets.JOURNAL_KEY).symlink_to(tmp_path / "nowhere" / "at all")
    written(tmp_path, RELEASE)
    assert not (tmp_path / run_dir_secrets.JOURNAL_KEY).is_symlink(), (
        "it is replaced, and nothing is written through it"
    )
    assert environments(open_journal(tmp_path)) == [RELEASE.env]
