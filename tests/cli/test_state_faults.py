"""State under attack: bytes flipped in memory and on storage; storage that fails, is full, hangs; two faults in one."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks._torture_scene import KEEP_NODES, SCRIPT, Scene, differing
from tests.cli.conftest import Start
from tests.cli.driver import ROOT, Job
from tests.cli.tortured import Storage, Tortured, published

pytestmark = pytest.mark.e2e

SMALL = "--width=64"
BESIDE = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'  # a disk of 8 MB, gone with the processes that see it


@pytest.mark.slow
def test_two_faults_at_once(start: Start, tmp_path: Path) -> None:
    """Two ranks of two nodes within milliseconds; then one more while the next generation is restoring."""
    tortured = Tortured(start, tmp_path, (2, 2), SMALL, "--stretch-s=0.01")
    scene = tortured.scene
    scene.trains(1)
    tortured.strike(1, 2)
    scene.trains(2)
    first = scene.strike(0)
    scene.until(lambda: scene.look(3).generation == 3, "rank 3 of generation 3")
    scene.await_phase(3, "restore", 1.0)
    came = tortured.strike(3)
    assert came.step >= first.sealed and scene.generation() == 4
    tortured.ends_exact()


@pytest.mark.parametrize("fault", ["eio", "enospc"])
@pytest.mark.slow
def test_storage_that_fails(start: Start, tmp_path: Path, fault: str) -> None:
    """Training goes on, snapshots too, a person is told, and checkpoints come again when they can."""
    storage = Storage(tmp_path)
    store = f"--store={storage.url}"
    tortured = Tortured(start, tmp_path, (1, 2), SMALL, store, "--pause-s=0.02", "--every=20", **storage.env)
    tortured.scene.until(storage.published, "a checkpoint")
    storage.be(fault)
    tortured.job.says("training goes on, snapshots stay in memory")
    _goes_on(tortured, storage)
    tortured.ends_exact()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_storage_that_hangs(start: Start, tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    store = f"--store={storage.url}"
    tortured = Tortured(start, tmp_path, (1, 2), SMALL, store, "--pause-s=0.02", "--every=20", **storage.env)
    tortured.scene.until(storage.published, "a checkpoint")
    storage.be("hang")
    tortured.job.says("still holds up the write of step")
    _goes_on(tortured, storage)
    tortured.ends_exact()


def _goes_on(tortured: Tortured, storage: Storage) -> None:
    scene, before = tortured.scene, storage.published()[-1]
    begun = scene.reached()
    scene.until(lambda: scene.reached() >= begun + 20, "steps")
    tortured.strike(1)
    assert storage.published()[-1] == before, "storage did not fail"
    storage.be("ok")
    scene.until(lambda: storage.published()[-1] > before, "a checkpoint after the trouble")


class OnSmallDisk(Job):
    """A job that sees a small disk of its own at a folder; nobody else does."""

    def __init__(self, folder: Path, disk: Path, *words: str, env: dict[str, str]) -> None:
        self._disk = disk
        super().__init__(folder, *words, env=env)

    def start(self, *words: str) -> None:
        command = [sys.executable, "-m", "holdfast.cli", "run", *words]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                ["unshare", "-rm", "sh", "-c", BESIDE, str(self._disk), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                env=self._env,
            )

    def inside(self) -> Path:
        """The disk, as seen from here."""
        return Path(f"/proc/{self.process.pid}/root{self._disk}")


def _can_unshare() -> bool:
    words = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(words, capture_output=True, check=False).returncode == 0


def _on_small_disk(tmp_path: Path, nodes: int) -> tuple[OnSmallDisk, Path]:
    """A job that writes checkpoints to a small disk, and the folder that it works in."""
    if not _can_unshare():
        pytest.skip("no namespaces of one's own here")
    disk, work = tmp_path / "disk", tmp_path / "work"
    for folder in (disk, work):
        folder.mkdir()
    shutil.copy(SCRIPT, tmp_path / "job.py")
    flags = ("--run-dir", str(tmp_path / "run"), "--nnodes", str(nodes), "--nproc-per-node", "1", *KEEP_NODES)
    script = ("job.py", str(work), SMALL, f"--store={disk}/store", "--pause-s=0.02", "--every=20")
    return OnSmallDisk(tmp_path, disk, *flags, *script, env={**os.environ, "PYTHONPATH": str(ROOT)}), work


@pytest.mark.slow
def test_a_full_disk_stops_no_copies(start: Start, tmp_path: Path) -> None:
    """Nor is anybody waited for at the end who cannot write."""
    job, work = _on_small_disk(tmp_path, nodes=2)
    try:
        scene = Scene(work, tmp_path / "run", 2, lambda: job.process.poll() is None)
        job.says("training: first step")
        scene.until(lambda: published(job.inside() / "store"), "a checkpoint")
        _fill(job.inside() / "ballast")
        job.says("No space left on device")
        for _ in range(5):
            begun = scene.reached()
            scene.until(lambda begun=begun: job.status()["floor"] >= begun, "a copy on a peer")  # type: ignore[misc]
            assert scene.reached() < begun + 100
        os.kill(job.process.pid, signal.SIGINT)
        job.says("before the job ends, for 30 s at most")
        began_at = time.monotonic()
        job.ends(130)
        assert time.monotonic() - began_at < 20
        assert re.search(rf"\bstep \d+ .*: {os.strerror(errno.ENOSPC)}", job.text())
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()


@pytest.mark.slow
def test_a_full_disk(start: Start, tmp_path: Path) -> None:
    """Nothing of the job stops, and once there is room again checkpoints are written again."""
    job, work = _on_small_disk(tmp_path, nodes=1)

    def store() -> list[int]:
        return published(job.inside() / "store")

    try:
        scene = Scene(work, tmp_path / "run", 1, lambda: job.process.poll() is None)
        scene.until(store, "a checkpoint")
        _fill(job.inside() / "ballast")
        job.says("No space left on device")
        before, struck = store(), scene.strike(0)
        came = scene.came(struck, time.monotonic())
        assert came.sources == ("memory",) and came.step >= struck.reached - 1
        (job.inside() / "ballast").unlink()
        scene.until(lambda: store()[-1] > before[-1], "a checkpoint after the trouble")
        (work / "finish").touch()
        job.ends(0)
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass  # full


@pytest.mark.slow
def test_a_byte_flipped_in_memory(start: Start, tmp_path: Path) -> None:
    """It is seen before anybody trusts it, told in a line, and an older state is used."""
    tortured = Tortured(start, tmp_path, (2, 1), SMALL, "--pause-s=0.05")
    scene = tortured.scene
    scene.trains(1, steps=5)
    pid = scene.look(1).pid
    os.kill(pid, signal.SIGSTOP)  # so that the snapshot to be spoilt stays the newest
    try:
        arena = scene.arena(1)
        newest = arena.list_sealed()[0]
        scene.until(lambda: arena.read_checksums(newest.slot), "its checksum")
        arena.slot_image(newest.slot)[arena.image_bytes // 2] ^= 0x10
    finally:
        struck = scene.strike(1)
    assert struck.looks[1].pid == pid
    tortured.job.says("damaged")
    scene.trains(struck.generation + 1, steps=3)
    start_line = next(line for line in reversed(scene.lines(1)) if "from" in line)
    assert int(str(start_line["from"])) < newest.step or start_line["source"] == "peer"
    tortured.ends_exact()


@pytest.mark.slow
def test_a_byte_flipped_on_storage(start: Start, tmp_path: Path) -> None:
    """The checkpoint is left out in a line, the next older one is used, and its steps are made again exactly."""
    store = tmp_path / "store"
    words = (SMALL, f"--store={store}", "--every=10", "--pause-s=0.02")
    tortured = Tortured(start, tmp_path, (1, 2), *words)
    tortured.scene.until(lambda: len(published(store)) >= 2, "two checkpoints")
    tortured.job.finish()
    tortured.job.ends(0)
    before = {rank: list(tortured.scene.lines(rank)) for rank in tortured.scene.ranks}
    older, newest = published(store)[-2:]
    part = next(store.glob(f"step-{newest:08d}*/__1_0.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0x10
    part.write_bytes(content)
    for name in ("finish", "trace-0.jsonl", "trace-1.jsonl"):
        (tmp_path / name).unlink()
    (tmp_path / "run").rename(tmp_path / "run-before")
    again = Tortured(start, tmp_path, (1, 2), *words, f"--steps={newest}")
    again.job.ends(0)
    assert re.search(rf"step-{newest:08d}.*__1_0\.distcp: block", again.job.text())
    for rank in again.scene.ranks:
        lines = again.scene.lines(rank)
        assert (lines[0]["from"], lines[0]["source"]) == (older, "storage")
        assert differing(lines, before[rank]) == []
