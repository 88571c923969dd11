"""`holdfast report` in other forms: two runs beside each other, a page to mail."""

import html
import json
import re
from pathlib import Path

import msgspec
import pytest
from rich.text import Text

from holdfast.cli import main
from holdfast.cli.commands.report_command import load_report, render_report
from holdfast.cli.commands.report_mailed_summary import write_summary
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.cli.terminal.quantity_text import NO_STEP
from tests.cli.console_transcript import assert_screens
from tests.cli.test_report_command import END, LINES, NO_STEPS, shown_report, write
from tests.cli.test_report_command import run_dir as run_dir
from tests.core.test_open_trouble import ASKS, TWO


def test_two_runs_beside_each_other(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write(run_dir, *LINES, *END)
    other = run_dir_creation.make_run_dir(None, "other")
    spec = run_directory.read_spec(run_dir)
    run_dir_creation.publish_run(other, spec)
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


def test_a_reader_of_mail_that_runs_no_script_shows_what_the_report_says(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, *LINES, *END)
    assert main(["report", str(run_dir), "--html", str(tmp_path / "run.html")]) == 0
    text = (tmp_path / "run.html").read_text()
    shown = re.sub(r"<(script|style|title)\b.*?</\1>", "", text, flags=re.S)
    assert "style=" not in shown, "its own policy has a browser refuse it"
    words = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", shown)).split())
    report = load_report(run_dir)
    [record] = report.incidents
    printed = render_report(report, width=0)
    for said in (run_dir.name, record.cause, record.verdict.reason, "silence 14.7 s", "train 99.3 s 49.4 %"):
        assert said in words, said
    for part in printed.renderables:
        assert not isinstance(part, Text) or " ".join(part.plain.split()) in words, part
    assert "Reading the journal" not in words and "needs JavaScript" not in words


def test_a_mailed_table_has_the_newest_incidents(run_dir: Path) -> None:
    write(run_dir, *LINES, *END)
    report = load_report(run_dir)
    many = [msgspec.structs.replace(report.incidents[0], number=n, cause=f"<b>cause {n}.") for n in range(1, 251)]
    restarts = tuple(msgspec.structs.replace(report.restarts[0], incident=one.number) for one in many)
    report = msgspec.structs.replace(report, incidents=tuple(many), restarts=restarts)
    text = write_summary("r", report, {}, render_report(report, width=0))
    told = [int(number) for number in re.findall(r"cause (\d+)\.", text)]
    assert (
        told == list(range(151, 251))
        and text.count("&lt;b&gt;cause") == 100
        and "<b>" not in text
        and "Incidents: 150 older ones" in text
    )


def test_a_job_that_stands_is_shown_with_its_open_incident(run_dir: Path) -> None:
    stands = {
        "asks a person": ASKS,
        "is held amid an incident": (*ASKS[:5], "3.05 order hold by ann", "3.1 outcome 2 ok"),
        "waits for a node": (*TWO, "3.1 outcome 2 ok", "9 tick"),
    }
    screens = {}
    for what, lines in stands.items():
        (run_dir / "journal.db").unlink(missing_ok=True)
        write(run_dir, *lines)
        found = load_report(run_dir)
        screens[what] = shown_report(run_dir, msgspec.structs.replace(found, absence=""))
        screens[f"{what}, without a controller"] = shown_report(run_dir, found)
    assert_screens("report_standing", screens)


def test_an_open_incident_is_in_every_form(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *ASKS)
    assert main(["report", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["standing"]
    assert told["asking"] and (told["held"], told["incident"]["number"]) == ("", 2)
    assert main(["report", "--html", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert f'"asking":{json.dumps(told["asking"])}' in page and json.dumps(told["incident"]["cause"]) in page
