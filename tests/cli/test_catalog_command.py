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
NOTE = "the kiln"
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
    tree = json.loads(said(capsys, "ls", "--json")[1])
    assert tree["own"] == [] and list(tree["proposed"]) == [name]
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
    listed = [line.split()[:2] for line in said(capsys, "ls", "--all", *where)[1].splitlines()]
    assert ["own", "data_corrupt"] in listed and ["holdfast", "gpu_oom"] in listed


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


def test_a_proposal_can_be_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    name = said(capsys, "propose", "framework_runtime_error", LINE)[1].rsplit(" ", 1)[1].strip()
    assert said(capsys, "reject", name)[0] == 0
    assert json.loads(said(capsys, "ls", "--json")[1])["proposed"] == {}
    code, text = said(capsys, "reject", name)
    assert code == 2 and name in text


def test_a_failure_that_was_corrected_is_known_when_it_comes_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path
) -> None:
    log = tmp_path / "job.log"

    def write_log(number: int) -> None:
        log.write_text(
            f"step {number}\nzorblax {number} of 10.0.0.{number} is out of phase, kiln unreachable\nbye {number} x\n"
        )

    def diagnosed() -> dict[str, object]:
        main(["diagnose", str(log), "--json"])
        tree: dict[str, object] = json.loads(capsys.readouterr().out)
        return tree

    write_log(17)
    assert diagnosed()["class"] == "unknown_child_failure"
    assert said(capsys, "correct", "gpu_lost_bus", str(log), "--note", f"{NOTE}, password=hunter2")[0] == 0
    write_log(9)
    found = diagnosed()
    assert (found["class"], found["action"]) == ("gpu_lost_bus", "run_diagnostics")
    assert NOTE in str(found["explanation"])
    stored = (home / "past_cases.json").read_text()
    assert "hunter2" not in stored and "10.0.0" not in stored
    [case] = json.loads(said(capsys, "past", "--json")[1])
    assert (case["klass"], case["said_by"], case["times"]) == ("gpu_lost_bus", "person", 1)
    assert case["klass"] in said(capsys, "past")[1] and NOTE in case["note"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["correct", "no_such_class", "LOG"], "no_such_class"),
        (["correct", "gpu_oom", "EMPTY"], "no line"),
        (["correct", "gpu_oom", "NOWHERE"], "NOWHERE"),
    ],
)
def test_corrections_that_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LOG").write_text(LINE)
    (tmp_path / "EMPTY").write_text("\n")
    code, text = said(capsys, *argv)
    assert code == 2 and why in text and text.count("\n") == 1
