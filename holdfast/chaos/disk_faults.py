"""Faults of disks and stored bytes: full, slow or read-only disks, flipped bits, storage that fails."""

import os
import time
from pathlib import Path

import msgspec

from holdfast.chaos import cgroups, faulty_storage, linux_namespaces, process_handles
from holdfast.chaos.injection_records import (
    CannotInject,
    FreeDisk,
    InjectedFault,
    PatchByte,
    RemountWritable,
    RewriteFile,
)
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.process_handles import ProcessHandle
from holdfast.checkpoint.arena import Arena

_BYTES_S = 64 << 10
_CHUNK_BYTES = 1 << 20
_WAIT_S = 30.0
_DELAY_S = 1.0
_FILL = ".holdfast-chaos-fill"


def fill_disk(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Fill a small file system that chaos made for the job, down to the last byte."""
    pid = scene.sight.controller_pid()
    path = "/dev/shm" if fault.kind == "shm.full" else fault.path or _find_disk(pid)
    if not linux_namespaces.has_own_mounts(pid) or not linux_namespaces.is_small_disk(pid, path):
        raise CannotInject(f"{path} {linux_namespaces.NOT_SMALL}; only a job that chaos starts has one")
    fill = f"{path}/{_FILL}"
    with ProcessHandle(pid) as held:
        scene.keep_undo(FreeDisk(*_find_front(pid), fill))
        linux_namespaces.run_inside(held.pid, lambda: _fill_file(fill))
    return InjectionReport(what=f"{path} is full", fault=msgspec.structs.replace(fault, path=path))


def make_disk_readonly(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    pid = scene.sight.controller_pid()
    path = fault.path or _find_disk(pid)
    scene.keep_undo(RemountWritable(*_find_front(pid), path))
    linux_namespaces.remount(pid, path, read_only=True)
    return InjectionReport(what=f"{path} is read-only", fault=msgspec.structs.replace(fault, path=path))


def slow_disk(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Limit the bandwidth of the agent's direct disk I/O, which bypasses the page cache as checkpoint writes do."""
    status = scene.read_status()
    node = scene.choose_node(fault, status).node
    rate = fault.bytes_s or _BYTES_S
    where = Path(fault.path) if fault.path else scene.sight.checkpoint_folder(status)
    with process_handles.open_confirmed(lambda: scene.sight.agent_pid(node)) as held:
        group = cgroups.make_cgroup("io", held.pid)
        scene.keep_undo(group.leave_undo())
        cgroups.limit_disk(group, where, rate)
        group.add_process(held.pid, held.started)
    filled = msgspec.structs.replace(fault, node=node, bytes_s=rate)
    what = f"the disk of {node} takes {rate} bytes a second"
    return InjectionReport(what=what, fault=filled, nodes=(node,), pids=(held.pid,))


def flip_checkpoint(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Flip one bit of a random part of the newest complete checkpoint, or of the file named in the fault."""
    path = scene.sight.job_file(fault.path, scene.read_status()) if fault.path else _newest_part(scene)
    size = path.stat().st_size
    if not size:
        raise CannotInject(f"{path} is empty")
    at, bit = scene.dice.randrange(size), scene.dice.randrange(8)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        then = os.pread(fd, 1, at)[0]
        now = then ^ 1 << bit
        scene.keep_undo(PatchByte(str(path), os.fstat(fd).st_ino, at, now, then))
        os.pwrite(fd, bytes([now]), at)
    finally:
        os.close(fd)
    what = f"bit {bit} of byte {at} of {path.parent.name}/{path.name} was flipped"
    return InjectionReport(what=what, fault=msgspec.structs.replace(fault, path=str(path)))


def fail_storage(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Make storage with a faulty:// URL fail, by writing the failure into its control file."""
    told = fault.text or "eio"
    if told not in ("eio", "enospc", "slow", "hang"):
        raise CannotInject(f"storage cannot be '{told}'; it can be eio, enospc, slow, hang")
    environ = Path(f"/proc/{scene.sight.controller_pid()}/environ").read_text(errors="replace").split("\0")
    control = next((e.partition("=")[2] for e in environ if e.startswith(f"{faulty_storage.CONTROL}=")), "")
    if not control:
        raise CannotInject("the job has no faulty:// storage; a job that chaos starts has it as {storage}")
    scene.keep_undo(RewriteFile(control, "ok"))
    part = Path(f"{control}.part")
    part.write_text(told)
    part.replace(control)
    return InjectionReport(what=f"storage is {told}", fault=msgspec.structs.replace(fault, text=told))


def flip_snapshot(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Flip one bit of a rank's newest sealed snapshot, in the shared memory that the holder keeps."""
    status = scene.read_status()
    rank = scene.choose_rank(fault, status)
    node = status.node_of(rank)
    path = _snapshot_memory(scene.sight.holder_pid(node), rank)
    arena = Arena.open(path)
    sealed = arena.list_sealed()
    if not sealed:
        raise CannotInject(f"rank {rank} has no whole snapshot at the moment")
    newest = max(sealed, key=lambda one: one.seq)
    image = arena.slot_image(newest.slot)
    at = arena.image_at(newest.slot) + scene.dice.randrange(len(image))
    bit = 1 << scene.dice.randrange(8)
    scene.keep_undo(PatchByte(path, os.stat(path).st_ino, at, arena.memory[at] ^ bit, arena.memory[at]))
    arena.memory[at] ^= bit
    what = f"a bit of the snapshot of step {newest.step} of rank {rank} on {node} was flipped"
    return InjectionReport(
        what=what, fault=msgspec.structs.replace(fault, rank=rank, node=node), ranks=(rank,), nodes=(node,)
    )


def _snapshot_memory(holder: int, rank: int) -> str:
    for path in Path(f"/proc/{holder}/fd").iterdir():
        try:
            if os.readlink(path).startswith(f"/memfd:holdfast-rank-{rank} "):
                return str(path)
        except FileNotFoundError:
            continue
    raise CannotInject(f"rank {rank} keeps no snapshots")


def _newest_part(scene: InjectionScene) -> Path:
    """Return a random part of the newest complete checkpoint; wait a while if none has been published yet."""
    folder = scene.sight.checkpoint_folder(scene.read_status())
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        whole = sorted(folder.glob("step-*/holdfast.json"), key=lambda one: one.stat().st_mtime)
        parts = sorted(whole[-1].parent.glob("*.distcp")) if whole else []
        if parts:
            return scene.dice.choice(parts)
        time.sleep(0.1)
    raise CannotInject(f"{folder} holds no whole checkpoint")


def _find_disk(pid: int) -> str:
    """Return the path of the small disk that chaos mounted for the job. A small /dev/shm does not count."""
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    ours = [fields[4] for fields in mounts if fields[-2] == linux_namespaces.SOURCE and fields[4] != "/dev/shm"]
    if not ours:
        raise CannotInject("the job has no small disk; only a job that chaos starts with disk_mib has one")
    return ours[0]


def _find_front(controller: int) -> tuple[int, int]:
    """Return pid and start time of the controller's parent, which lives longer and sees the same mounts."""
    front = int(process_handles.read_stat(controller)[1])
    return front, process_handles.start_ticks(front)


def _fill_file(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        size = _CHUNK_BYTES
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
