"""Completion: which words are offered, and that real shells take them."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.commands.completion_command import suggest_words
from tests.cli.terminal import Terminal
from tests.conftest import job_environment

PATIENCE_S = 60.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one of them in a folder of its own."""
    home, other = tmp_path / "home", tmp_path / "other"
    for run_dir in (home / "runs/20261118-aa", other):
        run_dir.mkdir(parents=True)
        (run_dir / "run.json").touch()
    (home / "elsewhere").mkdir()
    (home / "elsewhere/1").symlink_to(other)
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    return home


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["rep"], ["report"]),
        ([""], list(COMMANDS)),
        (["nothing", ""], []),
        (["report", "--j"], ["--json", "--journal"]),
        (["report", "--json", "--r"], ["--run"]),
        (["logs", "--stream", ""], ["stdout", "stderr", "both"]),
        (["run", "--no-z"], ["--no-zygote"]),
        (["run", "--nproc_"], []),  # torchrun's older spelling is taken, and not offered
        (["run", "--set", "hang.st"], ["hang.stance=", "hang.start_s=", "hang.steps="]),
        (["run", "--nnodes", ""], []),
        (["run", "--nnodes", "2", "train.py", "--"], []),  # the script's own
        (["sbatch", "--kube-i"], ["--kube-image"]),
        (["ckpt", "ve"], ["verify"]),
        (["ckpt", "verify", "--st"], ["--step"]),
        (["ckpt", "nothing", ""], []),
        (["update", "--", ""], []),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_what_is_offered(words: list[str], found: list[str]) -> None:
    assert list(suggest_words(words)) == found


def test_runs_are_offered_by_id_or_by_place(home: Path, tmp_path: Path) -> None:
    for words in (["report", ""], ["status", "--run", ""], ["run", "--resume", ""], ["clean", "one", ""]):
        assert set(suggest_words(words)) == {"20261118-aa", str(tmp_path / "other")}
    assert list(suggest_words(["report", "20261118"])) == ["20261118-aa"]
    assert suggest_words(["report", "20261118-aa", ""]) == {}, "one run is enough"


def shell_environment(folder: Path, home: Path) -> dict[str, str]:
    """An environment with a `holdfast` that is this tree's."""
    program = folder / "bin/holdfast"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m holdfast "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return job_environment(HOLDFAST_HOME=str(home), PATH=path, TERM="xterm", HOME=str(folder), ZDOTDIR=str(folder))


STARTS = {
    "bash": (["--norc", "-i"], 'PS1="ready> "; eval "$(holdfast completion bash)"; echo set "up"\n'),
    "zsh": (
        ["-f", "-i"],
        'PS1="ready> "; autoload -U compinit; compinit -u -D; eval "$(holdfast completion zsh)"; echo set "up"\n',
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", list(STARTS))
def test_a_real_shell_completes(name: str, home: Path, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    flags, start = STARTS[name]
    with Terminal([name, *flags], env=shell_environment(tmp_path, home), cwd=tmp_path) as shell:
        shell.type(start)
        shell.shows("set up")
        for typed, shown in (
            ("holdfast rep\t2026\t--js\t", "holdfast report 20261118-aa --json"),
            ("\x15holdfast run --set hang.stan\t", "holdfast run --set hang.stance="),
            ("\x15holdfast completion ./bi\t", "holdfast completion ./bin/"),  # files, where we have no word
        ):
            shell.type(typed)
            shell.shows(shown)


@pytest.mark.e2e
def test_fish_completes(home: Path, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish here")
    ask = "; ".join(f"complete -C {shlex.quote(line)}" for line in ("holdfast rep", "holdfast report 2026"))
    script = f"holdfast completion fish | source; {ask}"
    env = shell_environment(tmp_path, home)
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], check=False, capture_output=True, text=True, timeout=PATIENCE_S, env=env
    )
    assert done.stdout.splitlines() == ["report\tshow what a job did and what it cost", "20261118-aa\trun"], done.stderr
