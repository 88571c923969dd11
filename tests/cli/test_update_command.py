"""Newer code in a job that runs, end to end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.cli.page.page_sources import RunSource
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.dash.page_feed import PageFeed
from holdfast.wire.controller_request import ControllerNotRunning
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, TRAIN, Job, below, run_command
from tests.wire.test_release_file_selection import git

pytestmark = pytest.mark.e2e

# Says which code it is at its start and in every step, in a file beside the step.
TOLD = TRAIN.replace(
    "import holdfast\n",
    """import holdfast, json
import part
note = dict(name=part.NAME, file=__file__, path=sys.path[0], cwd=os.getcwd(), release=os.environ["HOLDFAST_RELEASE"],
            argv=sys.argv[2:], lr=os.environ.get("LR"), forked="torch._dynamo" in sys.modules)
note["data"] = open(os.path.join(os.path.dirname(__file__), "d.big")).read()
with open(f"{sys.argv[1]}/notes", "a") as notes:
    notes.write(json.dumps(note) + "\\n")
""",
)


def holdfast(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(*words, folder=folder)


def age(path: Path) -> None:
    """Python takes a module for the one that it compiled if it has the same size and time, in whole seconds."""
    path.touch()
    seconds = path.stat().st_mtime_ns // 1000 % 10**6  # so those of files that are written one after the other differ
    os.utime(path, (10**9 + seconds, 10**9 + seconds))


class Code:
    """A repository with a script, a module beside it, and a file that git ignores."""

    def __init__(self, folder: Path, start: Start) -> None:
        self.folder, self.root, self._start = folder, folder / "proj", start
        self.root.mkdir()
        (self.root / "train.py").write_text(TOLD)
        (self.root / ".gitignore").write_text("*.big\n*.out\n")
        (self.root / "d.big").write_text("big data")
        self.write("one")
        git(self.root, "init", "-q", ".")
        self.commit()

    def write(self, name: str, rest: str = "") -> None:
        (self.root / "part.py").write_text(f"NAME = {name!r}\n{rest}")
        age(self.root / "part.py")

    def commit(self) -> None:
        git(self.root, "add", "-A")
        git(self.root, "commit", "-qm", "more")

    def run(self, *flags: str, nodes: int = 2, zygote: bool = False) -> Job:
        return self._start(*flags, f"--nnodes={nodes}", script=TOLD, name="proj/train", zygote=zygote)

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def update(self, *words: str) -> subprocess.CompletedProcess[str]:
        return holdfast("update", "--run", "run", *words, folder=self.folder)


@pytest.fixture
def code(tmp_path: Path, start: Start) -> Code:
    return Code(tmp_path, start)


def fates(job: Job) -> dict[int, str]:
    try:
        told = ask_controller(job.run_dir, "/api/v1/releases")
    except (ControllerNotRunning, OSError):
        return {}
    return {one["release"]["number"]: one["fate"] for one in told["releases"]}


def test_now(code: Code) -> None:
    job = code.run()
    job.trains()
    agents = [job.agent(node) for node in ("n0", "n1")]
    first = code.notes()[0]
    assert first["file"] == str(code.root / "train.py"), "in place, as long as it is what was staged"
    assert (first["path"], first["cwd"]) == (str(code.root), str(code.folder))
    assert (first["data"], first["release"], first["name"]) == ("big data", "1", "one")
    nothing = code.update()
    assert nothing.returncode == 0 and "release 1" in nothing.stdout and fates(job) == {1: "running"}
    code.write("two")
    before = job.status()["step"]
    done = code.update(
        "--now", "--message", "a better one", "--env", "LR=2", "--", "train.py", str(code.folder), "more"
    )
    assert done.returncode == 0, done.stderr
    assert "1 file " in done.stdout and "release 1" in done.stdout
    assert fates(job) == {1: "replaced", 2: "running"}
    newest = code.notes()[-1]
    assert (newest["name"], newest["release"], newest["lr"], newest["argv"]) == ("two", "2", "2", ["more"])
    assert newest["file"] == first["file"] and newest["data"] == "big data"
    assert [job.agent(node) for node in ("n0", "n1")] == agents, "no agent was restarted"
    status = job.trains(generation=2)
    assert status["incidents"] == 0 and status["step"] >= before
    back = holdfast("rollback", "--run", "run", folder=code.folder)
    assert back.returncode == 0, back.stderr
    rolled = code.notes()[-1]
    assert (rolled["name"], rolled["data"]) == ("one", "big data")
    staged = Path(rolled["file"]).parent
    assert staged.parent == job.run_dir / "releases", "the user's tree is another by now"
    assert (rolled["path"], rolled["cwd"]) == (str(staged), str(code.folder))
    shown = holdfast("releases", "run", "--json", folder=code.folder)
    told = json.loads(shown.stdout)
    assert told["running"] == 1
    assert [one["fate"] for one in told["releases"]] == ["running", "rolled back"]
    assert told["releases"][1]["release"]["message"] == "a better one"
    again = code.update("--now", "--env", "LR=2", "--", "train.py", str(code.folder), "more")
    assert again.returncode == 2 and "release 2" in again.stderr
    job.finish()
    job.ends(0)
    job.check_replay()
    [change, _] = job.report().changes
    assert change.resumed_from is None or change.good_step - change.resumed_from <= 1, "no step is lost beyond one"
    told = json.loads(holdfast("releases", "run", "--json", folder=code.folder).stdout)
    assert [one["fate"] for one in told["releases"]] == ["ended", "rolled back"], "from the journal, too"
    page = PageFeed(RunSource(job.run_dir))
    page.refresh_view()
    lines = page.compare_release(2)["lines"]
    assert "part.py (changed)" in lines and any(line.startswith("+") and "two" in line for line in lines)
    assert any(line.startswith("variables of the environment") and line.endswith(": LR") for line in lines)


@pytest.mark.slow
def test_the_file_that_the_console_goes_to_is_no_part_of_a_release(code: Code) -> None:
    (code.root / "train.out").write_text("of an earlier run")
    git(code.root, "add", "-f", "train.out")  # even git was told of it
    git(code.root, "commit", "-qm", "a log")
    job = code.run()
    job.trains()
    assert "holdfast: " in (code.root / "train.out").read_text(), "the console goes there"
    nothing = code.update()
    assert (nothing.returncode, fates(job)) == (0, {1: "running"}), nothing.stdout
    code.write("two")
    done = code.update()
    assert "1 file " in done.stdout and "release 1" in done.stdout
    job.finish()
    job.ends(0)


def test_a_release_that_does_not_compile_stops_nobody(code: Code) -> None:
    job = code.run()
    job.trains()
    ranks = job.ranks(2)
    code.write("two", "if\n")
    done = code.update("--now")
    assert done.returncode == 1
    assert "release 2 " in done.stderr and ": part.py, line 2: " in done.stderr
    code.write("two", "import nobody_has_this\n")
    done = code.update("--now")
    assert done.returncode == 1
    assert re.search(r"part\.py, line 2: .*nobody_has_this", done.stderr)
    assert fates(job) == {1: "running", 2: "refused", 3: "refused"}
    assert job.status()["generation"] == 1 and job.ranks(2) == ranks
    job.finish()
    job.ends(0)
    job.check_replay()


@pytest.mark.slow
def test_a_lazy_one_rides_on_a_crash(code: Code) -> None:
    job = code.run()
    job.trains()
    code.write("two")
    code.commit()
    done = code.update("HEAD", "--window", "2h", "--message", "second")
    assert done.returncode == 0, done.stderr
    assert "2 h 00 min" in done.stdout and fates(job)[2] == "waiting"
    waits = code.update()
    assert waits.returncode == 0 and len(fates(job)) == 2
    code.write("three")
    assert code.update("--window", "2h", "--no-wait").returncode == 0
    job.until(lambda: fates(job) == {1: "running", 2: "merged", 3: "waiting"}, "release 3 takes its place")
    assert job.status()["generation"] == 1
    job.kill(job.rank(1))
    job.trains(generation=2)
    assert {note["name"] for note in code.notes()} == {"one", "three"}
    assert fates(job) == {1: "replaced", 2: "merged", 3: "running"}
    assert "release 3 " in job.status()["last_incident"]
    job.finish()
    job.ends(0)
    [incident] = job.report().incidents
    assert incident.brought_in == 3 and incident.sentence in job.text()
    job.check_replay()


@pytest.mark.slow
def test_at_the_end_of_its_window_it_gets_a_restart(code: Code) -> None:
    job = code.run(nodes=1)
    job.trains()
    code.write("two")
    done = code.update("--lazy", "--window", "1s")
    assert done.returncode == 0, done.stderr
    job.trains(generation=2)
    assert code.notes()[-1]["name"] == "two"
    job.finish()
    job.ends(0)
    assert job.report().incidents == () and len(job.report().changes) == 1


@pytest.mark.slow
def test_the_controller_is_killed_while_a_release_is_staged(code: Code) -> None:
    job = code.run()
    job.trains()
    ranks = job.ranks(2)
    code.write("two", "x = 1\n" * 20000)  # takes a while to be read
    updating = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "update", "--now", "--run", "run"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=code.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job.until(lambda: 2 in fates(job), "the order")
    job.kill(job.controller())
    said, _ = updating.communicate(timeout=120)
    assert updating.returncode == 0, said
    job.trains(generation=2)
    assert fates(job) == {1: "replaced", 2: "running"}, "it was brought once"
    assert ranks != job.ranks(2, generation=2) and code.notes()[-1]["name"] == "two"
    job.finish()
    job.ends(0)
    job.check_replay()


@pytest.mark.slow
def test_a_standby_has_what_it_may_have_to_run(code: Code) -> None:
    job = code.run("--standbys=1", nodes=1)
    job.trains()
    job.until(lambda: any(view["role"] == "ready" for view in job.status().get("nodes", ())), "a standby")
    code.write("two")
    assert code.update("--now").returncode == 0
    job.trains(generation=2)
    [active] = [view["node"] for view in job.status()["nodes"] if view["role"] == "active"]
    job.kill(job.holder(active))
    job.trains(generation=3)
    assert code.notes()[-1]["name"] == "two" and code.notes()[-1]["release"] == "2"
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_ranks_are_forked_from_the_zygote_that_is_there(code: Code) -> None:
    job = code.run(nodes=1, zygote=True)
    job.until(lambda: job.status().get("phase") == "training", "training", 120)
    code.write("two")
    assert code.update("--now").returncode == 0
    assert code.notes()[-1]["name"] == "two", "which had imported nothing of release 1"
    done = code.update("--now", "--env", "LR=3")
    assert done.returncode == 0, done.stderr
    assert (code.notes()[-1]["name"], code.notes()[-1]["lr"]) == ("two", "3")
    assert all(note["forked"] for note in code.notes())
    fresh = job.until(lambda: below(job.holder("n0"), "holdfast.client.boot.zygote"), "another zygote")
    assert "LR" not in psutil.Process(job.agent("n0")).environ()
    assert psutil.Process(fresh).environ()["LR"] == "3", "what is imported there sees it, too"
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_a_job_in_place_gets_a_release_later(code: Code) -> None:
    job = code.run("--no-release", nodes=1)
    job.trains()
    assert job.says("--no-release")
    assert code.notes()[0]["file"] == str(code.root / "train.py")
    code.write("two")
    done = code.update("--now")
    assert done.returncode == 0, done.stderr
    assert (code.notes()[-1]["name"], code.notes()[-1]["release"]) == ("two", "2")
    back = holdfast("rollback", "1", "--run", "run", folder=code.folder)
    assert back.returncode == 0, back.stderr
    assert code.notes()[-1]["file"] == str(code.root / "train.py")
    job.finish()
    job.ends(0)


BAD_WORDS = [
    (("update", "--window", "soon"), "--window soon: write a time such as 90s, 30m, 24h or 2d"),
    (("update", "--env", "LR"), "--env LR: write it as NAME=VALUE"),
    (("update", "nowhere"), "nowhere is neither a folder nor a commit of"),
    (("update", "--", "lost.py"), "has no lost.py, which the job runs; name another after --"),
    (("rollback",), "there is no release to go back to"),
    (("rollback", "7"), "there is no release 7; there are 1"),
    (("rollback", "1"), "release 1 is the one that runs"),
]


@pytest.mark.slow
def test_bad_words(code: Code) -> None:
    job = code.run(nodes=1)
    job.trains()
    for words, sentence in BAD_WORDS:
        done = holdfast(words[0], "--run", "run", *words[1:], folder=code.folder)
        assert done.returncode == 2, words
        assert sentence in done.stderr and done.stderr.count("\n") == 1
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("command", ["update", "rollback", "releases"])
def test_no_job(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    done = holdfast(command, folder=tmp_path)
    assert done.returncode == 2 and run_directory.NO_RUN in done.stderr
