"""The sealed half of the logs from outside is what it was when it was sealed."""

import zipfile
from pathlib import Path

from tests.corpus.seal import ARCHIVE, BATCHES, HASHES, OPEN, archive_hashes, draw_half


def test_the_sealed_logs_are_unchanged() -> None:
    listed = [line.split("  ", 1) for line in HASHES.read_text().splitlines()]
    assert {name: digest for digest, name in listed} == dict(archive_hashes(ARCHIVE))


def test_the_half_was_drawn_by_hashes_and_none_is_in_both() -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        sealed = {Path(name).parts[0] for name in archive.namelist()}
    names = [path.parent.name for path in OPEN.glob("*/label.toml") if path.parent.name.startswith(BATCHES)]
    assert len(sealed) + len(names) == 191 and all(name.startswith(BATCHES) for name in sealed)
    assert set(draw_half(sorted([*sealed, *names]))) == sealed
    assert not sealed & set(names)


def test_a_changed_log_is_seen(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/log.txt", "one")
    before = dict(archive_hashes(tmp_path / "a.zip"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/log.txt", "two")
    assert dict(archive_hashes(tmp_path / "a.zip")) != before
