"""A run that is stopped before it has begun leaves nothing."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.launch.unstarted_run import hold_signals, obey_signals, removed_unless_begun
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.wire import program_fork_server
from tests.conftest import ROOT, job_environment

STOPS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    obey_signals()
    for number, obeyed in before.items():
        signal.signal(number, obeyed)


def make_folders(tmp_path: Path) -> tuple[Path, Path]:
    made, kept = tmp_path / "made", tmp_path / "kept"
    for folder in (made, kept):
        (folder / "inner").mkdir(parents=True)
        (folder / "env.json").write_text("{}")
    (kept / "link").symlink_to(tmp_path)
    return made, kept


def prepare(made: Path, kept: Path, end: Callable[[], None]) -> None:
    with removed_unless_begun() as folders:
        folders.add_folder(made)
        folders.add_folder(kept, kept=True)
        end()


@pytest.mark.parametrize("number", STOPS)
def test_a_stop_signal(tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before, (made, kept) = signal.getsignal(number), make_folders(tmp_path)
    with pytest.raises(SystemExit) as ended:
        prepare(made, kept, lambda: signal.raise_signal(number))
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert sorted(tmp_path.iterdir()) == [kept] and not list(kept.iterdir())
    assert capfd.readouterr().err == "holdfast: stopped before the job had begun; nothing of it is left\n"


def refuse() -> None:
    raise UsageError("why")


def test_a_refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made, kept = make_folders(tmp_path)
    with pytest.raises(UsageError, match="why"):
        prepare(made, kept, refuse)
    assert not made.exists() and not list(kept.iterdir()) and capfd.readouterr().err == ""


@pytest.fixture
def ignored() -> None:
    """As in a command that a script starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def learn_of_it() -> None:
    hold_signals()
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ignored")
def test_once_others_know_of_the_run_its_supervisor_gets_the_signal(tmp_path: Path) -> None:
    made, kept = make_folders(tmp_path)
    prepare(made, kept, learn_of_it)
    assert made.exists() and list(kept.iterdir())
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    obey_signals()
    assert heard == [signal.SIGINT]


@pytest.mark.e2e
@pytest.mark.parametrize("named", [False, True])
def test_ctrl_c_while_a_run_is_prepared(tmp_path: Path, no_orphans: str, named: bool) -> None:
    home, script = tmp_path / "home", tmp_path / "train.py"
    script.write_text("raise SystemExit('never run')\n")
    where = tmp_path / "named"
    flags = ["--run-dir", str(where)] if named else []
    words = [sys.executable, "-m", "holdfast", "run", *flags, str(script)]
    env = job_environment(HOLDFAST_HOME=str(home))
    env.pop(program_fork_server.NAMED, None)  # it starts one of its own
    run = subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pattern = "named/env.json" if named else "home/runs/*/env.json"
    while not list(tmp_path.glob(pattern)):
        assert run.poll() is None
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "holdfast: stopped before the job had begun; nothing of it is left\n")
    assert not where.exists() and not list(home.glob("runs/*"))
