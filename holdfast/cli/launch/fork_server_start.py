"""Starts the fork server of a run, as soon as there is a run directory: everything else is done while it imports."""

import os
from pathlib import Path

from holdfast.cli.run_dirs import run_directory
from holdfast.client.boot.zygote import DEFAULT_PRELOAD, FIRST_PRELOAD, LATER_PRELOAD
from holdfast.wire import fork_server
from holdfast.wire.fork_server import ForkServer, Later


def start_fork_server(run_dir: Path, zygote: bool, nodes: int) -> ForkServer | None:
    """Nodes on this host come from one process; without it they are started one by one."""
    if os.environ.get(fork_server.NAMED):
        return None
    preload, later = fork_preload(nodes) if zygote else ((), None)
    with (run_dir / "fork.log").open("ab") as log:
        env = run_directory.node_environment(run_dir)
        try:
            return ForkServer(fork_server.socket_path(run_dir), preload, env, log.fileno(), later)
        except OSError as e:
            log.write(f"there is no fork server: {e}\n".encode())
            return None


def fork_preload(nodes: int) -> tuple[tuple[str, ...], Later | None]:
    """What the fork server imports for ranks before it forks anybody, and what it imports later.

    The ranks of a single node wait for torch alone, and import the rest beside each other, as they would anywhere.
    Where there are several nodes, once for all of them is sooner.
    """
    return (DEFAULT_PRELOAD, None) if nodes > 1 else (FIRST_PRELOAD, Later(LATER_PRELOAD))
