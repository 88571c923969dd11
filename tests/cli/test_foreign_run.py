"""A run directory that is not the caller's alone: no command reads it, executes what it says, or removes through it."""

import argparse
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.commands import dash_command, diagnose_command, sbatch_command
from holdfast.cli.page.page_sources import JournalSource, RunSource
from holdfast.cli.run_dirs import run_dir_creation, run_dir_secrets, run_dir_trust, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import parse_run_args
from holdfast.config import Settings
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.job_and_seats import Job as JobSpec
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import EntryPoint, RunEnd, RunSpec
from tests.cli.driver import ROOT
from tests.cli.test_attacks import as_another
from tests.conftest import job_environment

NOBODY = 65534
Capture = pytest.CaptureFixture[str]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user")
# All commands that are about one run; {} is the run.
ASKED = (
    "status {}",
    "logs {}",
    "attach {}",
    "report {}",
    "trace {}",
    "releases {}",
    "dash --no-open {}",
    "diagnose {}",
    "clean {}",
    "stop {}",
    "hold {}",
    "resume {}",
    "approve {}",
    "evict n0 {}",
    "drain n0 {}",
    "rollback {}",
    "update {}",
    "update . {}",
    "token node n7 {}",
    "chaos random --seed 1 --minutes 1 --yes {}",
    "run --resume {}",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def published(wanted: str | None, name: str) -> Path:
    run_dir = run_dir_creation.make_run_dir(wanted, name)
    log_dir = str(run_dir / "logs")
    job = JobSpec(run_id=name, min_nodes=1, max_nodes=1)
    spec = RunSpec(
        job=job, entry=EntryPoint(argv=("train.py",)), settings=Settings(), fleet="local", nproc=1, log_dir=log_dir
    )
    run_dir_creation.publish_run(run_dir, spec)
    (run_dir / "lock").write_text(os.uname().nodename)
    run_selection.remember_run(run_dir)
    return run_dir


def given_away(run_dir: Path) -> Path:
    """As if another user had made it, and opened it to all."""
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o777)
    return run_dir


def refuses(capsys: Capture, words: str, *named: str) -> None:
    """In one line, which names all of these."""
    capsys.readouterr()
    assert main(words.split()) == 2, words
    said = capsys.readouterr()
    assert all(name in said.err for name in named) and said.err.count("\n") == 1 and not said.out, (words, said)


@as_root
@pytest.mark.parametrize("words", ASKED)
def test_he_offers_a_run_of_his_own(words: str, home: Path, tmp_path: Path, capsys: Capture) -> None:
    theirs = given_away(published(str(tmp_path / "theirs"), "job7"))
    published(None, "mine")
    refuses(capsys, words.format(theirs), f"{theirs} ", " user nobody ")


@pytest.mark.parametrize("words", ASKED)
def test_a_run_that_others_can_write(words: str, home: Path, tmp_path: Path, capsys: Capture) -> None:
    run_dir = published(str(tmp_path / "open"), "job7")
    run_dir.chmod(0o702)
    published(None, "mine")
    refuses(capsys, words.format(run_dir), f"chmod go-w {run_dir}")


@as_root
def test_his_link_leads_to_a_run_of_ours(home: Path, tmp_path: Path, capsys: Capture) -> None:
    """Also as a folder on the way, behind a link of ours, and before there is anything at its end."""
    own = published(str(tmp_path / "own"), "mine")
    (tmp_path / "his").symlink_to(own)
    (tmp_path / "above").symlink_to(tmp_path)
    (tmp_path / "ours").symlink_to("above/own")
    for name in ("his", "above"):
        os.lchown(tmp_path / name, NOBODY, NOBODY)
    for path in ("his", "above/own", "ours", "own/../above/own"):
        link = tmp_path / ("his" if path == "his" else "above")
        refuses(capsys, f"status {tmp_path / path}", f"{link} ", " user nobody")
    with pytest.raises(UsageError, match=rf"{tmp_path}/above .* user nobody"):
        run_dir_creation.make_run_dir(str(tmp_path / "above" / "new"), "r")
    assert not (tmp_path / "new").exists()


@as_root
def test_a_group_of_several_and_one_of_ones_own(tmp_path: Path) -> None:
    for group, refused in ((NOBODY, True), (os.getuid(), False)):
        os.chown(tmp_path, -1, group)
        tmp_path.chmod(0o2770)
        assert bool(run_dir_trust.foreign_reason(tmp_path)) is refused


def test_a_link_of_our_own_is_followed(home: Path, tmp_path: Path) -> None:
    own = published(str(tmp_path / "own"), "mine")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "round").symlink_to("round")
    assert run_selection.find(str(tmp_path / "link")).samefile(own)
    assert run_selection.find(str(home / "newest")).samefile(own)
    assert run_dir_trust.foreign_reason(tmp_path / "round").endswith(f": {os.strerror(errno.ELOOP)}")


@as_root
def test_he_asks_for_a_run_of_ours(home: Path, tmp_path: Path) -> None:
    """Also where he may not even see whether there is one."""
    own = published(str(tmp_path / "own"), "mine")

    def told() -> str:
        try:
            return str(run_selection.find(str(own)))
        except UsageError as e:
            return str(e)

    assert as_another(told) == f"{own} cannot be opened: Permission denied"
    above = [folder for folder in own.parents if folder.stat().st_mode & 0o077 == 0]
    try:
        for folder in above:
            folder.chmod(0o711)
        assert as_another(told) == f"{own} is another user's: only commands of user root open it"
    finally:
        for folder in above:
            folder.chmod(0o700)


@as_root
def test_a_run_of_ours_that_he_has_replaced(home: Path, tmp_path: Path, capsys: Capture) -> None:
    """The place is known as ours, and what lies there now is not: nobody lists, guesses or cleans it."""
    elsewhere = published(str(tmp_path / "own"), "job7")
    given_away(elsewhere)
    assert run_selection.known_runs() == []
    refuses(capsys, "status", "is another user's")
    refuses(capsys, "clean", "is another user's")
    refuses(capsys, "status job7", "job7 is no run id")
    assert main(["clean", "--all"]) == 0
    assert (elsewhere / "token").exists()
    with pytest.raises(UsageError, match="another user's"):
        run_dir_creation.make_run_dir(str(elsewhere), "r")


@pytest.mark.parametrize("words", ["status {}", "report {}", "clean --dry-run {}", "stop {}", "diagnose {}"])
def test_a_folder_here_has_the_name_of_a_run(
    words: str, home: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have made it, so a name is a run that the caller has started, and only ./NAME is the folder."""
    own = published(None, "job1")
    run_and_node_specs.write_json(own / "exit.json", RunEnd(code=7, reason="done"))
    shutil.copytree(own, tmp_path / "work" / "job1")
    shutil.copytree(own, tmp_path / "work" / "job2")
    monkeypatch.chdir(tmp_path / "work")
    main(words.format("job1").split())
    said = capsys.readouterr()
    assert re.search(rf"^holdfast: job1 .* {own}; .* \./job1$", said.err, re.MULTILINE)
    assert str(tmp_path / "work") not in said.out + said.err
    refuses(
        capsys, words.format("job2"), "job2 is no run that you have started here; for the folder of this name write ./"
    )
    main(words.format("./job1").split())
    said = capsys.readouterr()
    assert str(own) not in said.out + said.err and "is taken" not in said.err


def test_what_is_no_run_does_not_hide_one(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for `dash` and a folder for `diagnose`, beside a run of the same name; and names of one's own folders."""
    own = published(None, "job1")
    first, second = published(str(tmp_path / "a" / "run"), "night-1"), published(str(tmp_path / "b" / "run"), "night-2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job1").write_text("no journal")
    assert isinstance(dash_command._find_source(argparse.Namespace(run="job1", named=None)), RunSource)
    (tmp_path / "job1").unlink()
    (tmp_path / "job1").mkdir()
    assert not diagnose_command._are_files(["job1"]) and diagnose_command._are_files(["./job1"])
    assert run_selection.find("job1") == own
    with pytest.raises(UsageError, match=r"^run .* 2 runs: night-1, night-2; "):
        run_selection.find("run")
    monkeypatch.chdir(tmp_path / "b")
    assert run_selection.find("run") == second and run_selection.find("../a/run").samefile(first)


@as_root
@pytest.mark.e2e
def test_a_file_of_his_here_has_the_name_of_a_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that shows what he likes. A name is a run, by its beginning, too; his file is one if we name it so."""
    published(None, "job1-2026")
    for name in ("job1", "job1.db"):
        SqliteJournal(tmp_path / name).close()
        os.chown(tmp_path / name, NOBODY, NOBODY)
    monkeypatch.chdir(tmp_path)
    for name, kind in (
        ("job1", RunSource),
        ("job1-", RunSource),
        ("job1.db", JournalSource),
        ("./job1", JournalSource),
    ):
        found = dash_command._find_source(argparse.Namespace(run=name, named=None))
        assert type(found) is kind, name
    command = [str(Path(sys.executable).with_name("holdfast")), "dash", "--no-open", "job1.db"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=job_environment()
    ) as shown:
        assert shown.stdout and shown.stderr
        shown.stdout.readline()
        shown.terminate()
        told = shown.stderr.readline()
    assert told == "holdfast dash: job1.db is of user nobody, who may have written anything in it\n"


def test_clean_follows_no_link(home: Path, tmp_path: Path, capsys: Capture) -> None:
    precious = tmp_path / "precious"
    for name in ("mine.txt", "key.pem", "lock", "keys/deep"):
        (precious / name).parent.mkdir(parents=True, exist_ok=True)
        (precious / name).write_text(os.uname().nodename)
    run_dir = published(None, "r")
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=0, reason="done"))
    (run_dir / "nodes").mkdir()
    (run_dir / "slurm").mkdir()
    for name in ("nodes/n0", "slurm/s0", "door", "keys", "releases", "torchinductor_cache", "store.sock"):
        (run_dir / name).symlink_to(precious)
    before = sorted(precious.rglob("*"))
    main(["clean", "r"])
    run_dir_secrets.forget_secrets(run_dir)
    assert sorted(precious.rglob("*")) == before
    assert not (run_dir / "door").is_symlink() and not (run_dir / "token").exists()
    assert "slurm/s0/keys " in capsys.readouterr().out
    shutil.rmtree(run_dir / "nodes")
    (run_dir / "nodes").symlink_to(precious.parent)
    main(["clean", "r"])
    assert sorted(precious.rglob("*")) == before


@as_root
@pytest.mark.e2e
def test_a_batch_script_takes_up_no_run_of_his(home: Path, tmp_path: Path) -> None:
    """In a folder where everybody may make folders he is there first, with an environment that executes his code."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    words = ["--nnodes", "1", "--run-dir", str(shared / "run1"), "-m", "this"]
    script = sbatch_command.write_script(parse_run_args(["--fleet", "slurm", *words], {}), words, shared / "run1", "r")
    run_dir = published(str(shared / "run1"), "job1")
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w').close()")
    (run_dir / "env.json").write_text(json.dumps(dict(os.environ) | {"PYTHONPATH": f"{evil}:{ROOT}"}))
    given_away(run_dir)
    done = subprocess.run(
        ["bash", "-c", script],
        env=job_environment() | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"holdfast run: {run_dir} is another user's") and done.stderr.count("\n") == 1
    assert not (tmp_path / "pwned").exists()


def test_every_command_is_tried() -> None:
    others = {"ls", "sbatch", "blocked", "journal", "catalog", "ckpt", "probe", "plan", "sim", "completion"}
    assert {words.split()[0] for words in ASKED} == set(COMMANDS) - others
