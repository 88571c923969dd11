"""`holdfast report` and `holdfast status`: what they print, from a journal and from a status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from holdfast.cli import main
from holdfast.cli.commands import releases, report, status
from holdfast.cli.launch import controller_main
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.terminal.quantity_text import NO_STEP, duration_text
from holdfast.config import Settings
from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_account import Span, TimeUse
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.event import Entry, Phase
from holdfast.model.job_and_seats import Job
from holdfast.wire import controller_request, run_and_node_specs
from holdfast.wire.run_and_node_specs import ControllerAddress, RunSpec
from holdfast.wire.run_and_node_specs import EntryPoint as What
from tests.cli.driver import ROOT
from tests.core.test_ledger import CHANGE, NEW, START, Book, account
from tests.core.transcript import parse

LINES = (
    "0 begin nnodes 2 standbys 1",
    "1 outcome 1 ok nodes n0 n1 n2",
    "2 ready n0 nproc 1",
    "2 ready n1 nproc 1 order 1",
    "2 ready n2 nproc 1 order 2",
    "4 outcome 2 ok",
    "6 progress 1 at 5",
    "100 progress 190 at 99 from 1 since 5",
    "103 alarm silence n1 since 100",
    "104 outcome 3 ok",
    "105 outcome 5 ok nodes n3",
    "106 outcome 6 ok",
    "110 progress 181 at 109",
    "120 progress 200 at 119 from 181 since 109",
)
END = ("200 ended n0", "200 ended n2", "201 outcome 7 ok")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    made = run_directory.make_run_dir(None, "r")
    job = Job(run_id="r", min_nodes=2, max_nodes=2, standbys=1)
    run = RunSpec(job=job, entry=What(argv=("x",)), settings=Settings(), fleet="local", nproc=1, log_dir="/l")
    run_directory.publish_run(made, run)
    run_directory.mark_newest(made)
    return made


def write(run_dir: Path, *lines: str) -> None:
    journal, decider = SqliteJournal(run_dir / "journal.db"), Decider()
    for seq, line in enumerate(lines, 1):
        at, text = line.split(" ", 1)
        event = parse(text, float(at), decider.view.generation)
        decision = decider.step(float(at), event)
        journal.append(Entry(seq=seq, at=float(at), event=event, decision=decision), durable=True)
    journal.close()


def test_a_sentence_in_a_pipe_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_dir, *LINES, *END)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["report"]) == 0
    assert "generation 2; ended with code 0: all ranks ended well" in capsys.readouterr().out.splitlines()[0]


def test_a_lost_standby_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES[:8], "103 alarm silence n2 since 100")
    assert main(["report"]) == 0
    assert "nodes: standby n2 lost: has been silent for 3 s" in capsys.readouterr().out


def test_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES, *END)
    assert main(["report", "--json"]) == 0  # the newest run
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["code"], found["ending"]) == ("done", 0, "all ranks ended well")
    assert (found["generation"], found["step"], found["wall_s"]) == (2, 200, 201)
    [record] = found["incidents"]
    assert (record["kind"], record["evicted"], record["admitted"]) == ("silence", ["n1"], ["n2"])
    assert (record["good_step"], record["resumed_from"]) == (190, 180)
    assert found["spent_s"]["train"] + sum(found["lost_s"].values()) == pytest.approx(201)
    assert found["spans"][0]["use"] == "wait"


def test_text(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    write(run_dir, *LINES, *END)
    assert main(["report", str(run_dir)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 incident, mean time to recover 10.0 s" in text
    assert "code 0: all ranks ended well" in text
    assert "ETTR " in text and "train " in text and "redo " in text
    assert "n2 took its place" in text
    assert "10 steps redone" in text


def test_an_incident_costs_what_the_console_said_and_the_redone_steps_besides(run_dir: Path) -> None:
    write(run_dir, *LINES, *END)
    found = report.load_report(run_dir)
    [record] = found.incidents
    assert "lost 10 steps and 10.0 s (" in record.sentence
    shown = printed(report.render_report(found))
    redo_s = found.spent_s["redo"]
    assert f"10.0 s (detect 4.0, stop 1.0, launch 1.0, start-up 4.0), 10 steps redone in {redo_s:.1f} s" in " ".join(
        shown.split()
    )
    assert found.lost_s["silence"] == pytest.approx(10.0 + redo_s)


def test_a_release_that_came_in_with_a_restart(run_dir: Path) -> None:
    order = ("101 order update digest d2 by ann", "102 outcome 3 ok")
    after = ("103 alarm crash n1 rank 1 code -9", "104 outcome 4 ok", "106 outcome 5 ok", "110 progress 181 at 109")
    write(run_dir, *LINES[:8], *order, *after)
    shown = printed(report.render_report(report.load_report(run_dir)), width=300)
    assert "; release 2 came in with this restart " in shown


def test_planned_restarts(run_dir: Path) -> None:
    book = Book().trains().add(26, Phase.PAUSING).add(27, Phase.HELD).launch(31, 2, NEW).add(33, Phase.STARTING)
    changed = msgspec.structs.replace(CHANGE, grouped_at=33.5, restored_at=34.0, evicted=("n1",), admitted=("n2",))
    book.add(36, Phase.TRAINING, book.step(35, 22, 2, 22, 35.0), changed=changed)
    journal = SqliteJournal(run_dir / "journal.db")
    for entry in book.entries:
        journal.append(entry, durable=True)
    journal.close()
    found = report.load_report(run_dir)
    assert [restart.incident for restart in found.restarts] == [0]
    assert [(ran.release, ran.steps) for ran in found.releases] == [(1, 21), (2, 1)]
    shown = " ".join(printed(report.render_report(found)).split())
    assert "0 incidents, 1 planned restart; step 22, generation 2" in shown
    assert "pause 2.0 s" in shown and "hold 4.0 s" in shown
    assert "nodes: 1 evicted, 1 admitted, 0.0 s waited for nodes" in shown
    assert "releases: 1 21 new steps, 2 (git 1a2b3c4) 1 new step" in shown
    assert "release 2; n1 left; n2 came" in shown
    parts = "imports and groups 0.5 + restore 0.5 + first step 1.0"
    assert f"10.0 s (pause 2.0, hold 4.0, launch 2.0, start-up 2.0 = {parts})" in shown


def test_a_fresh_start_is_told_with_the_steps_that_ranks_have_made_again(run_dir: Path) -> None:
    fresh = ("110 progress 1 at 109", "120 progress 68 at 119 from 1 since 109")
    write(run_dir, *LINES[:-2], *fresh)
    shown = printed(report.render_report(report.load_report(run_dir)), width=400)
    assert "; the script started from step 0 " in shown
    assert ", 68 of 190 steps redone" in shown
    book = releases.load_releases(run_dir).releases
    assert [(one.steps, one.redone) for one in book] == [(190, 68)], "the same in every command"


def test_every_use_has_a_colour(run_dir: Path) -> None:
    spans = tuple(Span(use=use, start_at=n, end_at=n + 1) for n, use in enumerate(TimeUse))
    write(run_dir, *LINES)
    spent = {use.value: 1.0 for use in TimeUse}
    found = msgspec.structs.replace(
        report.load_report(run_dir), spans=spans, spent_s=spent, wall_s=len(TimeUse), start_at=0.0
    )
    shown = printed(report.render_report(found), width=400)
    assert all(f"{use.value} 1.0 s" in shown for use in TimeUse)


def test_without_colours_uses_are_told_apart(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES, *END)
    assert main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    bar = next(line for line in out.splitlines() if line.startswith("..") or "█" in line)
    assert {"█", "r", "."} <= set(bar) <= set(report._LETTERS.values()), "a file has no colours"
    assert "r redo " in out and ". wait " in out


def test_lost_time_by_cause_and_the_start(run_dir: Path) -> None:
    write(run_dir, *LINES, *END)
    found = report.load_report(run_dir)
    shown = " ".join(printed(report.render_report(found)).split())
    lost_s = sum(found.lost_s.values())
    assert f"lost {lost_s:.1f} s: " in shown and all(cause in shown for cause in found.lost_s)
    first_at = next(span.start_at for span in found.spans if span.use is TimeUse.TRAIN)
    since = found.spent_s["train"] / (found.wall_s - (first_at - found.start_at))
    assert f"({100 * since:.1f} % after a start of " in shown


def test_steps_that_were_only_counted_are_not_numbered(run_dir: Path) -> None:
    counted = (f"{line} counted" if "progress" in line else line for line in LINES)
    write(run_dir, *counted)
    shown = " ".join(printed(report.render_report(report.load_report(run_dir))).split())
    assert "n1 has been silent for 3 s 190 steps after its launch" in shown
    assert "at step 190" not in shown
    assert "; 200 steps since the last launch, generation 2" in shown


def test_steps_that_the_script_does_not_tell_are_those_of_this_run(run_dir: Path) -> None:
    """It may go on from an earlier run, of which only an optimizer that counts its steps would tell."""
    numbered = tuple(f"{line} numbered" if "progress" in line else line for line in LINES)
    write(run_dir, *numbered)
    shown = " ".join(printed(report.render_report(report.load_report(run_dir))).split())
    assert "; step 200, counted from the start of this run, generation 2" in shown


def test_steps_of_an_optimizer_that_was_restored_have_its_numbers(run_dir: Path) -> None:
    later = (f"{line} numbered" if "progress" in line else line for line in (*LINES[:6], "6 progress 41 at 5"))
    write(run_dir, *later)
    assert "; step 41, generation 1" in " ".join(printed(report.render_report(report.load_report(run_dir))).split())


def test_a_job_that_has_not_ended(run_dir: Path) -> None:
    write(run_dir, *LINES)
    found = report.load_report(run_dir)
    assert (found.phase, found.code, found.wall_s) == ("training", None, 120)
    shown = " ".join(printed(report.render_report(found), width=400).split())
    assert "training at " in shown and "its front, holdfast run, is gone; holdfast run --resume" in shown
    assert found.absence in shown, "what status says of it"


def test_a_share_after_the_start_counts_unknown_time_as_the_whole_does(run_dir: Path) -> None:
    alone = ("150 successor 2 alone 130", "153 alarm silence n0 since 149")
    write(run_dir, *LINES, *alone)
    found = report.load_report(run_dir)
    shown = " ".join(printed(report.render_report(found), width=400).split())
    productive_s = found.spent_s["train"] + found.spent_s["unknown"]
    assert found.spent_s["unknown"] == 20.0 and found.ettr == productive_s / 153
    assert f"ETTR at most {100 * productive_s / 153:.1f} % of" in shown
    assert f"(at most {100 * productive_s / 148:.1f} % after a start of 5.0 s)" in shown


def test_a_journal_with_nothing_in_it(run_dir: Path) -> None:
    write(run_dir)
    shown = printed(report.render_report(report.load_report(run_dir)))
    assert "ETTR not known in 0.0 s" in shown and "0 incidents" in shown


def test_a_script_without_steps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES[:6], "200 ended n0", "200 ended n1", "201 outcome 3 ok")
    found = report.load_report(run_dir)
    shown = printed(report.render_report(found))
    assert "ETTR not known in 3 min 21 s: 0 incidents; no step seen, generation 1" in shown
    assert NO_STEP in shown
    assert "run 3 min 16 s" in shown and "start-up" not in shown and "lost 5.0 s: start and end 5.0 s" in shown
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ettr"] is None


def test_status_of_a_script_without_steps() -> None:
    bare = {"phase": "starting", "generation": 1, "step": -1, "ettr": None, "wall_s": 40, "incidents": 0, "run_id": "r"}
    shown = printed(status.render_status(bare | {"now": "the ranks run", "nodes": [], "last_incident": ""}))
    assert "generation 1, no step seen, ETTR not known in 40.0 s, 0 incidents" in shown
    assert NO_STEP in shown


def test_status_says_what_steps_are_counted_from() -> None:
    bare = {"phase": "training", "generation": 2, "step": 7, "ettr": 0.5, "wall_s": 40, "incidents": 1, "run_id": "r"}
    counted = bare | {"since": "the last launch", "now": "training", "nodes": [], "last_incident": ""}
    assert "7 steps since the last launch" in printed(status.render_status(counted))


def test_an_end_without_steps(tmp_path: Path) -> None:
    told = account(*START[:4], "30 ended n0", "31 outcome 3 ok")
    console = controller_main.SaidLog(tmp_path)
    controller_main.ConsoleTeller(tmp_path, console).tell_end(told, 0)
    console._file.close()
    [said] = (tmp_path / "said.log").read_text().splitlines()
    assert "done: 0 incidents, ETTR not known" in said and NO_STEP in said and f"holdfast report {tmp_path}" in said


HANGS_UP = """
import socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[3])
door.listen()
print("here", flush=True)
link, _ = door.accept()
link.recv(1 << 16)
link.close()
sys.stdin.read()
"""


@pytest.mark.e2e
def test_status_of_a_run_that_is_just_ending(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        sys.executable,
        "-c",
        HANGS_UP,
        run_directory.CONTROLLER,
        str(run_dir),
        str(run_dir / controller_request.NAME),
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ending:
        assert ending.stdout and ending.stdout.readline() == b"here\n"
        address = ControllerAddress(url="", pid=ending.pid, started_at=0.0)
        run_and_node_specs.write_json(run_dir / "controller.json", address)
        code = main(["status"])
    said = capsys.readouterr().err
    assert code == 1 and "is just ending, or its controller has just died" in said and "Remote end" not in said


def printed(what: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_status_fits_one_screen() -> None:
    node = {"node": "n0", "role": "active", "ranks": "0-7", "step": 12, "loss": 0.5, "phase": "eval"}
    standby = {"node": "n1", "role": "ready", "ranks": "", "step": -1, "loss": None, "phase": ""}
    shown = printed(
        status.render_status(
            {
                "phase": "training",
                "generation": 3,
                "step": 12,
                "ettr": 0.975,
                "wall_s": 7384,
                "incidents": 2,
                "failures": 5,
                "run_id": "r",
                "now": "training; every rank has made step 12",
                "nodes": [node, standby],
                "last_incident": "rank 3 on n0 was killed",
            }
        )
    )
    assert "2 incidents (5 failures)" in shown
    for words in ("training", "ETTR 97.5 %", "2 h 03 min", "0-7", "0.5000", "eval", "ready", "was killed"):
        assert words in shown, words


def test_status_names_whom_the_job_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    bare = {"phase": "held", "generation": 3, "step": 12, "ettr": 0.9, "wall_s": 10, "incidents": 0, "run_id": "r"}
    bare |= {"now": "held", "nodes": [], "last_incident": "", "changes": 2, "last_change": "release 2: restarted"}
    held = printed(
        status.render_status(bare | {"held": "ann (holdfast hold)", "release": 2, "source": "git 1a2b", "waiting": 0})
    )
    assert "0 incidents, 2 planned restarts" in held
    assert "held by ann (holdfast hold): holdfast resume" in held
    assert "release 2 (git 1a2b) runs" in held and "waits" not in held
    assert "last planned restart: release 2: restarted" in held
    question = {"asking": "rank 0 failed; nothing helps", "asks_until": 1090.0, "release": 1, "waiting": 2}
    asked = printed(status.render_status(bare | question | {"waiting_until": 1060.0}))
    assert re.search(r"90\.0 s.*holdfast approve.*: rank 0 failed; nothing helps", asked)
    assert re.search(r"release 1 runs; release 2 .*60\.0 s", asked)
    unbounded = printed(status.render_status(bare | question | {"waiting_until": None, "asks_until": None}))
    assert "holdfast approve" in unbounded and "waits for a restart\n" in unbounded


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (119.94, "119.9 s"), (125, "2 min 05 s"), (3 * 3600 + 61, "3 h 01 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_reads_on_no_more_sees_no_traceback(run_dir: Path, unbuffered: str) -> None:
    """As in `holdfast report | head`: nobody is at the other end of the pipe."""
    write(run_dir, *LINES, *END)
    log = run_dir / "logs" / "gen-1" / "rank-0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n" * 20_000)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    commands = ("ls", "logs -n 0", "report", "report --json", "diagnose --json", "status", "--help", "logs --help")
    reader, writer = os.pipe()
    os.close(reader)
    running = {
        words: subprocess.Popen(
            [sys.executable, "-m", "holdfast", *words.split()],
            env=env,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in commands
    }
    os.close(writer)
    for words, process in running.items():
        _, err = process.communicate(timeout=120)
        assert process.returncode == {"status": 1, "logs -n 0": 2}.get(words, 0), (words, err)
        assert err.count("\n") <= 1 and "BrokenPipe" not in err, (words, err)


def test_a_journal_that_lost_its_end_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def journal(count: int) -> None:
        (run_dir / "journal.db").unlink(missing_ok=True)
        written = SqliteJournal(run_dir / "journal.db", mark_path=run_dir / "journal.mark" if count == 5 else None)
        for entry in Book().trains().entries[:count]:
            written.append(entry, durable=True)
        written.close()

    journal(5)
    report.load_report(run_dir)
    assert capsys.readouterr().err == ""
    journal(2)
    report.load_report(run_dir)
    said = capsys.readouterr().err
    assert said.startswith("holdfast report: ") and "2" in said and "5" in said
