"""`holdfast report` and `holdfast status`: what they print, from a journal and from a status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from holdfast.cli import main
from holdfast.cli.commands import releases_command, report_command, status_command
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.cli.terminal.quantity_text import clock_text, duration_text
from holdfast.config import Settings
from holdfast.core.decide.decider import Decider
from holdfast.core.record.job_account import Span, TimeUse
from holdfast.core.record.job_report import Report
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.stored_checkpoint_report import StorageReport
from holdfast.wire import controller_request, run_and_node_specs
from holdfast.wire.run_and_node_specs import ControllerAddress, RunSpec
from holdfast.wire.run_and_node_specs import EntryPoint as What
from tests.cli.console_transcript import assert_screens
from tests.cli.driver import ROOT
from tests.core.test_ledger import CHANGE, NEW, Book
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
LOST_STANDBY = (*LINES[:8], "103 alarm silence n2 since 100")
NEW_RELEASE = (
    *(*LINES[:8], "101 order update digest d2 by ann", "102 outcome 3 ok", "103 alarm crash n1 rank 1 code -9"),
    *("104 outcome 4 ok", "106 outcome 5 ok", "110 progress 181 at 109"),
)
FROM_ZERO = (*LINES[:-2], "110 progress 1 at 109", "120 progress 68 at 119 from 1 since 109")
COUNTED = tuple(f"{line} counted" if "progress" in line else line for line in LINES)
NUMBERED = tuple(f"{line} numbered" if "progress" in line else line for line in LINES)
UNKNOWN = (*LINES, "150 successor 2 alone 130", "153 alarm silence n0 since 149")
NO_STEPS = (*LINES[:6], "200 ended n0", "200 ended n1", "201 outcome 3 ok")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    made = run_dir_creation.make_run_dir(None, "r")
    job = Job(run_id="r", min_nodes=2, max_nodes=2, standbys=1)
    run = RunSpec(job=job, entry=What(argv=("x",)), settings=Settings(), fleet="local", nproc=1, log_dir="/l")
    run_dir_creation.publish_run(made, run)
    run_directory.mark_newest(made)
    return made


def write(run_dir: Path, *lines: str) -> None:
    journal, decider = SqliteJournal(run_dir / "journal.db", mark_path=run_dir / "journal.mark"), Decider()
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
    assert capsys.readouterr().out.splitlines()[0].endswith(report_command.load_report(run_dir).ending)


def test_a_lost_standby_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LOST_STANDBY)
    assert main(["report"]) == 0
    [lost] = report_command.load_report(run_dir).lost_standbys
    assert "n2" in lost and lost in capsys.readouterr().out


def test_a_rank_that_is_only_slow_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        run_dir, *LINES[:7], '70 alarm slow n1 rank 1 stance notify said "makes the others wait: for 68 % of the time"'
    )
    assert main(["report"]) == 0
    [slow] = report_command.load_report(run_dir).slow
    assert slow.text.startswith("rank 1 on n1 makes the others wait: for 68 %") and (slow.ranks, slow.at) == (
        (1,),
        70.0,
    )
    assert f": {slow.text}" in capsys.readouterr().out


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


def test_what_is_shown(run_dir: Path) -> None:
    journals = {
        "one incident": (*LINES, *END),
        "a standby is lost": LOST_STANDBY,
        "a release comes in with a restart": NEW_RELEASE,
        "the script starts from zero": FROM_ZERO,
        "steps are counted since the last launch": COUNTED,
        "steps are counted since the start of the run": NUMBERED,
        "a time of which nobody has told": UNKNOWN,
        "nothing yet": (),
        "no step": NO_STEPS,
    }
    screens = {}
    for case, lines in journals.items():
        (run_dir / "journal.db").unlink(missing_ok=True)
        write(run_dir, *lines)
        screens[case] = shown_report(run_dir)
    (run_dir / "journal.db").unlink()
    write_planned(run_dir)
    screens["a planned restart"] = shown_report(run_dir)
    (run_dir / "journal.db").unlink()
    write(run_dir, *LINES[:6])
    young, stored = report_command.load_report(run_dir), StorageReport(step=90, at=110.0)
    for run_s in (1.5, 90.0):  # ranks that have just started are not blamed
        found = msgspec.structs.replace(young, absence="", spent_s=young.spent_s | {"run": run_s})
        screens[f"ranks without a step for {run_s:g} s"] = shown_report(run_dir, found)
    for what, absence in (("while it runs", ""), ("that nobody watches", young.absence)):
        found = msgspec.structs.replace(young, absence=absence, storage=stored)
        screens[f"checkpoints of a job {what}"] = shown_report(run_dir, found)
    (run_dir / "journal.db").unlink()
    write(run_dir, *LINES)
    trains = msgspec.structs.replace(
        report_command.load_report(run_dir), absence="", storage=StorageReport(step=220, at=122.0)
    )
    screens["steps that its journal has not been told yet"] = shown_report(run_dir, trains)
    grown = msgspec.structs.replace(trains.incidents[0], evicted=())
    screens["a node into an empty seat"] = shown_report(run_dir, msgspec.structs.replace(trains, incidents=(grown,)))
    assert_screens("report", screens)


def test_a_job_has_not_ended_while_its_state_goes_to_storage(run_dir: Path) -> None:
    write(run_dir, *LINES, *END[:-1])
    found = report_command.load_report(run_dir)
    assert (found.phase, found.code) == ("ending", 0) and "holdfast run --resume" in found.absence
    live = msgspec.structs.replace(found, absence="")
    shown = printed(report_command.render_report(live), width=600)
    assert f"{live.phase}: {live.ending}" in shown


def shown_report(run_dir: Path, found: Report | None = None) -> str:
    shown = printed(report_command.render_report(found or report_command.load_report(run_dir), letters=True), width=600)
    return shown.replace(str(run_dir), "RUN")


def test_an_incident_costs_what_the_console_said_and_the_redone_steps_besides(run_dir: Path) -> None:
    write(run_dir, *LINES, *END)
    found = report_command.load_report(run_dir)
    [record] = found.incidents
    assert "10 steps" in record.sentence and "10.0 s (" in record.sentence
    assert found.restarts[0].redone == 10
    assert found.lost_s["silence"] == pytest.approx(10.0 + found.spent_s["redo"])


def write_planned(run_dir: Path) -> None:
    book = Book().trains().add(26, Phase.PAUSING).add(27, Phase.HELD).launch(31, 2, NEW).add(33, Phase.STARTING)
    changed = msgspec.structs.replace(CHANGE, grouped_at=33.5, restored_at=34.0, evicted=("n1",), admitted=("n2",))
    book.add(36, Phase.TRAINING, book.step(35, 22, 2, 22, 35.0), changed=changed)
    journal = SqliteJournal(run_dir / "journal.db")
    for entry in book.entries:
        journal.append(entry, durable=True)
    journal.close()


def test_planned_restarts(run_dir: Path) -> None:
    write_planned(run_dir)
    found = report_command.load_report(run_dir)
    assert [restart.incident for restart in found.restarts] == [0]
    assert [(ran.release, ran.steps) for ran in found.releases] == [(1, 21), (2, 1)]
    assert [(change.evicted, change.admitted) for change in found.changes] == [(("n1",), ("n2",))]
    assert (found.incidents, found.spent_s["pause"], found.spent_s["hold"]) == ((), 2.0, 4.0)


def test_a_fresh_start_is_told_with_the_steps_that_ranks_have_made_again(run_dir: Path) -> None:
    write(run_dir, *FROM_ZERO)
    found = report_command.load_report(run_dir)
    assert (found.incidents[0].resumed_from, found.restarts[0].redone) == (0, 68)
    book = releases_command.load_releases(run_dir).releases
    assert [(one.steps, one.redone) for one in book] == [(190, 68)], "the same in every command"


def test_every_use_has_a_colour(run_dir: Path) -> None:
    spans = tuple(Span(use=use, start_at=n, end_at=n + 1) for n, use in enumerate(TimeUse))
    write(run_dir, *LINES)
    spent = {use.value: 1.0 for use in TimeUse}
    found = msgspec.structs.replace(
        report_command.load_report(run_dir), spans=spans, spent_s=spent, wall_s=len(TimeUse), start_at=0.0
    )
    shown = printed(report_command.render_report(found), width=400)
    assert all(f"{use.value} 1.0 s" in shown for use in TimeUse)


def test_without_colours_uses_are_told_apart(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *LINES, *END)
    assert main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    bar = next(line for line in out.splitlines() if line.startswith("..") or "█" in line)
    assert {"█", "r", "."} <= set(bar) <= set(report_command._LETTERS.values()), "a file has no colours"
    assert "r redo " in out and ". wait " in out


def test_lost_time_by_cause_and_the_start(run_dir: Path) -> None:
    write(run_dir, *LINES, *END)
    found = report_command.load_report(run_dir)
    shown = " ".join(printed(report_command.render_report(found)).split())
    lost_s = sum(found.lost_s.values())
    assert f"lost {lost_s:.1f} s: " in shown and all(cause in shown for cause in found.lost_s)
    first_at = next(span.start_at for span in found.spans if span.use is TimeUse.TRAIN)
    since = found.spent_s["train"] / (found.wall_s - (first_at - found.start_at))
    assert f"({100 * since:.1f} % " in shown


def test_steps_of_an_optimizer_that_was_restored_have_its_numbers(run_dir: Path) -> None:
    later = (f"{line} numbered" if "progress" in line else line for line in (*LINES[:6], "6 progress 41 at 5"))
    write(run_dir, *later)
    found = report_command.load_report(run_dir)
    assert (found.step, found.since) == (41, "")


def test_a_job_that_has_not_ended(run_dir: Path) -> None:
    write(run_dir, *LINES)
    found = report_command.load_report(run_dir)
    assert (found.phase, found.code, found.wall_s) == ("training", None, 120)
    shown = " ".join(printed(report_command.render_report(found), width=400).split())
    assert "holdfast run --resume" in found.absence
    assert found.absence in shown, "what status says of it"


def test_a_share_after_the_start_counts_unknown_time_as_the_whole_does(run_dir: Path) -> None:
    write(run_dir, *UNKNOWN)
    found = report_command.load_report(run_dir)
    shown = " ".join(printed(report_command.render_report(found), width=400).split())
    productive_s = found.spent_s["train"] + found.spent_s["unknown"]
    assert found.spent_s["unknown"] == 20.0 and found.ettr == productive_s / 153
    assert found.at_most and f"{found.at_most}{100 * productive_s / 153:.1f} %" in shown
    assert f"({found.at_most}{100 * productive_s / 148:.1f} %" in shown


def test_a_script_without_steps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, *NO_STEPS)
    found = report_command.load_report(run_dir)
    assert (found.spent_s["run"], found.spent_s["start-up"], sum(found.lost_s.values())) == (196.0, 0.0, 5.0)
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ettr"] is None


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
    assert (code, said.count("\n")) == (1, 1) and str(run_dir) in said
    assert "--resume" not in said and "Remote end" not in said, "nobody knows yet that it has died"


def printed(what: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def test_what_status_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    node = {"node": "n0", "role": "active", "ranks": "0-7", "step": 12, "loss": 0.5, "phase": "eval"}
    standby = {"node": "n1", "role": "ready", "ranks": "", "step": -1, "loss": None, "phase": ""}
    trains = {"phase": "training", "generation": 3, "step": 12, "ettr": 0.975, "wall_s": 7384, "incidents": 2}
    trains |= {"run_id": "r", "now": "the ranks run", "nodes": [node, standby], "last_incident": "rank 3 was killed"}
    starts = trains | {"phase": "starting", "step": -1, "ettr": None, "nodes": [], "release": 1, "source": "s"}
    held = trains | {"phase": "held", "nodes": [], "changes": 2, "last_change": "release 2: restarted"}
    asks = held | {"asking": "rank 0 failed; nothing helps", "asks_until": 1090.0, "release": 1, "waiting": 2}
    screens = {
        "nodes and failures": trains | {"failures": 5},
        "the loss of an earlier step": trains | {"nodes": [node | {"loss_step": 11}, node | {"loss_step": 12}]},
        "tensor cores": trains | {"nodes": [node | {"tensor_share": 0.427}, standby]},
        "ranks have run for less than a minute": starts | {"run_s": 40.0},
        "no step": starts | {"run_s": 60.0},
        "nothing was launched yet": starts | {"phase": "waiting", "generation": 0},
        "steps are counted": trains | {"since": "the last launch"},
        "held by a person": held | {"held": "ann (holdfast hold)", "release": 2, "source": "git 1a2b", "waiting": 0},
        "a question, and a release that waits": asks | {"waiting_until": 1060.0},
        "a question amid an incident": asks | {"incident_now": "rank 0 on n1 was killed at step 12"},
        "the same for as long as it takes": asks | {"waiting_until": None, "asks_until": None},
    }
    assert_screens("status", {case: printed(status_command.render_status(one)) for case, one in screens.items()})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (119.94, "119.9 s"), (125, "2 min 05 s"), (3 * 3600 + 61, "3 h 01 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
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
    report_command.load_report(run_dir)
    assert capsys.readouterr().err == ""
    journal(2)
    report_command.load_report(run_dir)
    said = capsys.readouterr().err
    assert said.startswith("holdfast report: ") and "2" in said and "5" in said


def test_a_part_of_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write(run_dir, *LINES, *END)
    assert main(["report", "--since", "90s"]) == 0
    shown = capsys.readouterr().out
    assert f"since {clock_text(111.0)}, {duration_text(90.0)}; " in shown.splitlines()[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["report", "--since", "90s", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["is_part"], told["wall_s"], told["start_at"]) == (True, 90.0, 111.0)
    assert main(["report", "--since", "1d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_part"] is False, "it was not that long"
    for words, why in (
        ("soon", "write a duration"),
        ("1970-01-02", "after the end of the run"),
        ("25:00", "write a dur"),
    ):
        assert main(["report", "--since", words]) == 2
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1
