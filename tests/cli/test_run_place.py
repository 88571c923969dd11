"""Where code, configuration and the work of a job come from: the user's own tree while it is what was staged."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.wire.releases import tree_archive
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_update_command import age, holdfast
from tests.conftest import ROOT
from tests.wire.test_tree_archive import plant

pytestmark = pytest.mark.e2e

# Keeps its state beside itself, as many scripts do; makes one more file in every generation, and one in a folder.
BESIDE = """
import json, os, sys, time
from pathlib import Path
import holdfast
import part
here, out = Path(__file__).parent, sys.argv[1]
kept = here / "checkpoints"
kept.mkdir(exist_ok=True)
step = int((kept / "step.pt").read_text()) if (kept / "latest").exists() else 0
generation = os.environ["HOLDFAST_GENERATION"]
(here / f"made-{generation}").write_text("x")
(here / "more").mkdir(exist_ok=True)
(here / "more" / generation).write_text("x")
note = dict(name=part.NAME, config=(here / "config.yaml").read_text(), file=__file__, begun=step, argv=sys.argv[0])
with open(f"{out}/notes", "a") as notes:
    notes.write(json.dumps(note) + "\\n")
while not os.path.exists(f"{out}/finish"):
    time.sleep(0.02)
    step += 1
    (kept / "new").write_text(str(step))
    os.replace(kept / "new", kept / "step.pt")
    (kept / "latest").write_text(str(step))
    holdfast.step(step)
"""


def write(root: Path, name: str) -> None:
    plant(root, {"part.py": f"NAME = {name!r}\n", "config.yaml": name})
    age(root / "part.py")


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def archived(job: Job, number: int) -> set[str]:
    told = json.loads(holdfast("releases", str(job.run_dir), "--json", folder=job.folder).stdout)
    digest = next(one["release"]["digest"] for one in told["releases"] if one["release"]["number"] == number)
    return {*tree_archive.archive_contents(job.run_dir / "releases" / f"{digest}.tar")}


@pytest.mark.slow
def test_an_edit_a_crash_an_update_and_a_rollback(tmp_path: Path, start: Start) -> None:
    root, code = tmp_path / "proj", {"train.py", "part.py", "config.yaml"}
    write(root, "one")
    job = start(script=BESIDE, name="proj/train")
    job.trains()
    assert notes(tmp_path)[0] == {
        "name": "one", "config": "one", "file": f"{root}/train.py", "begun": 0, "argv": "proj/train.py"
    }  # fmt: skip
    assert (root / "checkpoints" / "step.pt").exists() and (root / "made-1").exists(), "where the user looks for it"

    write(root, "two")
    job.kill(job.rank(0))
    job.trains(generation=2)
    crashed = notes(tmp_path)[-1]
    assert (crashed["name"], crashed["config"]) == ("one", "one"), "a restart brings no edit by accident"
    assert crashed["begun"] > 0, "and loses no work"
    assert "holdfast update" in job.says("edited after release 1 ")
    job.until(lambda: (root / "made-2").exists(), "work in the copy, brought home while ranks run")
    assert job.says(f"{root}: made-2")

    done = holdfast("update", "--now", "--run", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 files changed" in done.stdout
    updated = notes(tmp_path)[-1]
    assert (updated["name"], updated["config"], updated["file"]) == ("two", "two", f"{root}/train.py")
    assert updated["begun"] >= crashed["begun"]
    assert (root / "made-2").read_text() == "x" and not (root / "made-2").is_symlink()
    assert (root / "more" / "2").read_text() == "x"
    assert archived(job, 1) == code and archived(job, 2) == code, "work is no part of a release"
    assert ": checkpoints/latest, made-1" in done.stdout

    back = holdfast("rollback", "--run", "run", folder=tmp_path)
    assert back.returncode == 0, back.stderr
    rolled = notes(tmp_path)[-1]
    assert (rolled["name"], rolled["config"]) == ("one", "one")
    assert rolled["begun"] >= updated["begun"]
    job.finish()
    job.ends(0)
    assert (root / "made-4").read_text() == "x" and not (root / "made-4").is_symlink(), "at the end, too"
    reached = int((root / "checkpoints" / "step.pt").read_text())

    again = start("--run-dir", str(tmp_path / "again"), script=BESIDE, name="proj/train")
    again.ends(0)
    assert notes(tmp_path)[-1]["begun"] == reached, "the next run goes on from what lies beside the script"
    assert notes(tmp_path)[-1]["name"] == "two"


FROM_SRC = """
import torch, ours, os, sys, time
import holdfast
print(ours.NAME, os.environ["PYTHONPATH"], os.environ.get("LR"))
step = 0
while not os.path.exists(f"{sys.argv[1]}/finish"):
    time.sleep(0.02)
    step += 1
    holdfast.step(step)
"""


@pytest.mark.slow
def test_folders_of_pythonpath_are_meant_from_where_the_command_was_typed(tmp_path: Path, start: Start) -> None:
    """Our own processes are elsewhere, and import what ranks are forked with."""
    plant(tmp_path, {"src/ours.py": "NAME = 'from src'\n"})
    job = start(script=FROM_SRC, PYTHONPATH=f"src:{ROOT}", OWN_SERVER="1")
    job.trains()
    done = holdfast("update", "--now", "--env", "LR=2", "--run", "run", folder=tmp_path)
    assert done.returncode == 0, f"a zygote that is executed: {done.stdout}{done.stderr}"
    job.finish()
    job.ends(0)
    assert f"[rank 0] from src {tmp_path}/src:{ROOT} 2" in job.text().splitlines()


SHADOWED = """
import holdfast, msgspec, aiohttp, json
print(msgspec.NAME, aiohttp.NAME, json.NAME)
holdfast.step(1)
"""


@pytest.mark.slow
def test_files_with_the_names_of_modules_that_we_need(tmp_path: Path, start: Start) -> None:
    for name in ("msgspec", "aiohttp", "json"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'my_{name}'")
    job = start(script=SHADOWED, zygote=True, OWN_SERVER="1")
    job.ends(0, 120)
    assert "[rank 0] my_msgspec my_aiohttp my_json" in job.text().splitlines()
    assert "Traceback" not in job.text() + (job.run_dir / "fork.log").read_text()
    assert "Traceback" not in (job.run_dir / "nodes" / "n0" / "zygote.log").read_text()
