"""Fleets at a place, for tests."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.fleet import local_process_fleet
from holdfast.fleet.local_process_fleet import LocalFleet, node_processes
from holdfast.fleet.self_joining_fleet import JoinFleet
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec
from tests.cli.driver import gone, until
from tests.conftest import job_environment

_SERVER = "fork.sock"
_FREEZER = Path("/sys/fs/cgroup/freezer")

# Nobody listens at port 1: agents dial in vain, and go on trying.
TEMPLATE = NodeSpec(
    node="",
    order=0,
    nproc=1,
    url="http://127.0.0.1:1",
    log_dir="",
    entry=EntryPoint(argv=("true",), zygote=False),
    settings=Settings(),
    run_id="r",
)


def local(place: Path) -> LocalFleet:
    """Its nodes are forked by the server that a link in the place leads to, or executed."""
    return LocalFleet(place, TEMPLATE, make_rank_environment(job_environment()), place / _SERVER)


def share_server(place: Path, server: Path) -> None:
    (place / _SERVER).symlink_to(server)


def local_alive(place: Path, node: str) -> bool:
    return holder(place, node) > 0


def lose_local(place: Path, node: str) -> None:
    """Kill all processes of a node, as the loss of its machine does."""
    for pid in node_processes(place / "nodes" / node):
        os.kill(pid, signal.SIGKILL)


class Cut(BaseException):
    """The controller ends here."""


def join(place: Path) -> JoinFleet:
    return JoinFleet()


def cut_local(place: Path, patch: pytest.MonkeyPatch) -> None:
    start = local_process_fleet.start_node

    def start_and_end(*words: Any) -> int:
        start(*words)
        raise Cut

    patch.setattr(local_process_fleet, "start_node", start_and_end)


def doubt_local(place: Path, node: str, host: str) -> Callable[[], None]:
    """Its holder ends, and the rest of it is frozen, so that not even SIGKILL ends it."""
    if not os.access(_FREEZER, os.W_OK):
        pytest.skip("processes cannot be frozen here")
    group = _FREEZER / f"hf-{os.urandom(4).hex()}"
    group.mkdir()
    own = until(lambda: len(node_processes(place / "nodes" / node)) > 1 and holder(place, node), "its agent")
    for pid in set(node_processes(place / "nodes" / node)) - {own}:
        (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    os.kill(own, signal.SIGKILL)

    def lift() -> None:
        (group / "freezer.state").write_text("THAWED")
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of what was frozen")
        group.rmdir()

    return lift


def hold_local(place: Path, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep nodes that are asked for from coming up, until the returned function is called."""
    (place / _SERVER).unlink(missing_ok=True)
    go, slow = place / "go", place / "slow-python"
    python = shlex.quote(sys.executable)
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {shlex.quote(str(go))} ]; do sleep 0.05; done\nexec {python} "$@"\n')
    slow.chmod(0o755)
    patch.setattr(sys, "executable", str(slow))
    return go.touch


def holder(place: Path, node: str) -> int:
    """The pid of a node's holder, 0 if it has none that lives."""
    try:
        pid = int((place / "nodes" / node / "holder.pid").read_text())
    except (OSError, ValueError):
        return 0
    return 0 if gone(pid) else pid
