"""Several runs of one user: which one a command means, and how they are listed, read and come back to."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.commands import logs_command
from holdfast.cli.commands.ls_elsewhere import RunRow
from holdfast.cli.commands.report_command import load_report
from holdfast.cli.run_dirs import run_dir_creation, run_directory, run_liveness, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job as JobSpec
from holdfast.wire import program_fork_server, run_and_node_specs
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.run_and_node_specs import ControllerAddress, EntryPoint, RunEnd, RunSpec
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_screens
from tests.cli.driver import gone, until
from tests.cli.terminal import Terminal
from tests.conftest import job_environment, kill_marked


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def published(wanted: str | None, name: str) -> Path:
    run_dir = run_dir_creation.make_run_dir(wanted, name)
    entry = EntryPoint(argv=("train.py", "--lr", "1"))
    job = JobSpec(run_id=name, min_nodes=1, max_nodes=1)
    log_dir = str(run_dir / "logs")
    run_dir_creation.publish_run(
        run_dir, RunSpec(job=job, entry=entry, settings=Settings(), fleet="local", nproc=1, log_dir=log_dir)
    )
    run_selection.remember_run(run_dir)
    return run_dir


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (EntryPoint(argv=("train.py", "--lr", "1"), cwd="/a/b"), "train.py --lr 1"),
        (EntryPoint(argv=("../typo/typo.py", "../x"), cwd="/a/b"), "/a/typo/typo.py ../x"),
        (EntryPoint(argv=("sub/../../c.py",), cwd="/a/b"), "/a/c.py"),
        (EntryPoint(argv=("pkg.train", "1"), cwd="/a/b", module=True), "-m pkg.train 1"),
        (EntryPoint(argv=("/a/b/../c.py",), cwd="/a/b"), "/a/b/../c.py"),
    ],
)
def test_a_script_is_shown_so_that_it_can_be_found(
    entry: EntryPoint, shown: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = published(None, "r")
    run_dir_creation.publish_run(run_dir, msgspec.structs.replace(run_directory.read_spec(run_dir), entry=entry))
    assert main(["ls"]) == 0
    assert f"  {shown}  started " in capfd.readouterr().out


@pytest.fixture
def two(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Both alive, one in a place of its own."""
    found = published(None, "first"), published(str(tmp_path / "own"), "second")
    listening = ControllerAddress(url="http://127.0.0.1:1", pid=1, started_at=0.0)
    alive = set(found)
    monkeypatch.setattr(run_directory, "find_controller", lambda run_dir: listening if run_dir in alive else None)
    return found


def asked(**given: str | None) -> argparse.Namespace:
    return argparse.Namespace(**{"run": None, "named": None, **given})


def test_an_order_is_never_a_guess(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--run: .*first, .*own"):
        run_selection.run_to_change(asked())
    assert run_selection.run_to_change(asked(named="first")) == two[0]
    assert run_selection.run_to_read(asked()) == two[1], "who only looks is shown the newest"
    for words in (["stop"], ["hold"], ["evict", "node0"], ["update"], ["rollback"]):
        assert main(words) == 2
        assert "--run: " in capsys.readouterr().err, words


def test_the_only_one_alive_is_meant(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, newest = published(None, "first"), published(None, "second")
    assert run_selection.run_to_read(asked()) == newest
    run_and_node_specs.write_json(newest / "exit.json", RunEnd(code=0, reason="done"))
    listening = ControllerAddress(url="http://127.0.0.1:1", pid=1, started_at=0.0)
    monkeypatch.setattr(run_directory, "find_controller", lambda run_dir: listening if run_dir == first else None)
    assert run_selection.run_to_change(asked()) == first
    assert run_selection.run_to_read(asked()) == first
    monkeypatch.setattr(run_directory, "find_controller", lambda run_dir: None)
    (newest / "exit.json").unlink()
    assert run_selection.run_to_change(asked()) == newest, "its controller may be back presently"


def test_an_order_to_nobody_says_since_when(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = published(None, "second")
    run_and_node_specs.write_json(newest / "exit.json", RunEnd(code=93, reason="rank 3 failed, and a long story"))
    os.utime(newest / "exit.json", (time.time() - 300.5,) * 2)
    later = published(None, "third")  # it began later, and ended before that
    run_and_node_specs.write_json(later / "exit.json", RunEnd(code=0, reason="done"))
    os.utime(later / "exit.json", (time.time() - 900.5,) * 2)
    screens = {}
    for words in ("stop", "hold", "resume", "approve", "evict n1", "drain n1", "update", "rollback", "stop second"):
        assert main(words.split()) == 2
        screens[words] = capsys.readouterr().err.replace(str(newest), "RUN")
    assert_screens("orders_to_nobody", screens)


def test_every_order_takes_the_run_as_a_plain_word(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over, there = published(None, "first"), published(str(tmp_path / "own"), "second")
    for run_dir in (over, there):
        run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=0, reason="done"))
    bare = [["hold"], ["resume"], ["approve"], ["stop"], ["rollback"]]
    others = [["evict", "n0"], ["drain", "n0"], ["rollback", "3"], ["update", "."], ["token", "node", "n7"]]
    for words in (*bare, *others):
        assert main([*words, "first"]) == 2
        assert f" {over} " in (said := capsys.readouterr().err) and " code 0, " in said, words
    assert main(["update", str(over)]) == 2
    assert f" {over} " in (said := capsys.readouterr().err) and " code 0, " in said


def test_a_part_of_an_id_will_do(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As long as it names one run; an id as a whole comes first, and a run may lie anywhere."""
    first, second = published(None, "20261117-101112-a1b2"), published(None, "20261117-131415-c3d4")
    own, short = published(str(tmp_path / "own"), "nightly-7"), published(None, "night")
    for name, meant in (("a1b2", first), ("20261117-13", second), ("nightly", own), ("-7", own), ("night", short)):
        assert run_selection.find(name) == meant, name
    listed = ": 20261117-101112-a1b2, 20261117-131415-c3d4; "
    for words in (["logs"], ["report"], ["status"], ["trace"], ["releases"], ["stop"], ["clean"], ["diagnose"]):
        assert main([*words, "2026"]) == 2
        assert listed in capsys.readouterr().err, words
    for words in (["hold"], ["evict", "n1"], ["update"], ["rollback"], ["diagnose"], ["run", "--resume"]):
        assert main([*words, *(["--run"] if words[-1] != "--resume" else []), "2026"]) == 2
        assert listed in capsys.readouterr().err, words
    with pytest.raises(UsageError, match=r"^101112 .*holdfast ls"):
        run_selection.find("101112")
    twin = published(str(tmp_path / "twin"), "nightly-7")
    with pytest.raises(UsageError, match=f"^nightly-7 .*: {own}, {twin};"):
        run_selection.find("nightly-7")


def test_one_way_to_name_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that is about a run takes --run."""
    others = {"run", "ls", "sbatch", "blocked", "journal", "catalog", "ckpt", "token", "probe", "plan", "sim", "chaos"}
    for name in set(COMMANDS) - others - {"completion"}:
        assert main([name, "--help"]) == 0
        assert "--run RUN" in capsys.readouterr().out, name
    with pytest.raises(UsageError, match=r"\ba\b.*\bb\b"):
        run_selection.named_run(asked(run="a", named="b"))


def shown_runs(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    return capsys.readouterr().out.replace(str(folder / "home"), "HOME").replace(str(folder), "FOLDER")


def test_runs_are_listed(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.startswith(run_directory.NO_RUN)
    first, own = published(None, "first"), published(str(tmp_path / "own"), "second")
    run, now = run_directory.read_spec(first), time.time()
    assert now - 60 < run.started_at <= now
    resumed = msgspec.structs.replace(run, started_at=now - 600.5, resumed_at=now - 300.5)
    run_and_node_specs.write_json(first / "run.json", resumed)
    os.utime(first / "run.json", (1.0, 1.0))
    run_and_node_specs.write_json(first / "exit.json", RunEnd(code=3, reason="because"))
    (own / "run.json").write_text("{")
    os.utime(own / "run.json", (now - 600.5,) * 2)
    assert main(["ls"]) == 0
    assert_screens("ls", {"ended after it was resumed, unreadable": shown_runs(capsys, tmp_path)})
    assert main(["ls", "--json"]) == 0
    rows = msgspec.json.decode(capsys.readouterr().out, type=list[RunRow])
    assert [row.run_dir for row in rows] == [str(first), str(own)]
    for number in range(12):
        published(None, f"more{number}")
    main(["ls"])
    assert capsys.readouterr().out.splitlines()[-1] == "and 4 older: holdfast ls --all"


def test_a_run_that_was_removed_is_forgotten(home: Path, tmp_path: Path) -> None:
    own = published(str(tmp_path / "own"), "r")
    assert run_selection.known_runs() == [own]
    (own / "run.json").unlink()
    assert run_selection.known_runs() == []
    assert not list((home / "elsewhere").iterdir())


def _printed(run_dir: Path, text: bytes, rank: int = 0, generation: int = 1, stream: str = "stdout") -> None:
    path = run_dir / "logs" / f"gen-{generation}" / f"rank-{rank}" / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def test_logs(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = published(None, "r")
    assert main(["logs"]) == 2
    assert str(run_dir) in capfd.readouterr().err
    _printed(run_dir, b"old\n")
    _printed(run_dir, b"".join(b"line %d\n" % n for n in range(200)), generation=2)
    _printed(run_dir, b"\x1b]0;title\x07oops\n", rank=1, generation=2, stream="stderr")
    assert main(["logs"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == "[rank 0] line 100" and len(out.splitlines()) == 100
    assert err == "[rank 1] oops\n"
    assert main(["logs", "r", "--rank", "0", "-n", "0", "--stream", "stdout"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 200
    assert main(["logs", "--generation", "1"]) == 0
    assert capfd.readouterr().out == "[rank 0] old\n"
    none, folder = "holdfast logs: there is no", run_dir / "logs"
    for words, why in (
        (["--rank", "7"], f"{none} rank 7 in {folder}/gen-2; it has ranks 0-1\n"),
        (["--rank", "7", "--generation", "1"], f"{none} rank 7 in {folder}/gen-1; it has rank 0\n"),
        (["--generation", "9"], f"{none} generation 9 in {folder}; it has generations 1, 2\n"),
    ):
        assert main(["logs", *words]) == 2
        assert capfd.readouterr().err == why


def test_generations_that_are_not_there(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = published(None, "r")
    assert main(["logs", "-f", "--generation", "9"]) == 2
    assert capfd.readouterr().err == f"holdfast logs: no rank has printed anything yet in {run_dir}/logs\n"
    _printed(run_dir, b"old\n")
    assert main(["logs", "--generation", "9"]) == 2
    assert capfd.readouterr().err.endswith("; it has generation 1\n")


def test_what_was_rotated_away_is_shown(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = published(None, "r")
    _printed(run_dir, b"two\n")
    (run_dir / "logs" / "gen-1" / "rank-0" / "stdout.log.1").write_bytes(b"one\n")
    logs_command.main(["logs"])
    assert capfd.readouterr().out == "[rank 0] one\n[rank 0] two\n"


def test_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reprot"]) == 2
    assert capsys.readouterr().err == "holdfast: there is no command 'reprot'; did you mean report?\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["logs", "--ranks", "1"], "holdfast logs: there is no flag --ranks; did you mean --rank?"),
        (["report", "--rnu", "r"], "holdfast report: there is no flag --rnu; did you mean --run?"),
        (["status", "--wach"], "holdfast status: there is no flag --wach; did you mean --watch?"),
        (["diagnose", "--exit_cod=1"], "holdfast diagnose: there is no flag --exit_cod; did you mean --exit-code?"),
        (["ckpt", "ls", "here", "--jsn"], "holdfast ckpt ls: there is no flag --jsn; did you mean --json?"),
        (["ckpt", "ls", "here", "--stp"], "holdfast ckpt ls: there is no flag --stp; see holdfast ckpt ls --help"),
        (["update", "--nwo"], "holdfast update: there is no flag --nwo; did you mean --now?"),
        (["ls", "--zzz"], "holdfast ls: there is no flag --zzz; see holdfast ls --help"),
        (["ls", "what"], "holdfast ls: unexpected argument what; see holdfast ls --help"),
        (["run", "--standbis", "1"], "holdfast run: there is no flag --standbis; did you mean --standbys?"),
    ],
)
def test_misspelt_flags(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(words)
    except SystemExit as e:
        code = e.code
    assert (code, capsys.readouterr().err) == (2, f"{told}\n")


def test_every_command_suggests_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS.keys() - {"run", "sbatch"}:
        with pytest.raises(SystemExit) as caught:
            main([name, "--hepl"])
        assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1, name


def test_attach_to_what_has_ended(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = published(None, "r")
    assert main(["attach"]) == 2, "it has not begun, so there is no end to tell"
    said = [f"holdfast: sentence {number}" for number in range(9)]
    (run_dir / "said.log").write_text("\n".join(said) + "\n")
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=3, reason="because"))
    capfd.readouterr()
    assert main(["attach"]) == 3
    first, *shown, more = capfd.readouterr().err.splitlines()
    assert first == f"holdfast attach: the run in {run_dir} {run_liveness.ending_text(run_dir)}"
    assert shown == said[-5:] and ": holdfast logs r; " in more and more.endswith(f"holdfast report {run_dir}")


@pytest.mark.e2e
def test_a_job_outlives_its_terminal(start: Start, tmp_path: Path) -> None:
    """SIGHUP ends nothing; who attaches sees what ranks print, may leave, and comes back for the end."""
    job = start("--nproc-per-node", "1", script=_PRINTS)
    job.trains()
    job.process.send_signal(signal.SIGHUP)
    output = tmp_path / "attached.out"
    attached = _attach(tmp_path, output)
    until(lambda: b"[rank 0] step" in output.read_bytes(), "output of a rank")
    attached.send_signal(signal.SIGINT)
    assert attached.wait(60) == 0
    assert b"holdfast stop" in output.read_bytes()
    again = _attach(tmp_path, output)
    until(lambda: output.read_bytes().count(b"following") == 2, "a second look")
    job.process.send_signal(signal.SIGTERM)
    job.ends(143)
    assert again.wait(60) == 143
    assert not job.report().incidents


@pytest.mark.e2e
def test_a_job_outlives_a_terminal_that_is_closed(tmp_path: Path, warm_server: Path, no_orphans: str) -> None:
    """The kernel hangs up; nothing that the front then writes can be written."""
    (tmp_path / "job.py").write_text(_PRINTS)
    run_dir, output = tmp_path / "run", tmp_path / "attached.out"
    flags = ["--run-dir", str(run_dir), "--nproc-per-node", "1", "--no-zygote", "--set", "probe.allow=false"]
    argv = [sys.executable, "-m", "holdfast", "run", *flags, "job.py", str(tmp_path)]
    env = make_rank_environment(job_environment(HOLDFAST_HOME=str(tmp_path / "home"), TERM="xterm-256color"))
    env |= {program_fork_server.NAMED: str(warm_server)}
    try:
        with Terminal(argv, env=env, cwd=tmp_path, columns=120) as terminal:
            terminal.shows("[rank 0] step")
            rank = int((run_dir / "logs" / "gen-1" / "rank-0" / "pid").read_text())
            terminal.hang_up()
            attached = _attach(tmp_path, output)
            until(lambda: output.exists() and output.read_bytes().count(b"[rank 0] step") > 20, "a second of steps")
            assert terminal.process.poll() is None and not gone(rank)
            (tmp_path / "finish").touch()
            assert attached.wait(60) == 0 and terminal.process.wait(60) == 0
        assert not load_report(run_dir).incidents
        again = subprocess.run(_attach_words(tmp_path), capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 0 and "holdfast: done: 0 " in again.stderr
    finally:
        kill_marked(no_orphans)


@pytest.mark.e2e
def test_logs_of_one_rank_are_followed(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", "2", script=_PRINTS)
    job.trains()
    output = tmp_path / "followed.out"
    with output.open("ab") as file:
        words = [sys.executable, "-m", "holdfast", "logs", "-f", "--rank", "1", "-n", "1", "--run", str(job.run_dir)]
        following = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        until(lambda: len(output.read_text().splitlines()) > 10, "a line that was there, and new ones")
        job.finish()
        job.ends(0)
        assert following.wait(60) == 0, "it ends with the run"
    finally:
        following.kill()
        following.wait()
    shown = output.read_text().splitlines()
    first = int(shown[0].split()[-1])
    last = int((job.rank_dir(1) / "stdout.log").read_text().split()[-1])
    assert shown == [f"[rank 1] step {step}" for step in range(first, last + 1)], "all of it, once, and no other rank"


@pytest.mark.e2e
def test_metrics_at_the_port_that_was_chosen(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    job = start("--nproc-per-node", "1", "--port", str(port))
    job.trains()
    token = (job.run_dir / "token").read_text().strip()

    def fetch(shown: str) -> tuple[int, str]:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {shown}"})
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, ""

    assert fetch("0" * len(token))[0] in (401, 403)

    def read_step() -> float:
        code, text = fetch(token)
        found = re.search(r"^holdfast_step(?:\{.*\})? (\S+)$", text, re.M)
        assert code == 200 and found, text
        return float(found[1])

    before = read_step()
    job.until(lambda: read_step() > before, "a step more")
    job.finish()
    job.ends(0)


@pytest.mark.e2e
def test_a_job_without_a_terminal(start: Start, tmp_path: Path) -> None:
    job = start("--nproc-per-node", "1", "--detach", executed=True)  # as a process that a shell would wait for
    job.ends(0)
    assert f"holdfast stop {tmp_path / 'run'}" in job.sentences()[-1]
    job.trains()
    assert main(["stop", "--run", str(tmp_path / "run")]) == 0
    job.until(lambda: run_selection.known_runs() and not (tmp_path / "run" / "token").exists(), "the end of the front")


_PRINTS = """
import os, sys, time
import holdfast
step = 0
while not os.path.exists(f"{sys.argv[1]}/finish"):
    time.sleep(0.05)
    step += 1
    print("step", step, flush=True)
    holdfast.step(step)
"""


def _attach(folder: Path, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("ab") as file:
        return subprocess.Popen(_attach_words(folder), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _attach_words(folder: Path) -> list[str]:
    return [sys.executable, "-m", "holdfast", "attach", "--run", str(folder / "run")]
