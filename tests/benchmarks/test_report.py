"""Records of benchmarks: which commit was measured, and whether it was that commit."""

import subprocess
from pathlib import Path

import pytest

from benchmarks._report import commit


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a repository with a record, code, and something that is ignored."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("out/\n")
    (tmp_path / "code.py").write_text("one = 1\n")
    (folder / "words.json").write_text("{}\n")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return folder


def test_what_git_does_not_track_and_records_do_not_count(records: Path) -> None:
    root = records.parents[1]
    clean = commit(records)
    assert len(clean) == 12
    (root / "out").mkdir()
    (root / "out" / "part.json").write_text("{}")
    (root / "notes.txt").write_text("unrelated")
    (records / "words.json").write_text('{"seconds": 3}\n')
    (records / "dst.json").write_text("{}\n")
    assert commit(records) == clean


def test_changed_code_counts(records: Path) -> None:
    clean, code = commit(records), records.parents[1] / "code.py"
    code.write_text("one = 2\n")
    assert commit(records) == f"{clean}+"
    subprocess.run(["git", "add", "code.py"], cwd=code.parent, check=True)
    assert commit(records) == f"{clean}+"
    code.write_text("one = 1\n")
    subprocess.run(["git", "add", "code.py"], cwd=code.parent, check=True)
    assert commit(records) == clean


def test_outside_of_git_nobody_knows(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
