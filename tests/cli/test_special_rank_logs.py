"""A rank may put a pipe, a device or a folder in place of its log: no reader waits for it or reads without end."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.rank import last_words, rank_exchange_files
from holdfast.agent.rank.log_rotation import rotate_file
from holdfast.agent.sources.rank_logs import LogFollower
from holdfast.cli import main
from holdfast.cli.page.page_sources import RunSource
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.cli.terminal.rank_console import Console, ConsoleStyle
from holdfast.config import Settings
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.linux.regular_files import open_regular, read_end, read_start
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
