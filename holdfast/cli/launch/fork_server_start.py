"""Starts a run's fork server early, so that it imports modules while the rest of the run is prepared."""

import os
from pathlib import Path

from holdfast.cli.run_dirs import run_directory
from holdfast.client.boot.zygote import DEFAULT_PRELOAD, FIRST_PRELOAD, LATER_PRELOAD
from holdfast.linux.regular_files import open_log
from holdfast.wire import program_fork_server
from holdfast.wire.program_fork_server import ForkServer, Later


def start_fork_server(run_dir: Path, zygote: bool, nodes: int) -> ForkServer | None:
    """Start the fork server of this host's nodes. Return None if there is one already, or if the start fails."""
    if os.environ.get(program_fork_server.NAMED):
        return None
    preload, later = fork_preload(nodes) if zygote else ((), None)
    with open(open_log(str(run_dir / "fork.log")), "ab") as log:
        env = run_directory.node_environment(run_dir)
        try:
            return ForkServer(program_fork_server.socket_path(run_dir), preload, env, log.fileno(), later)
        except OSError as e:
            log.write(f"there is no fork server: {e}\n".encode())
            return None


def fork_preload(nodes: int) -> tuple[tuple[str, ...], Later | None]:
    """Return the modules that the fork server imports before it forks, and those that it imports once it is idle. With
    a single node, ranks start as soon as torch is imported, and import the rest in parallel. With several nodes it is
    faster if the fork server imports everything once."""
    return (DEFAULT_PRELOAD, None) if nodes > 1 else (FIRST_PRELOAD, Later(LATER_PRELOAD))
