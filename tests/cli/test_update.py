"""Newer code in a job that runs, end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.api import NotRunning, ask
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, TRAIN, Job
from tests.wire.test_listing import git

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# Says which code it is at its start and in every step, in a file beside the step.
TOLD = TRAIN.replace(
    "import holdfast\n",
    """import holdfast, json
import part
note = dict(name=part.NAME, file=__file__, path=sys.path[0], cwd=os.getcwd(), release=os.environ["HOLDFAST_RELEASE"],
            argv=sys.argv[2:], lr=os.environ.get("LR"))
note["data"] = open(os.path.join(os.path.dirname(__file__), "d.big")).read()
with open(f"{sys.argv[1]}/notes", "a") as notes:
    notes.write(json.dumps(note) + "\\n")
""",
)


def holdfast(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "holdfast.cli", *words]
    return subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


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

    def commit(self) -> None:
        git(self.root, "add", "-A")
        git(self.root, "commit", "-qm", "more")

    def run(self, *flags: str, nodes: int = 2) -> Job:
        return self._start(*flags, f"--nnodes={nodes}", script=TOLD, name="proj/train")

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
        told = ask(job.run_dir, "/api/v1/releases")
    except (NotRunning, OSError):
        return {}
    return {one["release"]["number"]: one["fate"] for one in told["releases"]}


def test_now(code: Code) -> None:
    job = code.run()
    job.trains()
    agents = [job.agent(node) for node in ("n0", "n1")]
    first = code.notes()[0]
    staged = Path(first["file"]).parent
    assert staged.parent == job.run_dir / "releases", "from the first step on"
    assert (first["path"], first["cwd"]) == (str(staged), str(code.folder))
    assert (first["data"], first["release"], first["name"]) == ("big data", "1", "one")
    nothing = code.update()
    assert (nothing.returncode, nothing.stdout) == (0, "nothing has changed since release 1, which is running\n")
    code.write("two")
    before = job.status()["step"]
    done = code.update(
        "--now", "--message", "a better one", "--env", "LR=2", "--", "train.py", str(code.folder), "more"
    )
    assert done.returncode == 0, done.stderr
    assert "1 file changed, another command line, another environment since release 1" in done.stdout
    assert "release 2 runs" in done.stdout
    newest = code.notes()[-1]
    assert (newest["name"], newest["release"], newest["lr"], newest["argv"]) == ("two", "2", "2", ["more"])
    assert newest["file"] != first["file"] and newest["data"] == "big data"
    assert [job.agent(node) for node in ("n0", "n1")] == agents, "no agent was restarted"
    status = job.trains(generation=2)
    assert status["incidents"] == 0 and status["step"] >= before
    back = holdfast("rollback", "--run", "run", folder=code.folder)
    assert back.returncode == 0, back.stderr
    assert code.notes()[-1]["name"] == "one"
    shown = holdfast("releases", "run", "--json", folder=code.folder)
    told = json.loads(shown.stdout)
    assert told["running"] == 1
    assert [one["fate"] for one in told["releases"]] == ["running", "rolled back"]
    assert told["releases"][1]["release"]["message"] == "a better one"
    again = code.update("--now", "--env", "LR=2", "--", "train.py", str(code.folder), "more")
    assert again.returncode == 2 and "this is release 2 again, which was rolled back" in again.stderr
    job.finish()
    job.ends(0)
    job.check_replay()
    [change, _] = job.report().changes
    assert change.resumed_from is None or change.good_step - change.resumed_from <= 1, "no step is lost beyond one"
    assert "rolled back" in holdfast("releases", "run", folder=code.folder).stdout, "from the journal, too"
