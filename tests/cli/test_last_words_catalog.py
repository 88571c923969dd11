"""`holdfast catalog`, as a person types it."""

import io
import json
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.config import WordLimits
from holdfast.logs import catalog_files, user_rows

LINE = "[rank3]: ZorbError: zorblax 17 is out of phase, reset the fabric"
GOOD = """
[[row]]
klass = "data_corrupt"
pattern = 'ZorbError: frame \\d+ is torn'
sample = "ZorbError: frame 12 is torn"
source = "ours"
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["catalog", *argv])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_line_becomes_a_row(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    code, text = said(capsys, "propose", "framework_runtime_error", LINE)
    assert code == 0
    name = text.rsplit(" ", 1)[1].strip()
    code, text = said(capsys, "ls")
    assert name in text
    assert "0 of your own" in text
    assert "1 proposed" in text
    assert said(capsys, "check", name)[0] == 0
    assert said(capsys, "add", name)[0] == 0
    code, text = said(capsys, "ls", "--json")
    tree = json.loads(text)
    assert tree["proposed"] == {}
    assert tree["own"][0]["sample"] == "ZorbError: zorblax 17 is out of phase, reset the fabric"
    other = LINE.replace("17", "9")
    assert catalog_files.load_failures(WordLimits()).match_line(other) == list(
        user_rows.read_user_rows(home / "words.toml")
    )
    assert said(capsys, "add", name)[0] == 2  # it is no longer there


def test_secrets_do_not_get_into_the_catalog(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"ZorbError: zorblax refused token hf_{'aB3d' * 8} of the third kind\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    code, text = said(capsys, "propose", "config_argument", "-")
    assert code == 0
    assert "aB3d" not in text


def test_rows_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, mine = tmp_path / "rows.toml", tmp_path / "mine.toml"
    file.write_text(GOOD)
    where = ["--set", f"words.catalog={mine}"]
    assert said(capsys, "check", str(file), *where)[0] == 0
    assert said(capsys, "add", str(file), *where)[0] == 0
    assert said(capsys, "add", str(file), *where)[0] == 0
    assert len(user_rows.read_user_rows(mine)) == 1, "it is there once"
    assert said(capsys, "check", str(mine), *where)[0] == 0
    assert said(capsys, "add", str(mine), *where)[0] == 2
    text = said(capsys, "ls", "--all", *where)[1]
    assert "own        data_corrupt" in text
    assert "holdfast   gpu_oom" in text


def test_faulty_rows_are_not_added(capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(GOOD + GOOD.replace("ZorbError: frame", "OtherError: frame", 1))
    code, text = said(capsys, "check", str(file))
    assert code == 1
    assert user_rows.UNMATCHED in text
    code, text = said(capsys, "add", str(file))
    assert code == 1 and str(home / "words.toml") in text
    assert not (home / "words.toml").exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["add", "nowhere"], "no file and no proposal 'nowhere'"),
        (["check", "/dev/null"], "has no rows"),
        (["propose", "no_such_class", LINE], "no_such_class"),
        (["propose", "gpu_oom", "step 12"], "nothing can be looked for|says nothing"),
        (["ls", "--set", "words"], "KEY=VALUE"),
        (["ls", "--set", "words.zorb=1"], "no setting"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], why: str) -> None:
    code, text = said(capsys, *argv)
    assert code == 2
    assert any(part in text for part in why.split("|")), text
    assert text.count("\n") == 1
