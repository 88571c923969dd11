"""`holdfast report` in other forms: two runs beside each other, a page to mail."""

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.commands.report import load_report
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.terminal.quantity_text import NO_STEP
from tests.cli.test_report import END, LINES, NO_STEPS, write
from tests.cli.test_report import run_dir as run_dir


def test_two_runs_beside_each_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write(run_dir, *LINES, *END)
    other = run_directory.make_run_dir(None, "other")
    spec = run_directory.read_spec(run_dir)
    run_directory.publish_run(other, spec)
    write(other, *NO_STEPS)
    assert main(["report", str(run_dir), "--compare", "other"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert " ".join(shown.split()).startswith("r other time 3 min 21 s 3 min 21 s ETTR")
    assert "not known" in shown and NO_STEP.partition(":")[0] in shown
    assert main(["report", str(run_dir), "--compare", "other", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"] == [str(run_dir), str(other)] and told["compared"]["ettr"][1] is None
    assert [one["job_s"] for one in told["reports"]] == told["compared"]["job_s"]
    assert main(["report", "--compare", "nothing"]) == 2
    assert ": nothing " in capsys.readouterr().err


def test_a_page_to_mail_is_one_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES, *END)
    page = tmp_path / "run.html"
    assert main(["report", str(run_dir), "--html", str(page)]) == 0
    text = page.read_text()
    [cause] = {one.cause for one in load_report(run_dir).incidents}
    assert "Content-Security-Policy" in text and cause and cause in text
    assert "src=" not in text and 'rel="stylesheet"' not in text, "it needs other files"
    (tmp_path / "link.html").symlink_to(page)
    assert main(["report", str(run_dir), "--html", f"{tmp_path}/link.html"]) == 2
    assert f" {tmp_path}/link.html: " in capsys.readouterr().err and (tmp_path / "link.html").is_symlink()
    refused = (["--html", f"{tmp_path}/nowhere/run.html"], ["--html", str(page), "--since", "5s"])
    capsys.readouterr()
    assert [main(["report", str(run_dir), *words]) for words in refused] == [2, 2]
    told = capsys.readouterr().err
    assert told.startswith(f"holdfast report: cannot write {tmp_path}/nowhere/run.html: No such file or directory\n")
    assert len(told.splitlines()) == 2
