"""`holdfast clean` after real runs and kill -9: what is dead goes, what is alive or worth keeping stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint import checkpoint_publication
from holdfast.checkpoint.manifest import Author
from holdfast.cli import main
from holdfast.cli.run_dirs import run_dir_creation, run_directory, run_liveness
from holdfast.cli.run_dirs.leftovers import Kept, RunLeftovers
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.config import Settings
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.memory_grant import format_bytes
from holdfast.fleet.local_process_fleet import node_processes
from holdfast.model.job_and_seats import Job as JobSpec
from holdfast.wire import folder_use_lock, run_and_node_specs
from holdfast.wire.rank_keeper_messages import ArenaRequest, CheckpointPolicy
from holdfast.wire.run_and_node_specs import EntryPoint, RunEnd, RunSpec
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, TRAIN, Job, gone, until
from tests.conftest import marked

Capture = pytest.CaptureFixture[str]
BRISK = ("--set", "node.lost_s=4", "--set", "silence.silence_s=3")
# Its first rank starts a process that wants to be nobody's.
LITTERS = TRAIN.replace(
    "step = int",
    """import subprocess
if rank == "0":
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(f"{folder}/left.new", "w") as file:
        file.write(str(left.pid))
    os.replace(f"{folder}/left.new", f"{folder}/left")
step = int""",
)


def clean(capfd: Capture, *words: str | Path, code: int = 0) -> list[RunLeftovers]:
    capfd.readouterr()
    assert main(["clean", "--json", *map(str, words)]) == code
    told = msgspec.json.decode(capfd.readouterr().out)
    return msgspec.convert(told["runs"], list[RunLeftovers])


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def ends_alone(job: Job, mark: str, but: int = 0) -> None:
    job.until(lambda: not marked(mark) - {but}, "the end of all processes")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_killed_with_all_its_holders(start: Start, no_orphans: str, capfd: Capture) -> None:
    job = start("--nnodes", "2", *BRISK, script=LITTERS)
    job.trains()
    litter = int(until(lambda: (job.folder / "left").exists() and (job.folder / "left").read_text(), "litter"))
    before = tree(job.run_dir)
    [found] = clean(capfd, job.run_dir, code=1)
    assert (found.state, found.left) == ("alive", ())

    for pid in (job.process.pid, job.controller(), job.store(), job.holder("n0"), job.holder("n1")):
        os.kill(pid, signal.SIGKILL)
    job.process.wait()
    job.until(lambda: alive(job) == [litter], "the end of all but the litter")

    [found] = clean(capfd, "--dry-run", job.run_dir)
    assert [one.name for one in found.left if one.kind == "process"] == [str(litter)]
    assert str(job.run_dir / "nodes" / "n1" / "holder.pid") in [one.name for one in found.left]
    assert {"the journal", "the command line and the environment"} <= {one.what for one in found.kept}
    assert tree(job.run_dir) >= before - {"journal.db-shm", "journal.db-wal"} and not gone(litter)

    [found] = clean(capfd, job.run_dir)
    assert (found.state, found.failed) == ("dead", ()) and found.bytes > 0
    assert gone(litter)
    left = tree(job.run_dir)
    assert {"journal.db", "run.json", "token", "env.json", "nodes/n0/agent.log", "logs/gen-1/rank-0/stdout.log"} <= left
    assert not {"store.sock", "controller.json", "nodes/n0/holder.pid", "nodes/n1/keeper.sock"} & left
    assert clean(capfd, job.run_dir)[0].left == ()

    job.start("--resume", str(job.run_dir))
    job.trains(generation=2)
    assert clean(capfd, job.run_dir, code=1)[0].state == "alive"
    job.finish()
    job.ends(0)
    assert clean(capfd, job.run_dir)[0].why == run_liveness.ending_text(job.run_dir)
    assert not {"token", "env.json"} & tree(job.run_dir)
    job.check_replay()


def alive(job: Job) -> list[int]:
    """Processes that were started by this run, on any node."""
    return [pid for node in (job.run_dir / "nodes").iterdir() for pid in node_processes(node)]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_whose_front_and_agents_are_killed_ends_by_itself(start: Start, no_orphans: str, capfd: Capture) -> None:
    job = start("--nnodes", "2", *BRISK)
    job.trains()
    holders = [job.holder("n0"), job.holder("n1")]
    for pid in (job.process.pid, job.agent("n0"), job.agent("n1")):
        os.kill(pid, signal.SIGKILL)
    job.process.wait()
    os.kill(job.controller(), signal.SIGKILL) if run_directory.find_controller(job.run_dir) else None
    assert clean(capfd, job.run_dir, code=1)[0].state == "alive", "its nodes wait for another controller"
    assert not any(gone(pid) for pid in holders)
    ends_alone(job, no_orphans)
    job.until(lambda: all(gone(pid) for pid in holders), "their locks")  # one that ends shows no environment any more
    [found] = clean(capfd, job.run_dir)
    assert found.state == "dead" and {one.kind for one in found.left} == {"file"}


# --- by hand ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made(run_id: str, *, fleet: str = "local", locked: bool = True) -> Path:
    run_dir = run_dir_creation.make_run_dir(None, run_id)
    job = JobSpec(run_id=run_id, min_nodes=1, max_nodes=1)
    run = RunSpec(job=job, entry=EntryPoint(argv=("x",)), settings=Settings(), fleet=fleet, nproc=1, log_dir="/l")
    run_dir_creation.publish_run(run_dir, run)
    if locked:
        for fd in folder_use_lock.lock_shared(run_dir):
            os.close(fd)
    return run_dir


@pytest.fixture
def tenant() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def occupied(folder: Path, tenants: list[subprocess.Popen[bytes]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with folder_use_lock.shared_lock(folder) as held:
        tenants.append(subprocess.Popen(["sleep", "60"], pass_fds=held))


def test_all_runs(home: Path, tenant: list[subprocess.Popen[bytes]], capfd: Capture) -> None:
    dead, living, noded, old = (made(name, locked=name != "d-old") for name in ("a-dead", "b-run", "c-node", "d-old"))
    occupied(living, tenant)
    occupied(noded / "nodes" / "n0", tenant)
    for run_dir in (dead, living, noded, old):
        (run_dir / "store.sock").touch()
    (dead / ".run.json.123").touch()
    found = clean(capfd, "--all")
    assert [one.state for one in found] == ["dead", "alive", "alive", "unknown"]
    assert [Path(one.name).name for one in found[0].left] == [".run.json.123", "store.sock"]
    assert "n0" in found[2].why
    assert [(run_dir / "store.sock").exists() for run_dir in (dead, living, noded, old)] == [False, True, True, True]
    assert main(["clean", str(old)]) == 1
    assert capfd.readouterr().out.startswith(f"{old} ")
    run_directory.mark_newest(living)
    assert main(["clean", "--dry-run"]) == 0, "nobody has named the run that is alive"


def test_what_is_removed_and_what_is_kept_is_told_with_sizes_and_reasons(home: Path, capfd: Capture) -> None:
    run_dir = made("r")
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=0, reason="all ranks ended well"))
    for name, text in (("store.sock", ""), ("nodes/n0/spec.json", "x" * 2048), ("nodes/n0/epoch", "1")):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(text)
    (run_dir / "journal.db").write_bytes(bytes(3072))
    (run_dir / "releases").mkdir()
    (run_dir / "releases" / "a.tar").write_bytes(bytes(1024))
    secret = sum((run_dir / name).stat().st_size for name in ("token", "env.json"))
    for dry, (did, stay) in ((True, ("would remove", "would keep")), (False, ("removed", "kept"))):
        assert main(["clean", *(["--dry-run"] if dry else []), "r"]) == 0
        assert capfd.readouterr().out.splitlines() == [
            f"{run_dir} has ended with code 0: all ranks ended well",
            f"  {did} 5 files, {format_bytes(2049 + secret)} in all:",
            f"    files: env.json, store.sock, token, {format_bytes(secret)}",
            "    nodes/n0/: epoch, spec.json, 2.0 KiB",
            f"  {stay} the journal, 3.0 KiB: holdfast report reads it",
            f"  {stay} the logs, 0 bytes: holdfast logs and holdfast diagnose read them",
            f"  {stay} copies of your code, 1.0 KiB: they are what the ranks ran",
        ]
    assert clean(capfd, "r")[0].left == ()


def test_nobody_moves_in_meanwhile(home: Path) -> None:
    run_dir = made("r")
    fd = folder_use_lock.lock_exclusively(run_dir)
    assert fd is not None
    with pytest.raises(UsageError, match="holdfast clean"):
        run_directory.lock_run_dir(run_dir)
    os.close(fd)


def test_secrets_of_a_run_that_cannot_be_resumed(home: Path, capfd: Capture) -> None:
    run_dir, node = made("r"), made("s", fleet="join")
    folders = ("door", "keys", "torchinductor_cache", "releases/compiled")
    for path in [place / name for place in (run_dir, node) for name in folders]:
        path.mkdir(parents=True)
        (path / "some").touch()
    [found] = clean(capfd, run_dir)
    assert set(folders) < {one.what for one in found.kept} and set(folders) < tree(run_dir), "--resume needs them"
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=93, reason="enough"))
    for place, why in ((run_dir, run_liveness.ending_text(run_dir)), (node, "was a node ")):
        [found] = clean(capfd, place)
        assert found.why.startswith(why)
        assert [one.what for one in found.kept] == ["the journal", "the logs"]
        assert not {"token", "env.json", *folders} & tree(place)


def test_states_on_disk_are_kept_and_named(home: Path, capfd: Capture) -> None:
    run_dir = made("r")
    run = run_directory.read_spec(run_dir)
    disk = DiskLimits(path=str(home / "disk"))
    kept = msgspec.structs.replace(run, settings=msgspec.structs.replace(run.settings, disk=disk))
    run_and_node_specs.write_json(run_dir / "run.json", kept)
    folder = Path(disk.run_folder(run.job.marked_id))
    state = folder / "rank-0" / "step-00000007" / "state"
    state.parent.mkdir(parents=True)
    state.write_bytes(bytes(1000))

    def kept_states(stored: int = 0) -> Kept:
        if stored:
            author, base = Author(1, run.job.marked_id), str(home / "ckpt")
            folder_there = checkpoint_publication.staging_folder(base, stored, author)
            part = checkpoint_publication.write_part(folder_there, 0, [memoryview(b"some")])
            checkpoint_publication.publish_checkpoint(base, stored, (part,), b"", author=author, layout="")
        [found] = clean(capfd, "--dry-run", run_dir)
        [one] = [one for one in found.kept if one.what.startswith("states")]
        assert (one.what, one.bytes) == (f"states on disk in {folder}", 1000) and state.exists()
        return one

    assert kept_states().why == "holdfast run --resume goes on from them"
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=93, reason="enough"))
    storage = CheckpointPolicy(url=str(home / "ckpt"), every_steps=1)
    want = ArenaRequest(rank=0, world=1, generation=1, layout="", image_bytes=1, slots=2, share=(), storage=storage)
    (run_dir / "nodes" / "n0").mkdir(parents=True, exist_ok=True)
    run_and_node_specs.write_json(run_dir / "nodes" / "n0" / "want-0.json", want)
    assert kept_states().why == kept_states(6).why == "no storage is known to have them"
    assert kept_states(8).why == "a node that was away at the end has left them; storage has step 8"
    state = folder / "rank-0" / ".step-00000009.tmp" / "state"
    (folder / "rank-0" / "step-00000007").rename(state.parent)
    assert kept_states().why == "no state in it is whole"


def test_a_rank_does_not_clean_its_own_run(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    run_dir = made("r")
    monkeypatch.setenv("HOLDFAST_MARK", str(run_dir / "nodes" / "n0"))
    assert clean(capfd, run_dir, code=1)[0].state == "alive"


WRITE = """
import sys
from holdfast.checkpoint import checkpoint_publication
from holdfast.checkpoint.manifest import Author
folder = checkpoint_publication.staging_folder(sys.argv[1], int(sys.argv[2]), Author(1, sys.argv[3]))
checkpoint_publication.write_part(folder, 0, [memoryview(bytes(9000))])
print(flush=True)
sys.stdin.read()
"""


def writer(base: Path, step: int, run: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", WRITE, str(base), str(step), run]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout and process.stdout.readline()
    return process


def test_unfinished_checkpoints(home: Path, tmp_path: Path, capfd: Capture) -> None:
    """Of this run and of a writer that was killed: gone. Of another run, or of a writer that lives: kept."""
    run_dir, base = made("r"), tmp_path / "ckpt"
    storage = CheckpointPolicy(url=str(base), every_steps=1)
    want = ArenaRequest(rank=0, world=1, generation=1, layout="", image_bytes=1, slots=2, share=(), storage=storage)
    (run_dir / "nodes" / "n0").mkdir(parents=True)
    run_and_node_specs.write_json(run_dir / "nodes" / "n0" / "want-0.json", want)
    killed, other, living = writer(base, 1, "r"), writer(base, 2, "elsewhere"), writer(base, 3, "r")
    for process in (killed, other):
        process.kill()
        process.communicate()
    author = Author(1, "r")
    part = checkpoint_publication.write_part(
        checkpoint_publication.staging_folder(str(base), 4, author), 0, [memoryview(bytes(9000))]
    )
    whole = checkpoint_publication.publish_checkpoint(str(base), 4, [part], b"", author=author)
    try:
        [found] = clean(capfd, run_dir, "--dry-run")
        [write] = [one for one in found.left if one.kind == "write"]
        assert write.name == checkpoint_publication.staging_folder(str(base), 1, author) and write.bytes > 9000
        assert (f"1 checkpoint in {base}", True) in [(one.what, one.bytes >= 9000) for one in found.kept]
        before = sorted(os.listdir(base))
        [found] = clean(capfd, run_dir)
        assert not found.failed
        assert set(before) - set(os.listdir(base)) == {Path(write.name).name}
        assert Path(whole).is_dir()
    finally:
        living.kill()
        living.communicate()


def test_storage_that_cannot_be_looked_at(home: Path, capfd: Capture) -> None:
    run_dir = made("r")
    storage = CheckpointPolicy(url="nowhere://at/all")
    want = ArenaRequest(rank=0, world=1, generation=1, layout="", image_bytes=1, slots=2, share=(), storage=storage)
    (run_dir / "nodes" / "n0").mkdir(parents=True)
    run_and_node_specs.write_json(run_dir / "nodes" / "n0" / "want-0.json", want)
    [found] = clean(capfd, run_dir, code=1)
    assert len(found.failed) == 1
    assert (run_dir / "nodes" / "n0" / "want-0.json").exists(), "without it nobody would look there again"


def test_bad_input(home: Path, tmp_path: Path, capfd: Capture) -> None:
    assert main(["clean", "--all"]) == 0
    assert capfd.readouterr().out == f"{run_directory.NO_RUN}\n"
    for words, sentence in (
        ((), run_directory.NO_RUN),
        ((str(tmp_path),), "run.json"),
        (("--all", "x"), "--all"),
    ):
        assert main(["clean", *words]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("holdfast clean: ") and sentence in err and err.count("\n") == 1
    run_dir = made("broken")
    (run_dir / "run.json").write_text("{")
    (run_dir / "store.sock").touch()
    assert main(["clean", str(run_dir)]) == 2
    assert str(run_dir / "run.json") in capfd.readouterr().err and (run_dir / "store.sock").exists()
