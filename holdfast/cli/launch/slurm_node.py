"""The Slurm job step that is one node of a run: it joins as a host does, with its own node token."""

import os
import signal
import sys
from pathlib import Path

import msgspec

from holdfast.cli.launch.cluster_launch import join_args
from holdfast.cli.launch.host_join import HostJoin
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import make_console, say
from holdfast.fleet.slurm_fleet import FOLDER
from holdfast.wire import run_and_node_specs

MODULE = "holdfast.cli.launch.slurm_node"
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run a node until it has left. The arguments are RUN_DIR, which all hosts see, and the node's name."""
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    for number in _WARNINGS:
        signal.signal(number, lambda number, _: say(f"Slurm sent {signal.Signals(number).name}; staying until the end"))
    try:
        place = os.environ.get("SLURM_TOPOLOGY_ADDR", "")
        run_and_node_specs.publish_file(run_dir / FOLDER / f"{name}.topology", place.encode())
        run = run_directory.read_spec(run_dir)
        os.chdir(run.entry.cwd)
        args = join_args(run, name, "--run-dir", str(run_dir / FOLDER), "--redirects", "3")
        joining = HostJoin(args, run.settings, run.entry)
        # Its log folder is where the run's own console looks; the release is the one that this node believes unsigned.
        joining.run = msgspec.structs.replace(joining.run, log_dir=run.log_dir, release=run.release)
        joining.run_file = str(run_dir / "run.json")
        for number in _WARNINGS:
            signal.signal(number, lambda number, _: _pass_warning(number, joining))
        console = make_console(args, joining.run, joining.run_dir)
        return joining.follow_job(console, lambda: False, (signal.SIGINT,)) or 0
    except UsageError as e:
        say(str(e))
        return 2
    except OSError as e:
        say(f"{name} cannot start on {os.uname().nodename}: {e}")
        return 1


def _pass_warning(number: int, joining: HostJoin) -> None:
    """Slurm warns before it kills. The controller moves the node's seat in that time, so it must hear of it at once."""
    say(f"Slurm sent {signal.Signals(number).name}; staying until the end")
    joining.warn_node()


if __name__ == "__main__":
    sys.exit(main())
