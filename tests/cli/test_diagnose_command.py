"""`holdfast diagnose`: files, folders, standard input and run directories in; one answer out."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.config import Settings
from holdfast.core.detect.crash import alarm_of
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.logs import catalog_files
from holdfast.model.decider_events import Progress, Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.observation import Exit
from holdfast.wire.run_and_node_specs import EntryPoint as What
from holdfast.wire.run_and_node_specs import RunSpec
from tests.cli.console_transcript import assert_screens

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
BOOM = f"""[rank3]: Traceback (most recent call last):
[rank3]:   File "/workspace/train.py", line 88, in <module>
[rank3]:     loss.backward()
[rank3]: {OOM}
[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24017
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["diagnose", *argv, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["diagnose", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_json_has_what_was_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(BOOM)
    found = told(capsys, str(tmp_path / "job.log"))
    assert {"class", "group", "action", "root_rank", "evidence", "confidence", "explanation"} <= found.keys()
    assert (found["class"], found["group"], found["action"]) == ("gpu_oom", "framework", "fix_config")
    assert (found["root_rank"], found["origin"]) == (3, "train.py:88")
    assert found["evidence"] == [f"[rank3]: {OOM}"]


@pytest.mark.e2e
def test_files_wait_for_no_module_that_only_runs_need(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(BOOM)
    ask = f"from holdfast.cli import main; main(['diagnose', {str(tmp_path / 'job.log')!r}, '--json'])"
    heavy = "{'torch', 'aiohttp', 'asyncio', 'http.client', 'ssl', 'sqlite3', 'rich'}"
    code = f"import sys; {ask}; print(sorted({heavy} & sys.modules.keys()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[0])["class"] == "gpu_oom"
    assert said.splitlines()[1] == "[]"


def test_one_screen_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(BOOM)
    assert main(["diagnose", str(tmp_path / "job.log")]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") < 24
    assert_screens("diagnose", {"the log of a rank that had no memory left": text})


def test_the_log_of_a_survivor_blames_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank1.log").write_text(BOOM.splitlines()[-1])
    assert main(["diagnose", str(tmp_path / "rank1.log")]) == 0
    text = capsys.readouterr().out
    assert "[127.0.0.1]:24017" in text
    assert "infrastructure" not in text
    assert told(capsys, str(tmp_path / "rank1.log"))["fault_known"] is False


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOM.encode())))
    assert told(capsys, "-")["class"] == "gpu_oom"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["diagnose", "-", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["class"] == "unknown_child_failure"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert told(capsys, "-", "--exit-code", "137")["class"] == "host_oom_kill"


def test_pipes_are_read_like_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names in (("pipe",), ("pipe", "other.log")):
        (tmp_path / "other.log").write_text("step 1\n")
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(BOOM,), daemon=True)
        writer.start()
        assert told(capsys, *(str(tmp_path / name) for name in names))["class"] == "gpu_oom"
        writer.join()
        (tmp_path / "pipe").unlink()


def test_sockets_and_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        for name in (str(tmp_path / "door"), "/dev/null"):
            said = refused(capsys, name)
            assert name in said and "socket or a device" in said


def test_folders_and_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.txt").write_text("RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:24017\n")
    (logs / "rank1.txt").write_text("step 1\n")
    (logs / "kernel.txt").write_text("[12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    (logs / "label.toml").write_text("CUDA out of memory")
    for names in ([str(logs)], [str(logs / "rank0.txt"), str(logs / "kernel.txt")]):
        found = told(capsys, *names)
        assert (found["class"], found["action"]) == ("gpu_lost_bus", "evict_and_restart")


def test_input_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.log" in refused(capsys, "nowhere.log")
    (tmp_path / "a.log").write_text("x")
    assert str(tmp_path / "b.log") in refused(capsys, str(tmp_path / "a.log"), str(tmp_path / "b.log"))
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused(capsys, str(tmp_path / "empty"))
    assert run_directory.NO_RUN in refused(capsys)
    assert "/nowhere.toml" in refused(capsys, str(tmp_path / "a.log"), "--config", "/nowhere.toml")
    assert "wrong" in refused(capsys, str(tmp_path / "a.log"), "--set", "wrong.key=1")


def made_run(tmp_path: Path) -> Path:
    run_dir = run_dir_creation.make_run_dir(None, "r")
    job = Job(run_id="r", min_nodes=1, max_nodes=1)
    log_dir = str(tmp_path / "logs")
    run = RunSpec(job=job, entry=What(argv=("x",)), settings=Settings(), fleet="local", nproc=2, log_dir=log_dir)
    run_dir_creation.publish_run(run_dir, run)
    run_directory.mark_newest(run_dir)
    return run_dir


def crash(generation: int, rank: int, code: int, at: float, *words: str) -> Alarm:
    return Alarm(
        kind=Kind.CRASH,
        at=at,
        suspects=("n0",),
        ranks=(rank,),
        code=code,
        generation=generation,
        reason="ended",
        evidence=words,
    )


def write(run_dir: Path, *alarms: Alarm) -> None:
    journal = SqliteJournal(run_dir / "journal.db")
    for seq, alarm in enumerate(alarms, 1):
        journal.append(Entry(seq=seq, at=alarm.at, event=alarm, decision=Decision()), durable=True)
    journal.close()


def judged(generation: int, cause: str, **more: object) -> Record:
    return msgspec.structs.replace(
        Record(
            number=1, generation=generation, cause=cause, kind="crash", klass="", resumed_from=10, resumed_at=9.0,
            verdict=Verdict(remedy=Remedy.RESTART, reason=""), good_step=14, good_at=5.0, alarm_at=5.0, stopped_at=6.0,
            launched_at=7.0,
        ),
        **more,
    )  # fmt: skip


def close_incident(run_dir: Path, seq: int, record: Record) -> None:
    journal = SqliteJournal(run_dir / "journal.db")
    decision = Decision(phase=Phase.TRAINING, closed=record)
    journal.append(Entry(seq=seq, at=record.resumed_at, event=Tick(), decision=decision), durable=True)
    journal.close()


def write_peer_lost(tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "logs" / "gen-1" / f"rank-{rank}"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(BOOM.splitlines()[-1] + "\n")


def test_the_verdict_of_the_run_comes_before_the_words_of_survivors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 calls sys.exit(3), and rank 0 alone says anything: that its peer has gone."""
    run_dir = made_run(tmp_path)
    write(run_dir, msgspec.structs.replace(crash(1, 1, 3, 5.0), group="script"), crash(1, 0, 1, 5.1))
    write_peer_lost(tmp_path, 0)
    cause = "rank 1 on n0 exited with code 3 (SystemExit: 3)"
    close_incident(run_dir, 3, judged(1, cause, ranks=(1,)))
    found = told(capsys)
    assert (found["root_rank"], found["group"], found["action"]) == (1, "script", "rollback_or_fix_code")
    assert cause in str(found["explanation"])
    assert "Connection closed" not in str(found)


def test_a_lost_node_is_not_overruled_by_the_words_of_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = made_run(tmp_path)
    write(run_dir, crash(1, 0, 1, 5.1))
    write_peer_lost(tmp_path, 0)
    cause = "n1 has been silent for 3 s"
    sentence = (
        f"{cause} at step 14; evicted n1, admitted n2 and resumed from step 10, lost 4 steps and 4.0 s (stop 4.0)"
    )
    close_incident(run_dir, 2, judged(1, cause, kind="silence", sentence=sentence))
    found = told(capsys)
    assert (found["class"], found["root_rank"], found["evidence"]) == ("node_failure", None, [f"holdfast: {sentence}"])


@pytest.mark.parametrize(
    ("failures", "causes", "head"),
    [
        (1, (), "n1 has been silent for 3 s  (Node lost: node_failure)"),
        (2, (), "rank 1 on n0 exited with code 9, 2 times without a step in between  (nobody said why)"),
        (2, ("silent", "exited"), "2 failures: silent; then exited  (nobody said why)"),
    ],
)
def test_the_headline_is_what_the_run_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failures: int, causes: tuple[str, ...], head: str
) -> None:
    """Of two failures in a row the newest has its logs read, and the headline names both."""
    run_dir = made_run(tmp_path)
    write(run_dir, *(crash(generation, 1, 9, 4.0 + generation) for generation in range(1, failures + 1)))
    is_silence = "silent" in head
    cause = "n1 has been silent for 3 s" if is_silence else "rank 1 on n0 exited with code 9"
    kind = "silence" if is_silence else "crash"
    sentence = (
        f"{cause} at step 14; evicted n1, admitted n2 and resumed from step 10, lost 4 steps and 4.0 s (stop 4.0)"
    )
    ranks = () if is_silence else (1,)
    record = judged(1, cause, kind=kind, ranks=ranks, failures=failures, causes=causes, sentence=sentence)
    close_incident(run_dir, failures + 1, record)
    assert main(["diagnose"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].strip() == head and "% sure" not in shown and "The run found" not in shown


def test_the_headline_of_a_lost_node_of_which_no_rank_spoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made_run(tmp_path)
    silence = Alarm(kind=Kind.SILENCE, at=5.0, suspects=("n1",), reason="has been silent for 3 s")
    journal = SqliteJournal(run_dir / "journal.db")
    stop = Decision(phase=Phase.STOPPING, reason="incident 1: n1 has been silent for 3 s")
    journal.append(Entry(seq=1, at=5.0, event=silence, decision=stop), durable=True)
    journal.close()
    sentence = "n1 has been silent for 3 s at step 14; evicted n1, admitted n2 and resumed from step 10, lost 4.0 s"
    over = judged(3, "n1 has been silent for 3 s", kind="silence", sentence=sentence)
    close_incident(run_dir, 2, over)
    assert main(["diagnose"]) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    assert headline.startswith(over.cause) and "node_failure" in headline


def test_a_rank_that_left_early_has_no_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made_run(tmp_path)
    write(run_dir, crash(1, 0, 1, 5.1))
    write_peer_lost(tmp_path, 0)
    cause = "rank 1 on n0 left after step 24 while the others went on"
    close_incident(run_dir, 2, judged(1, cause, ranks=(1,), sentence=f"{cause}; restarted in place, lost 4.0 s"))
    main(["diagnose"])
    assert cause in capsys.readouterr().out


def test_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made_run(tmp_path)
    assert str(run_dir) in refused(capsys)
    write(run_dir, crash(1, 0, 1, 5.0), crash(2, 1, 1, 9.0), crash(2, 0, 1, 9.5))
    for rank, text in ((0, "KeyError: 'late'"), (1, "TypeError: early")):
        folder = tmp_path / "logs" / "gen-2" / f"rank-{rank}"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"{text}\n")
    found = told(capsys)
    assert (found["root_rank"], found["evidence"]) == (1, ["TypeError: early", "KeyError: 'late'"])
    assert told(capsys, str(run_dir)) == told(capsys, "r") == found


@pytest.mark.parametrize("starved", [False, True])
def test_a_killed_rank_takes_the_kernels_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], starved: bool
) -> None:
    exit = Exit(node="n0", generation=1, rank=1, code=-9, at=2.0, starved=starved)
    write(made_run(tmp_path), alarm_of(exit, catalog_files.load_failures()))
    found = told(capsys)
    assert (found["class"], found["root_rank"]) == ("host_oom_kill" if starved else "unknown_child_failure", 1)
    assert (found["confidence"] == 0.8) is starved


def test_a_killed_rank_where_memory_was_scarce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit = Exit(node="n0", generation=1, rank=1, code=-9, at=2.0, pressed="memory pressure was 43 %")
    write(made_run(tmp_path), alarm_of(exit, catalog_files.load_failures()))
    found = told(capsys)
    assert found["class"] == "host_oom_kill" and float(str(found["confidence"])) == 0.6
    explained = "killed by SIGKILL, probably by the OOM killer: memory pressure was 43 %, and the kernel tells nobody"
    assert explained in str(found["explanation"])


def test_words_in_which_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "hello.txt"
    log.write_text("hello\n")
    assert main(["diagnose", str(log)]) == 1
    said = capsys.readouterr().out
    assert "sure" not in said and "child" not in said
    assert main(["diagnose", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["confidence"] == 0
    assert main(["diagnose", str(log), "--exit-code", "1"]) == 0, "something has failed, and nothing shows why"


def test_a_run_whose_logs_lie_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made_run(tmp_path)
    write(run_dir, crash(1, 1, 1, 5.0, OOM), crash(1, 0, -15, 6.0))
    assert told(capsys)["class"] == "gpu_oom"


def test_a_run_that_went_on_after_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = made_run(tmp_path)
    write(run_dir, crash(1, 0, 1, 5.0, "ValueError: bad batch"))
    assert main(["diagnose"]) == 0
    screens = {"it stands still": capsys.readouterr().out}
    assert told(capsys)["went_on"] is False
    journal = SqliteJournal(run_dir / "journal.db")
    step = Progress(generation=2, step=3, at=9.0, first_step=1, first_at=8.0, counted=False)
    journal.append(Entry(seq=2, at=9.0, event=step, decision=Decision(phase=Phase.TRAINING)), durable=True)
    journal.close()
    assert told(capsys)["went_on"] is True
    assert main(["diagnose"]) == 0
    assert_screens("diagnose_run", screens | {"it has gone on": capsys.readouterr().out})


def test_a_run_in_which_a_rank_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cause = "rank 1 on n1 has stood at step 12 for 4 s: rank 1 is stopped"
    hang = Alarm(kind=Kind.HANG, at=9.0, suspects=("n1",), ranks=(1,), generation=2, reason="has stood")
    stop = Decision(phase=Phase.STOPPING, reason=f"incident 2: {cause}")
    over = judged(2, cause, kind="hang", ranks=(1,), sentence=f"{cause}; restarted in place, lost 4.0 s (stop 4.0)")
    closed = Decision(phase=Phase.TRAINING, closed=over)
    journal = SqliteJournal(made_run(tmp_path) / "journal.db")
    journal.append(Entry(seq=1, at=5.0, event=crash(1, 0, 1, 5.0, OOM), decision=Decision()), durable=True)
    journal.append(Entry(seq=2, at=9.0, event=hang, decision=stop), durable=True)
    journal.append(Entry(seq=3, at=13.0, event=Tick(), decision=closed), durable=True)
    journal.close()
    found = told(capsys)
    assert (found["class"], found["root_rank"], found["node"], found["went_on"]) == ("process_hang", 1, "n1", True)
    assert found["group"] == "unknown"
    assert main(["diagnose"]) == 0
    said = capsys.readouterr().out
    assert "rank 1 on n1" in said and "probe" not in said and "unknown" not in said


def test_a_run_in_which_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(made_run(tmp_path))
    assert "holdfast report" in refused(capsys)
