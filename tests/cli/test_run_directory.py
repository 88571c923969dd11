"""Run directories: made, found, and who is alive in one."""

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.commands import ls_command
from holdfast.cli.launch.journal_and_notes import NotesFolder
from holdfast.cli.page.page_sources import RunSource
from holdfast.cli.run_dirs import run_dir_creation, run_dir_secrets, run_directory, run_liveness, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.config import Settings
from holdfast.dash.page_source import SourceError
from holdfast.linux import own_process_settings
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.run_and_node_specs import ControllerAddress, EntryPoint, RunEnd, RunSpec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def published(run_dir: Path) -> Path:
    job = Job(run_id="r", min_nodes=1, max_nodes=1)
    run = RunSpec(job=job, entry=EntryPoint(argv=("x",)), settings=Settings(), fleet="local", nproc=1, log_dir="/l")
    run_dir_creation.publish_run(run_dir, run)
    return run_dir


def test_what_has_settings_in_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The folder keeps others out already, until somebody opens it."""
    before = os.umask(0)
    try:
        run_dir = published(run_dir_creation.make_run_dir(str(tmp_path / "run"), "r"))
        run_and_node_specs.publish_file(run_dir / "figures", b"for other tools")
    finally:
        os.umask(before)
    assert (run_dir / "run.json").stat().st_mode & 0o777 == 0o600
    assert (run_dir / "figures").stat().st_mode & 0o777 == 0o666


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_directory.holdfast_home() == tmp_path / "home"
    monkeypatch.setenv("HOLDFAST_HOME", "")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert run_directory.holdfast_home() == Path("/state/holdfast")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/me")
    assert run_directory.holdfast_home() == Path("/me/.local/state/holdfast")


def test_variables_that_are_no_text_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of them made the whole environment unreadable, and no node could start."""
    monkeypatch.setenv("ODD", os.fsdecode(b"\xff\xfe"))
    monkeypatch.setenv("EVEN", "\u00e4")
    env = run_directory.node_environment(published(run_dir_creation.make_run_dir(None, "r")))
    assert "ODD" not in env and env["EVEN"] == "\u00e4"
    assert "UTF-8: ODD\n" in capfd.readouterr().err


def test_what_is_secret_is_for_its_owner(home: Path) -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    assert run_dir == home / "runs" / "r"
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    for name in ("token", "env.json"):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600
    assert len(run_dir_secrets.read_token(run_dir)) == 32
    assert run_directory.node_environment(run_dir) == make_rank_environment(os.environ)
    assert run_directory.read_spec(run_dir).job.run_id == "r"


def test_the_same_id_twice_and_ids_that_are_no_names(home: Path) -> None:
    first = published(run_dir_creation.make_run_dir(None, "../../my job"))
    second = published(run_dir_creation.make_run_dir(None, "../../my job"))
    assert first == home / "runs" / ".._.._my_job"
    assert second.parent == first.parent and second.name.startswith(first.name + "-")
    logs = [run_dir_creation.make_log_dir(str(home / "logs"), first, "a/b") for _ in range(2)]
    assert len(set(logs)) == 2 and all(log.parent == home / "logs" for log in logs)
    assert {stat.S_IMODE(log.stat().st_mode) for log in logs} == {0o700}, "ranks may print secrets"
    assert run_dir_creation.make_log_dir(None, first, "a/b") == first / "logs"


def test_a_log_directory_that_cannot_be_made_leaves_no_run_directory(home: Path, tmp_path: Path) -> None:
    run_dir, named = (
        run_dir_creation.make_run_dir(None, "r"),
        run_dir_creation.make_run_dir(str(tmp_path / "named"), "r"),
    )
    for made in (run_dir, named):
        with pytest.raises(UsageError, match="/proc/xyz"):
            run_dir_creation.make_log_dir("/proc/xyz", made, "r")
    assert (run_dir.exists(), named.exists()) == (False, True), "a folder that a person named stays"


def test_a_home_that_is_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", "/etc/passwd")
    with pytest.raises(UsageError, match="/etc/passwd"):
        run_directory.find_newest()
    assert ls_command.main([]) == 2


def test_secrets_of_a_command_line_are_not_listed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    argv = ("job.py", "--hub-token", "ArgTok55aaQQ1", "--wandb_key=ArgKey66bbRR2", "--lr", "0.1")
    run = run_directory.read_spec(run_dir)
    given = msgspec.structs.replace(run, entry=EntryPoint(argv=argv))
    (run_dir / "run.json").write_bytes(msgspec.json.encode(given))
    run_selection.remember_run(run_dir)
    for flags in ([], ["--json"]):
        assert ls_command.main(flags) == 0
        assert "job.py --hub-token <secret> --wandb_key=<secret> --lr 0.1" in capsys.readouterr().out
    assert run_directory.read_spec(run_dir).entry.argv == argv


def test_a_directory_that_holds_a_run_is_not_used_again(tmp_path: Path) -> None:
    run_dir = published(run_dir_creation.make_run_dir(str(tmp_path / "here"), "r"))
    with pytest.raises(UsageError, match="--resume"):
        run_dir_creation.make_run_dir(str(run_dir), "r")
    (run_dir / "exit.json").touch()
    with pytest.raises(UsageError, match="has ended; give another --run-dir"):
        run_dir_creation.make_run_dir(str(run_dir), "r")


def test_finding(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=run_directory.NO_RUN):
        run_selection.find(None)
    by_id, by_path = (
        published(run_dir_creation.make_run_dir(None, "r")),
        published(run_dir_creation.make_run_dir(str(tmp_path / "here"), "s")),
    )
    run_selection.remember_run(by_id)
    run_selection.remember_run(by_path)
    assert run_selection.find(None) == by_path
    assert run_selection.find("r") == by_id
    monkeypatch.chdir(tmp_path)
    assert run_selection.find("./here") == run_selection.find("here/") == run_selection.find("here") == by_path
    with pytest.raises(UsageError, match=r"run\.json"):
        run_selection.find("./home")
    assert not list(home.glob(".newest*"))


def test_a_home_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "file" / "home"))
    run_directory.mark_newest(tmp_path)


def test_who_listens(tmp_path: Path) -> None:
    run_dir, other = (
        published(run_dir_creation.make_run_dir(None, "r")),
        published(run_dir_creation.make_run_dir(None, "s")),
    )
    assert run_directory.find_controller(run_dir) is None
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, run_directory.CONTROLLER, str(run_dir), "3"])
    try:
        until = time.monotonic() + 10
        listening = ControllerAddress(url="http://127.0.0.1:1", pid=process.pid, started_at=0.0)
        for folder in (run_dir, other):
            run_and_node_specs.write_json(folder / "controller.json", listening)
        while run_directory.find_controller(run_dir) is None and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / "link").symlink_to(run_dir)
        assert run_directory.find_controller(tmp_path / "link") == listening
        assert run_directory.find_controller(other) is None, "that pid is the controller of another run"
    finally:
        process.kill()
        process.wait()
    assert run_directory.find_controller(run_dir) is None
    (run_dir / "controller.json").write_text("{")
    assert run_directory.find_controller(run_dir) is None


def test_what_is_alive_of_a_run_without_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    assert "--resume" not in run_liveness.ending_text(run_dir), "it has only just been made"
    (run_dir / "journal.db").touch()
    assert f"holdfast run --resume {run_dir}" in run_liveness.ending_text(run_dir), "nobody keeps a controller for it"
    own_process_settings.leave_input_note(run_dir / run_directory.STDIN)
    assert run_liveness.ending_text(run_dir) == "is starting, and its controller is not there yet"
    (run_dir / "plan.json").touch()
    alone = "has no controller now, but its front, holdfast run, is alive"
    assert run_liveness.ending_text(run_dir) == alone, "a controller has launched ranks"
    with monkeypatch.context() as full:
        full.setattr(run_directory, "free_bytes", lambda _: 4096)
        lost_s = f"{Settings().node.lost_s:g} s"
        said, listed = run_liveness.ending_text(run_dir), ls_command._run_state(run_dir)[1]
    told = f"; the disk that holds {run_dir} is full: free space, and the controller starts again; {lost_s} after"
    told += " the controller's end nodes end their ranks, and what is in memory alone is lost"
    assert (said, listed) == (alone + told, f", but it has no controller now{told}")
    (run_dir / run_directory.STDIN).write_text(f"{os.getpid()} 1")  # an earlier process had this pid
    assert f"holdfast run --resume {run_dir}" in run_liveness.ending_text(run_dir)


def test_a_controller_on_another_host_is_not_called_gone() -> None:
    """As that of a batch job is, seen from the login node."""
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    address = ControllerAddress(url="https://c17:29400", pid=os.getpid(), started_at=1.0)
    run_and_node_specs.write_json(run_dir / "controller.json", address)
    (run_dir / "controller-c17.lock").touch()
    (run_dir / "journal.db").touch()
    assert run_liveness.ending_text(run_dir) == run_liveness.elsewhere_text(run_dir, address)
    assert ls_command._run_state(run_dir)[0] == "elsewhere"
    (run_dir / f"controller-{socket.gethostname()}.lock").touch()
    assert run_liveness.controller_elsewhere(run_dir) is None, "it has been here, and is no more"


def test_a_rank_without_output_is_told_of_other_hosts_only_if_there_may_be_some() -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    with pytest.raises(SourceError) as local:
        RunSource(run_dir).read_log(3)
    joined = msgspec.structs.replace(run_directory.read_spec(run_dir), fleet="join")
    run_and_node_specs.write_json(run_dir / "run.json", joined)
    with pytest.raises(SourceError) as several:
        RunSource(run_dir).read_log(3)
    assert str(local.value) == "rank 3 has printed nothing"
    assert str(several.value) == f"{local.value} on this host; its node may keep it on another one"


def test_how_a_run_has_ended() -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    alive = run_liveness.ending_text(run_dir)
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=93, reason="enough"))
    assert run_liveness.ending_text(run_dir) == "has ended with code 93: enough" and "93" not in alive


def test_addresses() -> None:
    assert run_directory.web_address("host", 1) == "http://host:1"
    assert run_directory.web_address("::1", 1) == "http://[::1]:1"


def test_a_note_is_on_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power a file whose folder was not synced may be the one before."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    NotesFolder(tmp_path).put_note("plan.json", b"{}")
    assert len(synced) == 2 and synced[-1] == str(tmp_path) and NotesFolder(tmp_path).get_note("plan.json") == b"{}"


def test_long_lines_of_a_rank_are_cut_and_masked_in_time(tmp_path: Path) -> None:
    run_dir = published(run_dir_creation.make_run_dir(None, "r"))
    spec = msgspec.structs.replace(run_directory.read_spec(run_dir), log_dir=str(tmp_path / "logs"))
    run_and_node_specs.write_json(run_dir / "run.json", spec)
    folder = tmp_path / "logs" / "gen-1" / "rank-0"
    folder.mkdir(parents=True)
    secret = "hf_" + "aB3dE5fG7hJ9kL1m" * 4
    lines = ["discord.com/" * 2500 + "hook" * 7500, "x " * 4080 + secret, "y " * 8180 + secret, "z" * 20000, "short"]
    (folder / "stdout.log").write_text("\n".join(lines))
    begun = time.process_time()
    _, *shown = RunSource(run_dir).read_log(0)
    assert time.process_time() - begun < 5
    assert len(shown) == 5 and shown[-1].endswith("short") and max(map(len, shown)) <= 8192
    assert not any(secret[:12] in line for line in shown)
