"""The process of a Kubernetes pod that is one node of a run: it joins as a host does, with its own node token."""

import signal
import sys
from pathlib import Path

import msgspec

from holdfast.cli.launch.cluster_launch import join_args
from holdfast.cli.launch.host_join import HostJoin
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import make_console, say
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import RunSpec

MODULE = "holdfast.cli.launch.pod_node"


def main() -> int:
    """Run this pod's node until it has left the job; argv holds the folder of its run.json and token, and its name."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    # Kubernetes warns before it kills. The controller hears of it, too, and moves the node's seat in that time.
    signal.signal(signal.SIGTERM, lambda *_: say("this pod is being deleted; staying until its grace is over"))
    try:
        run = run_and_node_specs.read_json(folder / "run.json", RunSpec)
        args = join_args(run, name, "--token-file", str(folder / "token"))
        joining = HostJoin(args, run.settings, run.entry)
        console = make_console(args, joining.run, joining.run_dir)
        return joining.follow_job(console, lambda: False, (signal.SIGINT,)) or 0
    except UsageError as e:
        say(str(e))
        return 2
    except (OSError, msgspec.DecodeError) as e:
        say(f"{name} cannot start: {e}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
