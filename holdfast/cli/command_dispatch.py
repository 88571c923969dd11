"""Reads the first word of a command line, and runs the module of that command; lists all commands."""

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable

from holdfast.cli.terminal.closed_pipe_output import drop_output, ignore_closed_pipe

COMMANDS = {
    "run": "run a training script, as torchrun would, and keep it running",
    "sbatch": "write and submit the batch script of a run on Slurm",
    "status": "show what a job is doing now",
    "ls": "show your runs on this host, or those of a database",
    "logs": "show what ranks have printed",
    "attach": "follow a run that another terminal has started",
    "report": "show what a job did and what it cost",
    "dash": "show a job in a browser",
    "trace": "show where every process of a job is, and which rank the others wait for",
    "diagnose": "read logs: which failure it was, whose, and what to do next",
    "update": "bring newer code to a running job",
    "rollback": "go back to an older release of the code",
    "releases": "show the releases of a job, and what became of them",
    "hold": "end all ranks of a job, but keep its nodes and state",
    "resume": "resume a held job",
    "approve": "let a job that waits for approval try again",
    "evict": "evict a node now",
    "drain": "evict a node as soon as a standby can take its place",
    "stop": "stop a job",
    "catalog": "show the catalog of last words, and add to it",
    "ckpt": "list, verify, export and remove checkpoints",
    "token": "make and revoke tokens for people and tools at the ports of jobs",
    "blocked": "show the hosts that jobs refuse, lift a block, or add one",
    "probe": "probe this machine: processors, GPUs, memory, disk, clock",
    "plan": "work out how many standbys a job needs",
    "journal": "look after a database that holds journals",
    "clean": "remove what killed runs have left behind",
    "completion": "print what makes your shell complete these commands",
    "chaos": "inject known faults into a job",
    "sim": "simulate jobs and their faults in virtual time",
}
_SHARED = {  # modules that are told which command they are; any other command NAME has a NAME_command
    **dict.fromkeys(("hold", "resume", "approve", "evict", "drain"), "order_commands"),
    **dict.fromkeys(("logs", "attach"), "logs_command"),
}
_HELP = frozenset(("-h", "--help"))
_FOLLOWING = (["status"], ["logs"], ["attach"], ["dash"])  # may go on for ever; the others end, even if nobody reads on


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    try:
        with contextlib.nullcontext() if args[:1] in _FOLLOWING else ignore_closed_pipe():
            try:
                return _obey(args)
            finally:  # whatever way it ends, argparse's own included
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `holdfast logs -f | head`
        drop_output(sys.stdout)
        return 0


def _obey(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage_text())
        return 0 if args else 2
    if args[0] == "--version":
        from holdfast import __version__

        print(f"holdfast {__version__}")
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"holdfast: there is no command '{args[0]}'; {meant}", file=sys.stderr)
        return 2
    if not _HELP.isdisjoint(args[1:]):
        from holdfast.cli.terminal.prepared_help import print_help

        if print_help(args[0], args[1:]):
            return 0
    return import_command(args[0])(args[1:])


def import_command(name: str) -> Callable[[list[str]], int]:
    """Import the module of a command, and return a function that runs the command with its arguments."""
    shared = _SHARED.get(name)
    module = importlib.import_module(f"holdfast.cli.commands.{shared or f'{name}_command'}")
    return lambda words: int(module.main([name, *words] if shared else words))


def _usage_text() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: holdfast COMMAND ...",
            "",
            "Keeps PyTorch training jobs running while machines fail.",
            "",
            *lines,
            "",
            "holdfast COMMAND --help explains one.",
        ]
    )
