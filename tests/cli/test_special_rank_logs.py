"""A rank may put a pipe, a device or a folder in place of its log: no reader waits for it or reads without end."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.rank import last_words, rank_exchange_files
from holdfast.agent.rank.log_rotation import rotate_file
from holdfast.agent.sources.rank_logs import LogFollower
from holdfast.cli import main
from holdfast.cli.page.page_sources import RunSource
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.cli.terminal.rank_console import Console, ConsoleStyle, list_generations, list_ranks
from holdfast.config import Settings
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.linux.regular_files import open_log, open_regular, read_end, read_start
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

pytestmark = pytest.mark.timeout(20)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL: list[Callable[[Path], None]] = [os.mkfifo, link_to_zero, Path.mkdir]
special = pytest.mark.parametrize("make", SPECIAL)
Make = Callable[[Path], None]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose rank 1 has crashed after it wrote one line to stdout."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    made = run_dir_creation.make_run_dir(None, "r")
    job = Job(run_id="r", min_nodes=1, max_nodes=1)
    entry = EntryPoint(argv=("x",))
    log_dir = str(made / "logs")
    spec = RunSpec(job=job, entry=entry, settings=Settings(), fleet="local", nproc=2, log_dir=log_dir)
    run_dir_creation.publish_run(made, spec)
    run_directory.mark_newest(made)
    alarm = Alarm(kind=Kind.CRASH, at=1.0, suspects=("n0",), ranks=(1,), code=1, generation=1, reason="ended")
    journal = SqliteJournal(made / "journal.db")
    journal.append(Entry(seq=1, at=1.0, event=alarm, decision=Decision()), durable=True)
    journal.close()
    folder = made / "logs" / "gen-1" / "rank-1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    return made


def error_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "gen-1" / "rank-1" / "stderr.log"


@special
def test_logs(run_dir: Path, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make(error_log(run_dir))
    assert main(["logs", str(run_dir)]) == 0
    shown = capfd.readouterr()
    assert "[rank 1] torch.OutOfMemoryError" in shown.out
    assert shown.err == f"holdfast: cannot read {error_log(run_dir)}: it is no regular file\n"


@special
def test_diagnose(run_dir: Path, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make(error_log(run_dir))
    assert main(["diagnose", str(run_dir), "--json"]) == 0
    shown = capfd.readouterr()
    assert '"class":"gpu_oom"' in shown.out
    assert shown.err == f"holdfast diagnose: {error_log(run_dir)} is no regular file: it is not read\n"


@special
def test_page_and_report(run_dir: Path, make: Make) -> None:
    make(error_log(run_dir))
    head, out, err = RunSource(run_dir).read_log(1)
    assert head == "generation 1" and out.startswith("out  torch.OutOfMemoryError")
    assert err == "err  cannot read stderr.log: it is no regular file"


@special
def test_last_words(run_dir: Path, make: Make) -> None:
    make(error_log(run_dir))
    folder = error_log(run_dir).parent
    assert [line.split(":")[0] for line in last_words.last_words(folder)] == ["torch.OutOfMemoryError"]
    assert last_words.last_line(folder).startswith("torch.OutOfMemoryError")


@special
def test_rotation_into_what_is_no_file(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "stdout.log"
    make(tmp_path / "stdout.log.1")
    path.write_bytes(b"a" * 10 + b"b" * 10)
    if rotate_file(path, 10):
        assert path.with_name("stdout.log.1").read_bytes() == b"b" * 10
        assert not path.with_name("stdout.log.1").is_symlink()
    else:
        assert make is Path.mkdir


@special
def test_a_log_that_is_replaced_between_look_and_read(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.log"
    old.write_bytes(bytes(100))
    make(tmp_path / "stdout.log")
    found = os.stat(old)
    follower = LogFollower(tmp_path / "stdout.log")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path: found)
        assert follower.read_new(10) == b""


@special
def test_notes_of_ranks(tmp_path: Path, make: Make) -> None:
    for name in ("mesh", "replayable", "trackers", "loss-source"):
        make(tmp_path / name)
    assert rank_exchange_files.read_notes(tmp_path / "mesh") == {"mesh": (), "replayable": "", "trackers": ""}
    assert rank_exchange_files.read_loss_source(tmp_path) == ""


@special
def test_open_regular(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "special")
    with pytest.raises(OSError, match=str(errno.EINVAL)) as refused:
        open_regular(str(tmp_path / "special"))
    assert refused.value.filename == str(tmp_path / "special")


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    assert (read_start(path, 2), read_end(path, 2), read_end(path, 10)) == (b"ab", b"ef", b"abcdef")
    os.truncate(path, 1 << 40)  # sparse
    assert read_end(path, 3) == bytes(3)


@special
def test_the_console_shows_the_other_logs(run_dir: Path, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    make(error_log(run_dir))
    style = ConsoleStyle(nproc=2, shown=lambda local: 3)
    console = Console(run_dir / "logs", style, run_dir / "said.log")
    console.drain_output()
    assert "torch.OutOfMemoryError" in capfd.readouterr().out


@special
def test_a_log_is_opened_whatever_is_in_its_place(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "stdout.log"
    make(path)
    fd = open_log(str(path))
    os.write(fd, b"from the rank\n")
    assert os.get_blocking(fd)
    os.close(fd)
    [aside] = tmp_path.glob(".stdout.log.aside-*")
    told = f"holdfast: in place of this log was no regular file; moved to {aside}\n"
    assert path.read_text() == f"{told}from the rank\n"
    assert stat.S_ISREG(path.lstat().st_mode) and stat.S_IMODE(path.lstat().st_mode) == 0o600
    fd = open_log(str(path))
    os.close(fd)
    assert path.read_text().count("aside") == 1, "a log that is there is kept"


def test_a_pipe_that_somebody_reads_is_no_log_either(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.close(open_log(str(path)))
        assert stat.S_ISREG(path.lstat().st_mode)
    finally:
        os.close(reader)


@special
def test_log_folders_are_made_whatever_is_in_their_place(tmp_path: Path, make: Make) -> None:
    if make is Path.mkdir:
        pytest.skip("a folder is what belongs there")
    for rank, what in ((tmp_path / "gen-2" / "rank-0", "rank-0"), (tmp_path / "gen-3" / "rank-0", "gen-3")):
        where = rank if what == rank.name else rank.parent
        where.parent.mkdir(exist_ok=True)
        make(where)
        last_words.make_rank_folder(rank)
        assert rank.is_dir() and not where.is_symlink()


@special
def test_what_is_published_replaces_whatever_is_there(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "pid")
    make(tmp_path / f".pid.{os.getpid()}")
    assert rank_exchange_files.note_pid(tmp_path, 0, 7) == ""
    assert (tmp_path / "pid").read_text() == "7\n" and not (tmp_path / "pid").is_symlink()


def test_a_link_in_place_of_a_log_has_nothing_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"a" * 100)
    (tmp_path / "stdout.log").symlink_to(tmp_path / "mine")
    assert not rotate_file(tmp_path / "stdout.log", 10)
    assert (tmp_path / "mine").stat().st_size == 100


def test_the_console_shows_the_logs_beside_folders_of_other_names(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("rank-x", "rank-", "rank-1.aside-2d14540f", "rank-01"):
        (run_dir / "logs" / "gen-1" / name).mkdir()
        (run_dir / "logs" / "gen-1" / name / "stdout.log").write_text("not of a rank\n")
    (run_dir / "logs" / "gen-x").mkdir()
    os.mkfifo(run_dir / "logs" / "gen-2")
    (run_dir / "logs" / "gen-3").symlink_to(run_dir)
    console = Console(run_dir / "logs", ConsoleStyle(nproc=2, shown=lambda local: 3), run_dir / "said.log")
    console.drain_output()
    shown = capfd.readouterr().out
    assert "torch.OutOfMemoryError" in shown and "not of a rank" not in shown
    assert list_generations(run_dir / "logs") == [1] and list_ranks(run_dir / "logs" / "gen-1") == [1]
    assert main(["logs", str(run_dir)]) == 0
    assert "torch.OutOfMemoryError" in capfd.readouterr().out
