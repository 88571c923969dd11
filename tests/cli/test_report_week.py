"""`holdfast report --week`: what it sums up is what the reports of the runs say, in text, JSON and one file."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.commands import report_week
from holdfast.cli.run_dirs import run_dir_creation
from holdfast.config import Settings
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Ready
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Entry
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec
from tests.core.test_page_view import simulated

Capture = pytest.CaptureFixture[str]
HOSTILE = "<b>\x1b[31mgpu-7"
TOKEN = "0b1c8e93d7a24f56b8e1902c7d3f4a65"


def on_hosts(entry: Entry) -> Entry:
    """The same entry, with nodes that tell their hosts: n0, which is evicted, one whose name nobody should obey."""
    if not isinstance(entry.event, Ready):
        return entry
    host = HOSTILE if entry.event.node == "n0" else f"host of {entry.event.node}"
    return msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, host=host))


ENTRIES = tuple(map(on_hosts, simulated()))
END = ENTRIES[-1].at


def write_run(name: str, entries: tuple[Entry, ...]) -> Path:
    run_dir = run_dir_creation.make_run_dir(None, name)
    job = Job(run_id=name, min_nodes=4, max_nodes=4, standbys=1)
    entry = EntryPoint(argv=("x",))
    run = RunSpec(job=job, entry=entry, settings=Settings(), fleet="local", nproc=2, log_dir="/l")
    run_dir_creation.publish_run(run_dir, run)
    with contextlib.closing(SqliteJournal(run_dir / "journal.db")) as journal:
        for one in entries:
            journal.append(one, durable=False)
    return run_dir


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two whole runs, and one whose journal cannot be read."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report_week, "_clock", lambda: END + 60.0)
    made = [write_run("one", ENTRIES), write_run("two", ENTRIES[: len(ENTRIES) // 2]), write_run("bad", ())]
    (made[2] / "journal.db").write_bytes(b"this is no journal" * 99)
    return made


def summary(capsys: Capture, *words: str) -> dict[str, Any]:
    assert main(["report", "--week", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_is_the_sum_of_the_reports(runs: list[Path], capsys: Capture) -> None:
    told = summary(capsys)
    one, two = (report_of(fold_entries(some)) for some in (ENTRIES, ENTRIES[: len(ENTRIES) // 2]))
    assert [run["run_id"] for run in told["runs"]] == ["one", "two"]
    assert told["job_s"] == pytest.approx(one.job_s + two.job_s)
    good_s = sum(report.spent_s[use] for report in (one, two) for use in ("train", "unknown"))
    assert told["ettr"] == pytest.approx(good_s / (one.job_s + two.job_s)) and 0.5 < told["ettr"] < 1
    assert told["incidents"] == len(one.incidents) + len(two.incidents) == 3
    for cause, seconds in told["lost_s"].items():
        assert seconds == pytest.approx(one.lost_s.get(cause, 0.0) + two.lost_s.get(cause, 0.0)), cause
    assert told["rungs"] == {"restart in place": 2, "eviction on proof": 1}
    assert told["evicted"] == {HOSTILE: 1}
    assert len(told["unread"]) == 1 and told["unread"][0].startswith("bad: ")


def test_what_was_before_is_left_out(runs: list[Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    week_s = report_week._WEEK_S
    monkeypatch.setattr(report_week, "_clock", lambda: week_s + END - 600.0)
    told = summary(capsys)
    assert [run["run_id"] for run in told["runs"]] == ["one"] and told["job_s"] == pytest.approx(600.0)
    assert told["incidents"] == 0 and told["evicted"] == {}
    monkeypatch.setattr(report_week, "_clock", lambda: week_s + END + 1.0)
    assert summary(capsys)["runs"] == []
    assert main(["report", "--week"]) == 0
    assert capsys.readouterr().out.startswith("no run in seven days\n")


def test_folders_are_runs_or_hold_them(runs: list[Path], capsys: Capture) -> None:
    assert [run["run_id"] for run in summary(capsys, str(runs[1]))["runs"]] == ["two"]
    assert len(summary(capsys, str(runs[0].parent), str(runs[0]))["runs"]) == 2


def test_the_text_fits_a_terminal_and_obeys_nobody(runs: list[Path], capsys: Capture) -> None:
    assert main(["report", "--week"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ETTR ") and max(map(len, shown.splitlines())) <= 80
    for said in (
        "2 runs, 3 incidents",
        "left out: bad: ",
        "Lost time by cause",
        "eviction on proof",
        "<b>gpu-7",
        "one",
    ):
        assert said in shown, said
    assert "\x1b[31m" not in shown


def test_the_file_runs_no_script_and_fetches_nothing(runs: list[Path], capsys: Capture, tmp_path: Path) -> None:
    assert main(["report", "--week", "--html", str(tmp_path / "week.html")]) == 0
    text = (tmp_path / "week.html").read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'sha256-" in text and "<script" not in text
    assert "&lt;b&gt;gpu-7" in text and "<b>gpu" not in text and "\x1b" not in text
    assert not re.search(r"(src|href)=", text) and "<h1>ETTR " in text


def test_runs_of_a_database(shared_postgres: str, tmp_path: Path, capsys: Capture, runs: list[Path]) -> None:
    from holdfast.journal.journal_key import JournalKey
    from holdfast.journal.postgres_journal import LeaseHolder, PostgresJournal

    name = f"{tmp_path} week"
    lease = LeaseHolder(name="h0 abc", address="h0:29400", lease_s=0.0)
    journal = PostgresJournal(shared_postgres, name, lease, JournalKey(TOKEN, name))
    for entry in ENTRIES[:50]:
        journal.append(entry, durable=False)
    journal.flush()
    journal._link.close()  # as if killed
    bad = PostgresJournal(shared_postgres, f"{name} bad", lease, JournalKey(TOKEN, f"{name} bad"))
    bad.append(ENTRIES[0], durable=True)
    bad._link.execute("update holdfast.entry set at = 7 where run_id = %(run)s", {"run": f"{name} bad"})
    bad._link.close()
    told = summary(capsys, "--journal", shared_postgres)
    found = [run for run in told["runs"] if run["run_id"].startswith(name)]
    assert [(run["run_id"], run["job_s"]) for run in found] == [(name, pytest.approx(fold_entries(ENTRIES[:50]).job_s))]
    assert len([one for one in told["unread"] if one.startswith(f"{name} bad: ")]) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--week", "nowhere"], "nowhere is no run directory"),
        (["--week", "--since", "2h"], "--week sums up several runs"),
        (["--journal", "postgresql://x"], "--week sums up several runs"),
        (["--week", "--journal", "http://x"], "--journal "),
        (["--week", "--json", "--html", "x"], "leave out one"),
        (["--week", "--html", "/nonexistent/x"], "cannot write /nonexistent/x"),
    ],
)
def test_bad_words_are_one_sentence(words: list[str], why: str, runs: list[Path], capsys: Capture) -> None:
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1 and said.startswith("holdfast report: ")
