"""Runs and checkpoints of an older version: commit 87bdb1e, journal format 1.

The archive holds two run directories of `train.py` on two ranks, made by that commit. Rank 1 was killed by SIGKILL
after step 12 in both. The first run ended after step 20. Of the second one all processes were killed after step 17.
With each is its newest checkpoint, and the paths of the machine are replaced by `/old-run`.
"""

import contextlib
import hashlib
import json
import signal
import socket
import sqlite3
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import holdfast
from holdfast.cli.commands import ckpt_command, logs_command, releases_command, report_command, status_command
from holdfast.cli.page.page_sources import RunSource
from holdfast.cli.run_dirs import run_liveness
from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.dash.page_feed import PageFeed
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.job_phase import Phase
from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import Job
from tests.conftest import job_environment, kill_marked

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).parent / "old" / "run-87bdb1e.tar.xz"
WEIGHTS = "554b511f8402e5c397d2e731a37ee52c9a048fd82991c237557c9fd99546a0b2"  # as the old run printed them at its end
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with both runs, as if they had been made on this host in this folder."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in (*tmp_path.rglob("*.json"), *tmp_path.rglob("lock")):
        path.write_text(socket.gethostname() if path.name == "lock" else moved(path.read_text(), tmp_path))
    for path in tmp_path.glob("*/journal.db"):
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.create_function("moved", 1, lambda text: moved(text.decode(), tmp_path).encode())
            db.execute("update entry set event = moved(event), decision = moved(decision)")
    return tmp_path


def moved(text: str, folder: Path) -> str:
    here = text.replace("/old-run/venv/bin/python", sys.executable).replace("/old-run/src", str(ROOT))
    return here.replace("/old-run", str(folder))


def test_its_report(old: Path) -> None:
    found = report_command.load_report(old / "ended")
    assert (found.phase, found.code, found.step, found.generation) == ("done", 0, 20, 2)
    [incident] = found.incidents
    assert (incident.kind, incident.ranks, incident.suspects) == ("crash", (1,), ("n1",))
    assert (incident.good_step, incident.resumed_from, incident.verdict.remedy) == (12, 12, "restart")
    assert sum(span.seconds for span in found.spans) == pytest.approx(found.wall_s)
    going_on = report_command.load_report(old / "killed")
    assert (going_on.phase, going_on.code, going_on.generation, len(going_on.incidents)) == ("training", None, 2, 1)


def test_what_status_says_of_it(old: Path, capsys: Capture) -> None:
    assert status_command.main([str(old / "ended")]) == status_command.main([str(old / "killed")]) == 1
    said = capsys.readouterr().err.splitlines()
    for name, line in zip(("ended", "killed"), said, strict=True):
        assert f"{old}/{name} {run_liveness.ending_text(old / name)}; " in line
    assert f"--resume {old}/killed" in said[1] and run_liveness.find_live_nodes(old / "killed") == []


def test_its_releases(old: Path, capsys: Capture) -> None:
    assert (
        releases_command.main([str(old / "ended"), "--json"])
        == releases_command.main([str(old / "killed"), "--json"])
        == 0
    )
    found = zip(capsys.readouterr().out.splitlines(), ("ended", "left"), (20, 13), strict=True)
    for line, fate, steps in found:
        [one] = json.loads(line)["releases"]
        assert (one["release"]["number"], one["fate"], one["steps"]) == (1, fate, steps)
        assert one["release"]["source"] == str(old / "code")


def test_the_story_of_its_incident_has_what_was_printed_before_it(old: Path) -> None:
    page = PageFeed(RunSource(old / "ended"))
    page.refresh_view()
    killed, first = page.tell_story(1)["logs"]
    assert killed["rank"] == 1 and "lines" not in killed and killed["absence"].startswith("rank 1 ")
    assert first == {"rank": 0, "lines": [f"out  step {step}" for step in range(1, 13)]}, "which prints for both"
    (old / "ended/logs/gen-1/rank-1/stderr.log").write_text("\x1b[31mdied\n")
    assert page.tell_story(1)["logs"] == [{"rank": 1, "lines": ["err  died"]}]


def test_its_logs(old: Path, capfd: Capture) -> None:
    assert logs_command.main(["logs", str(old / "ended")]) == 0
    assert f"[rank 0] step 20\n[rank 0] weights {WEIGHTS}\n" in capfd.readouterr().out
    assert (
        logs_command.main(["logs", str(old / "ended"), "--generation", "1", "--rank", "0", "--stream", "stdout"]) == 0
    )
    assert capfd.readouterr().out.splitlines() == [f"[rank 0] step {step}" for step in range(1, 13)]


@pytest.mark.parametrize(
    ("run", "entries", "phase"), [("ended", 16, Phase.DONE), ("killed", 12, Phase.TRAINING)], ids=("ended", "killed")
)
def test_its_journal_is_replayed(old: Path, run: str, entries: int, phase: Phase) -> None:
    decider = Decider()
    with contextlib.closing(SqliteJournal(old / run / "journal.db", read_only=True)) as journal:
        assert len(list(rebuild_decider(journal, decider))) == entries
    assert (decider.view.phase, decider.view.generation) == (phase, 2)


def test_its_checkpoints_are_listed_and_sound(old: Path, capsys: Capture) -> None:
    for folder, step in (("ckpt", 20), ("ckpt-killed", 15)):
        assert ckpt_command.main(["ls", str(old / folder), "--json"]) == 0
        assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [step]
        assert ckpt_command.main(["verify", str(old / folder)]) == 0
        assert capsys.readouterr().out == f"{old / folder}/step-{step:08d}: sound\n"


def test_its_checkpoint_is_restored_bit_for_bit(old: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.closing(holdfast.Checkpointer(model=model, optimizer=optimizer, path=old / "ckpt")) as restored:
        assert restored.restore() == 20
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    assert hashlib.sha256(weights).hexdigest() == WEIGHTS
    truth = read_by_torch(old / "ckpt" / "step-00000020")
    assert optimizer.param_groups[0]["lr"] == 0.01
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter]
        assert kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, truth[f"optimizer.state.{name}.{key}"]) for key, value in kept.items())


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, as torch's own reader finds them."""
    known = torch_dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.empty(kept.size) for name, kept in known.items() if isinstance(kept, TensorStorageMetadata)}
    del found["holdfast.extra"]
    with pytest.warns(UserWarning, match="load in a single process"):
        torch_dcp.load(found, storage_reader=torch_dcp.FileSystemReader(folder), no_dist=True)
    return found


@pytest.fixture
def resumed(old: Path, warm_server: Path, no_orphans: str) -> Iterator[Job]:
    path = old / "killed" / "run.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"port": port}))
    with contextlib.closing(sqlite3.connect(path.with_name("journal.db"))) as db, db:
        # Nobody checks its new nodes: that is four seconds of processors for each, and as in any other run.
        db.execute("""update entry set event = cast(replace(event, '"checks":true', '"checks":false') as blob)""")
    env = make_rank_environment(job_environment()) | {program_fork_server.NAMED: str(warm_server)}
    # Its processes are forked, and do not import torch seven times, with an environment that is today's.
    kept = path.with_name("env.json")
    assert isinstance(json.loads(kept.read_text()).get("PATH"), str)
    kept.write_text(json.dumps(env))
    job = Job(old, "--resume", str(path.parent), env=env)
    job.run_dir = path.parent
    yield job
    if job.process.poll() is None:
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
        kill_marked(no_orphans)


@pytest.mark.e2e
def test_it_is_gone_on_with(resumed: Job) -> None:
    resumed.ends(0, patience_s=120.0)
    lines = [line for line in resumed.text().splitlines() if line.startswith("[rank 0] step ")]
    assert lines == [f"[rank 0] step {step}" for step in range(16, 25)]
    found = resumed.report()
    assert (found.phase, found.code, found.step) == ("done", 0, 24)
    resumed.check_replay()
