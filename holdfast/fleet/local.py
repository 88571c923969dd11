"""Nodes as process trees on this host: a holder each, and everything below it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from holdfast.wire import spec
from holdfast.wire.spec import NodeSpec

MARK = "HOLDFAST_MARK"  # in the environment of everything a node starts, so that nothing of it can hide


def start_node(node_dir: Path, node: NodeSpec, env: dict[str, str]) -> int:
    """Start a holder that outlives us; its pid."""
    node_dir.mkdir(parents=True, exist_ok=True)
    spec.write(node_dir / "spec.json", node)
    log = os.open(node_dir / "holder.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.agent.holder", str(node_dir)],
            env=env | {MARK: f"{node.run_id}/{node.node}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    _reaped.append(process)
    return process.pid


_reaped: list[subprocess.Popen[bytes]] = []  # holders we started; polled so that none stays a zombie


class LocalFleet:
    can_acquire = True

    def __init__(self, run_dir: Path, template: NodeSpec, env: dict[str, str]) -> None:
        self.template = template
        self._dir = run_dir / "nodes"
        self._dir.mkdir(parents=True, exist_ok=True)
        self._env = env
        self._released: set[str] = set()

    def nodes(self) -> tuple[str, ...]:
        names = [path.name for path in self._dir.iterdir() if not (path / "released").exists()]
        return tuple(sorted(names, key=lambda n: int(n[1:])))

    async def acquire(self, count: int) -> tuple[str, ...]:
        taken = [int(path.name[1:]) for path in self._dir.iterdir()]
        first = max(taken, default=-1) + 1
        names = []
        for order in range(first, first + count):
            name = f"n{order}"
            node = msgspec.structs.replace(self.template, node=name, order=order)
            start_node(self._dir / name, node, self._env)
            names.append(name)
        return tuple(names)

    async def release(self, node: str, reason: str) -> None:
        folder = self._dir / node
        if not folder.is_dir():
            return
        (folder / "released").write_text(f"{reason}\n")
        mark = f"{self.template.run_id}/{node}"
        await asyncio.to_thread(end_node, folder, mark)


def end_node(folder: Path, mark: str, grace_s: float = 5.0) -> None:
    """End a holder, and whatever carries its mark should it have died before its children."""
    pid = _pid(folder / "holder.pid")
    if pid and _marked(pid, mark):
        _kill(pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while _marked(pid, mark) and time.monotonic() < until:
            _poll()
            time.sleep(0.01)
    _poll()
    while left := [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _marked(p, mark)]:
        for pid in left:
            _kill(pid, signal.SIGKILL)
        _poll()
        time.sleep(0.01)
    (folder / "holder.pid").unlink(missing_ok=True)


def _poll() -> None:
    _reaped[:] = [process for process in _reaped if process.poll() is None]


def _pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _marked(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environ.split(b"\0")


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
