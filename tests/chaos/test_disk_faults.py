"""Files and storage are spoilt as told, and mended again."""

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.chaos import cgroups, disk_faults, faulty_storage, release_faults
from holdfast.chaos.injection_records import CannotInject, InjectedFault
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import JobObserver, ObservedNode, ObservedStatus
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.checkpoint.arena import Arena
from tests.chaos.target import target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


class Seen:
    """As much of a job as is looked at here."""

    def __init__(self, folder: Path, pid: int = 0) -> None:
        self._folder, self._pid = folder, pid
        nodes = (ObservedNode(node="n0", role="active", ranks="0"),)
        self.now = ObservedStatus(phase="training", generation=1, step=5, floor=1, nodes=nodes)

    def read_status(self) -> ObservedStatus:
        return self.now

    def controller_pid(self) -> int:
        return self._pid

    def holder_pid(self, node: str) -> int:
        return self._pid

    def agent_pid(self, node: str) -> int:
        return self._pid

    def checkpoint_folder(self, status: ObservedStatus) -> Path:
        return self._folder


@pytest.fixture
def guard() -> Iterator[UndoGuard]:
    with UndoGuard() as one:
        yield one


def scene(guard: UndoGuard, seen: Seen) -> InjectionScene:
    made = InjectionScene(cast(JobObserver, cast(Any, seen)), guard, random.Random(1))
    made.id = 1
    return made


def test_one_bit_of_the_newest_checkpoint(tmp_path: Path, guard: UndoGuard) -> None:
    before = {}
    for number in (10, 20):
        folder = tmp_path / f"step-{number:08d}"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(os.urandom(500))
        (folder / "holdfast.json").write_text("{}")
        os.utime(folder / "holdfast.json", (number, number))
        before[number] = (folder / "__0_0.distcp").read_bytes()
    struck = disk_faults.flip_checkpoint(scene(guard, Seen(tmp_path)), InjectedFault(kind="checkpoint.flip"))
    after = {number: (tmp_path / f"step-{number:08d}" / "__0_0.distcp").read_bytes() for number in before}
    bits = [bin(a ^ b).count("1") for a, b in zip(before[20], after[20], strict=True)]
    assert sum(bits) == 1 and after[10] == before[10] and "step-00000020" in struck.what
    assert guard.run_undo(1) == ""
    assert (tmp_path / "step-00000020" / "__0_0.distcp").read_bytes() == before[20]


def test_one_bit_of_a_snapshot(tmp_path: Path, guard: UndoGuard) -> None:
    code = "import os, time; fd = os.memfd_create('holdfast-rank-0'); print(fd, flush=True); time.sleep(600)"
    with target(code) as process:
        assert process.stdout
        path = f"/proc/{process.pid}/fd/{int(process.stdout.readline())}"
        with open(path, "r+b") as file:
            arena = Arena.make(file.fileno(), layout=b"l" * 32, image_bytes=4096, slots=2)
        slot = arena.begin_slot(7, 1)
        assert slot is not None
        slot.image[:] = bytes(4096)
        slot.seal()
        [sealed] = arena.list_sealed()
        arena.write_checksums(sealed.slot)
        struck = disk_faults.flip_snapshot(
            scene(guard, Seen(tmp_path, process.pid)), InjectedFault(kind="snapshot.flip", rank=0)
        )
        assert "step 7" in struck.what
        assert sum(bin(byte).count("1") for byte in arena.slot_image(sealed.slot)) == 1
        assert arena.verify(sealed.slot) != "", "a restore would see it"
        assert guard.run_undo(1) == ""
        assert sum(arena.slot_image(sealed.slot)) == 0


def test_storage_is_told_to_fail(tmp_path: Path, guard: UndoGuard) -> None:
    control = tmp_path / "control"
    control.write_text("ok")
    env = os.environ | {faulty_storage.CONTROL: str(control)}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
    try:
        environ = Path(f"/proc/{process.pid}/environ")
        until(lambda: faulty_storage.CONTROL in environ.read_text(errors="replace"), "its environment")
        seen = Seen(tmp_path, process.pid)
        disk_faults.fail_storage(scene(guard, seen), InjectedFault(kind="storage", text="enospc"))
        assert control.read_text() == "enospc"
        os.environ[faulty_storage.CONTROL] = str(control)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            faulty_storage.suffer_fault()
        assert guard.run_undo(1) == "" and control.read_text() == "ok"
        faulty_storage.suffer_fault()
        with pytest.raises(CannotInject, match="'angry'"):
            disk_faults.fail_storage(scene(guard, seen), InjectedFault(kind="storage", text="angry"))
    finally:
        os.environ.pop(faulty_storage.CONTROL, None)
        process.kill()
        process.wait()


# Writes past the page cache, as checkpoints are written, and counts its writes.
WRITING = """
import mmap, os, sys, time
block, count = mmap.mmap(-1, 1 << 16), mmap.mmap(os.open("count", os.O_RDWR), 8)
try:
    file = os.open("written", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.pwrite(file, block, 0)
except OSError as e:
    print(f"no file can be written past the page cache here: {e.strerror}", flush=True)
    sys.exit()
print("", flush=True)
for number in range(1, 1 << 60):
    os.pwrite(file, block, 0)
    count[:] = number.to_bytes(8, "little")
    time.sleep(0.005)
"""


def test_the_disk_of_a_node_is_slow_until_that_is_undone(tmp_path: Path, guard: UndoGuard) -> None:
    if why := cgroups.missing_reason("io"):
        pytest.skip(why)
    (tmp_path / "count").write_bytes(bytes(8))
    process = subprocess.Popen([sys.executable, "-c", WRITING], cwd=tmp_path, stdout=subprocess.PIPE)

    def count() -> int:
        return int.from_bytes((tmp_path / "count").read_bytes(), "little")

    try:
        assert process.stdout
        if why := process.stdout.readline().decode().strip():
            pytest.skip(why)
        until(lambda: count() > 10, "it writes")
        home = Path(f"/proc/{process.pid}/cgroup").read_text()
        slow = InjectedFault(kind="disk.slow", bytes_s=1 << 16)
        try:
            struck = disk_faults.slow_disk(scene(guard, Seen(tmp_path, process.pid)), slow)
        except CannotInject as e:
            pytest.skip(str(e))
        assert struck.pids == (process.pid,) and struck.nodes == ("n0",)
        assert Path(f"/proc/{process.pid}/cgroup").read_text() != home
        before = count()
        time.sleep(2)
        assert count() - before < 8, "one write takes a second"
        assert guard.run_undo(1) == ""
        assert Path(f"/proc/{process.pid}/cgroup").read_text() == home
        before = count()
        until(lambda: count() > before + 100, "a hundred writes take no hundred seconds any more")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", list(release_faults.SPOILT))
@pytest.mark.slow
def test_a_script_is_spoilt(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text('"""A script."""\nfrom __future__ import annotations\nprint("fine")\n')
    release_faults.spoil_script(script, how)
    told = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (told.returncode == 0) == (how == "late")
    wanted = {"syntax": "SyntaxError", "import": "no_such_module_of_chaos", "raise": "chaos: a bad release", "late": ""}
    assert wanted[how] in told.stderr
