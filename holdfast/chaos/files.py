"""Faults of disks and of what lies on them: full, slow, read-only, a byte that is another, storage that fails."""

import os
import time
from pathlib import Path

import msgspec

from holdfast.chaos import cgroups, faulty, hold, spaces
from holdfast.chaos.fault import Cannot, Fault, Freed, Patch, Writable, Write
from holdfast.chaos.hold import Held
from holdfast.chaos.scene import Scene, Struck
from holdfast.checkpoint.arena import Arena

_BYTES_S = 64 << 10
_CHUNK_BYTES = 1 << 20
_WAIT_S = 30.0
_DELAY_S = 1.0
_FILL = ".holdfast-chaos-fill"


def disk_full(scene: Scene, fault: Fault) -> Struck:
    """The last byte of a file system that we made for the job."""
    pid = scene.sight.controller()
    path = "/dev/shm" if fault.kind == "shm.full" else fault.path or _disk(pid)
    if not spaces.is_apart(pid) or not spaces.is_ours(pid, path):
        raise Cannot(f"{path} is no small file system that chaos has made; only a job of its own has one")
    fill = f"{path}/{_FILL}"
    with Held(pid) as held:
        scene.keep(Freed(*_anchor(pid), fill))
        spaces.inside(held.pid, lambda: _fill(fill))
    return Struck(what=f"{path} is full", fault=msgspec.structs.replace(fault, path=path))


def disk_readonly(scene: Scene, fault: Fault) -> Struck:
    pid = scene.sight.controller()
    path = fault.path or _disk(pid)
    scene.keep(Writable(*_anchor(pid), path))
    spaces.remount(pid, path, read_only=True)
    return Struck(what=f"{path} is read-only", fault=msgspec.structs.replace(fault, path=path))


def disk_slow(scene: Scene, fault: Fault) -> Struck:
    """What the agent of a node reads and writes past the page cache, which is how checkpoints are written."""
    status = scene.status()
    node = scene.node(fault, status).node
    rate = fault.bytes_s or _BYTES_S
    where = Path(fault.path) if fault.path else scene.sight.checkpoints(status)
    with hold.sure(lambda: scene.sight.agent(node)) as held:
        group = cgroups.make("io", held.pid)
        scene.keep(group.leave())
        cgroups.slow_disk(group, where, rate)
        group.join(held.pid, held.started)
    filled = msgspec.structs.replace(fault, node=node, bytes_s=rate)
    what = f"the disk of {node} takes {rate} bytes a second"
    return Struck(what=what, fault=filled, nodes=(node,), pids=(held.pid,))


def checkpoint_flip(scene: Scene, fault: Fault) -> Struck:
    """One bit of the newest whole checkpoint, or of the file of the job that was named."""
    path = scene.sight.owned(fault.path, scene.status()) if fault.path else _newest(scene)
    size = path.stat().st_size
    if not size:
        raise Cannot(f"{path} is empty")
    at, bit = scene.dice.randrange(size), scene.dice.randrange(8)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        then = os.pread(fd, 1, at)[0]
        now = then ^ 1 << bit
        scene.keep(Patch(str(path), os.fstat(fd).st_ino, at, now, then))
        os.pwrite(fd, bytes([now]), at)
    finally:
        os.close(fd)
    what = f"bit {bit} of byte {at} of {path.parent.name}/{path.name} was flipped"
    return Struck(what=what, fault=msgspec.structs.replace(fault, path=str(path)))


def storage_fails(scene: Scene, fault: Fault) -> Struck:
    """Storage of the kind faulty:// says what its control file tells it to."""
    told = fault.text or "eio"
    if told not in ("eio", "enospc", "slow", "hang"):
        raise Cannot(f"storage cannot be '{told}'; it can be eio, enospc, slow, hang")
    environ = Path(f"/proc/{scene.sight.controller()}/environ").read_text(errors="replace").split("\0")
    control = next((e.partition("=")[2] for e in environ if e.startswith(f"{faulty.CONTROL}=")), "")
    if not control:
        raise Cannot("the job has no storage of the kind faulty://; a job that chaos made has it as {storage}")
    scene.keep(Write(control, "ok"))
    part = Path(f"{control}.part")
    part.write_text(told)
    part.replace(control)
    return Struck(what=f"storage is {told}", fault=msgspec.structs.replace(fault, text=told))


def snapshot_flip(scene: Scene, fault: Fault) -> Struck:
    """One bit in the image of a rank's snapshots, in memory that its holder keeps."""
    status = scene.status()
    rank = scene.rank(fault, status)
    node = status.node_of(rank)
    path = _memory(scene.sight.holder(node), rank)
    arena = Arena.open(path)
    sealed = arena.sealed()
    if not sealed:
        raise Cannot(f"rank {rank} has no whole snapshot at the moment")
    newest = max(sealed, key=lambda one: one.seq)
    image = arena.image(newest.slot)
    at = arena.image_at(newest.slot) + scene.dice.randrange(len(image))
    bit = 1 << scene.dice.randrange(8)
    scene.keep(Patch(path, os.stat(path).st_ino, at, arena.memory[at] ^ bit, arena.memory[at]))
    arena.memory[at] ^= bit
    what = f"a bit of the snapshot of step {newest.step} of rank {rank} on {node} was flipped"
    return Struck(what=what, fault=msgspec.structs.replace(fault, rank=rank, node=node), ranks=(rank,), nodes=(node,))


def _memory(holder: int, rank: int) -> str:
    for path in Path(f"/proc/{holder}/fd").iterdir():
        try:
            if os.readlink(path).startswith(f"/memfd:holdfast-rank-{rank} "):
                return str(path)
        except FileNotFoundError:
            continue
    raise Cannot(f"rank {rank} keeps no snapshots")


def _newest(scene: Scene) -> Path:
    """A part of the newest checkpoint; one may be about to be published."""
    folder = scene.sight.checkpoints(scene.status())
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        whole = sorted(folder.glob("step-*/holdfast.json"), key=lambda one: one.stat().st_mtime)
        parts = sorted(whole[-1].parent.glob("*.distcp")) if whole else []
        if parts:
            return scene.dice.choice(parts)
        time.sleep(0.1)
    raise Cannot(f"{folder} holds no whole checkpoint")


def _disk(pid: int) -> str:
    """Of all that is mounted for a job, what we mounted, but for /dev/shm."""
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    ours = [fields[4] for fields in mounts if fields[-2] == spaces.SOURCE and fields[4] != "/dev/shm"]
    if not ours:
        raise Cannot("the job has no small disk; only a job that chaos made (disk_mib) has one")
    return ours[0]


def _anchor(controller: int) -> tuple[int, int]:
    """Somebody in the same namespace who outlives controllers: the front."""
    front = int(hold.stat(controller)[1])
    return front, hold.started(front)


def _fill(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        size = _CHUNK_BYTES
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
