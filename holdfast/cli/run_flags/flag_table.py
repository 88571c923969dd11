"""The table of flags of `holdfast run` (torchrun's, our own, and flags without effect), and how they are read."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec


class UsageError(Exception):
    """Says in one sentence what is wrong with the command line, and how to fix it."""


class Flag(msgspec.Struct, frozen=True):
    """One flag; `value` is the placeholder for its value in the help, and empty for an on/off flag."""

    name: str
    value: str
    help: str
    short: str = ""
    pet: bool = True
    many: bool = False

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"


TORCHRUN = (
    Flag("nnodes", "N|MIN:MAX", "how many nodes train; MIN:MAX: at most MAX, go on while MIN are left (default 1)"),
    Flag("nproc-per-node", "N|auto|gpu|cpu", "ranks on each node (default 1)"),
    Flag("max-restarts", "N", "stop after N restarts without an eviction (default: bounded by the settings)"),
    Flag("standalone", "", "run on this host alone, whatever the flags below say"),
    Flag(
        "rdzv-endpoint",
        "HOST[:PORT]",
        "join the job whose controller runs on HOST (default port 29400); with --journal a list, HOST:PORT,HOST:PORT",
    ),
    Flag("rdzv-id", "NAME", "name of the run"),
    Flag("rdzv-conf", "KEY=VALUE,...", "join_timeout and last_call_timeout limit the wait for nodes, in seconds"),
    Flag("node-rank", "N", "place of this node in the job it joins"),
    Flag("master-addr", "HOST", "as --rdzv-endpoint, without the port (default 127.0.0.1)"),
    Flag("master-port", "PORT", "port that goes with --master-addr (default 29500)"),
    Flag("local-addr", "HOST", "address at which the other nodes reach this one"),
    Flag("role", "NAME", "role of the ranks, handed to them in ROLE_NAME"),
    Flag("module", "", "SCRIPT is a module, as in python -m", short="m"),
    Flag("no-python", "", "SCRIPT is a program of its own, not a Python file"),
    Flag("log-dir", "DIR", "where the output of the ranks is kept"),
    Flag("redirects", "STREAMS", "keep streams off the console: 1 stdout, 2 stderr, 3 both, or RANK:N,...", short="r"),
    Flag("tee", "STREAMS", "show streams on the console even so; written like --redirects", short="t"),
    Flag("local-ranks-filter", "RANK,...", "show only these local ranks on the console"),
    Flag("shutdown-timeout", "SECONDS", "time between SIGTERM and SIGKILL when ranks are stopped"),
)

OURS = (
    Flag(
        "standbys",
        "N|auto[:H]",
        "checked nodes kept waiting beside those that train (default 0); auto: by the losses of past runs, where "
        "replacing a standby takes H hours (default 24)",
    ),
    Flag("min-nodes", "N", "go on with as few as N nodes while some are missing, and grow back when they come"),
    Flag("fleet", "NAME", "where nodes come from: local, join, slurm or kubernetes (default: join if hosts are named)"),
    Flag(
        "slurm",
        "FLAGS",
        "flags of sbatch for --fleet slurm, as 'partition=gpu time=24:00:00 exclusive'; repeatable",
        many=True,
    ),
    Flag("kube-image", "IMAGE", "image of the pods of --fleet kubernetes (default: the one of the template)"),
    Flag("kube-namespace", "NAME", "namespace of the pods (default: that of the credentials)"),
    Flag("kube-pod-template", "FILE", "a pod as YAML, or its spec alone, to which holdfast adds what nodes need"),
    Flag("mesh", "NAME=N,...", "parallel groups as in a DeviceMesh, the last over neighbouring ranks: pp=2,dp=4,tp=8"),
    Flag("run-dir", "DIR", "where this run keeps its journal and its other files"),
    Flag(
        "journal",
        "URL",
        "keep the journal in Postgres (postgres://HOST/DATABASE), so that each host of --rdzv-endpoint can carry the "
        "controller, and needs --rdzv-id; with --fleet slurm, so that any host can --resume the run",
    ),
    Flag("detach", "", "give the terminal back at once; holdfast attach comes back to the run"),
    Flag("resume", "RUN", "continue this run, whose holdfast run was killed or ended with 95; no SCRIPT needed"),
    Flag("preload", "MODULE,...", "modules to import once per node, before ranks are forked; repeatable", many=True),
    Flag("no-zygote", "", "start each rank as a fresh interpreter instead of forking a preloaded one"),
    Flag("no-release", "", "always run the script in place, never from a copy of its tree"),
    Flag("snapshot-memory", "SIZE|PERCENT", "memory of a node that snapshots may take: 64G, or 50%% of what is free"),
    Flag("on-incident", "CMD", "shell command that gets incidents, questions and the end of the job, as JSON on stdin"),
    Flag("config", "FILE", "settings, as TOML"),
    Flag("set", "KEY=VALUE", "one setting, which overrides the file's; repeatable", many=True),
    Flag("port", "PORT", "port of the controller's API (default 0: any free one)"),
    Flag("token-file", "FILE", "file with the token that nodes and people on other hosts must present"),
)

# The help of these rows ends the sentence "--flag has no effect: ...".
UNUSED = (
    Flag("rdzv-backend", "NAME", "the controller places the ranks, so there is no rendezvous"),
    Flag("monitor-interval", "SECONDS", "holdfast sees the end of a rank at once, without polling"),
    Flag("start-method", "METHOD", "ranks are forked from a preloaded process, or executed with --no-zygote"),
    Flag("event-log-handler", "NAME", "every event is in the run's journal"),
    Flag("run-path", "", "a Python script is forked from a running interpreter anyway, unless --no-zygote is given"),
    Flag("duplicate-stdout-filters", "WORD,...", "the kept output of each rank is complete; search that"),
    Flag("duplicate-stderr-filters", "WORD,...", "the kept output of each rank is complete; search that"),
    Flag("logs-specs", "NAME", "output of ranks is always kept in the same layout", pet=False),
    Flag("numa-binding", "MODE", "ranks are not bound to CPUs", pet=False),
    Flag("signals-to-handle", "SIGNAL,...", "which signals stop a job is fixed"),
    Flag("virtual-local-rank", "", "LOCAL_RANK stays the index on the node, and every rank sees all its GPUs"),
)

_GROUPS = (
    ("what you know from torchrun (each also as PET_NAME in the environment)", TORCHRUN),
    ("what holdfast adds", OURS),
    ("accepted from torchrun, without effect", UNUSED),
)
_TORCHRUN_DESTS = frozenset(flag.dest for flag in TORCHRUN + UNUSED)


class FlagWord(msgspec.Struct, frozen=True):
    """The value of one flag, and its source: the flag itself or its PET_ variable."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}={self.text}" if self.source.startswith("PET_") else f"{self.source} {self.text}".rstrip()


class GivenFlags(msgspec.Struct, frozen=True):
    """What the user gave, not checked yet: flags by name, repeatable flags, and the script."""

    words: dict[str, FlagWord]
    lists: dict[str, tuple[str, ...]]
    script: str
    script_args: tuple[str, ...]

    def flag_text(self, name: str) -> str | None:
        """Return the text of a flag's value; None if the flag is absent, or if its value is empty, as torchrun does."""
        word = self.words.get(name)
        return word.text if word and word.text else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see holdfast run --help")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Resolve an abbreviated flag: torchrun's flags win over ours, and an ambiguous abbreviation matches no flag.
        argparse would raise an error for an ambiguous one, even among the arguments of the user's script."""
        found = super()._get_option_tuples(option_string)
        found = [match for match in found if match[0].dest in _TORCHRUN_DESTS] or found
        return found[:1] if len({match[0].dest for match in found}) == 1 else []


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="holdfast run",
        usage="holdfast run [flags] SCRIPT [arguments of the script]\n       holdfast run --resume RUN",
        description="Runs a training script on all nodes and keeps it running while machines fail.",
    )
    for title, flags in _GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            shape: dict[str, Any] = {"dest": flag.dest, "default": None}
            if not flag.value:
                shape |= {"action": "store_const", "const": ""}
            else:
                shape |= {"action": "append" if flag.many else "store", "metavar": flag.value}
            short = [f"-{flag.short}"] if flag.short else []
            group.add_argument(*short, f"--{flag.name}", help=flag.help, **shape)
            if "-" in flag.name:  # torchrun's older spelling, kept out of the help
                group.add_argument(f"--{flag.dest}", help=argparse.SUPPRESS, **shape)
    parser.add_argument("script", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def read_flags(argv: Sequence[str], env: Mapping[str, str]) -> GivenFlags:
    """Sort the command line and the PET_ variables into flags and script; the command line overrides the variables."""
    space, unknown = _make_parser().parse_known_args(list(argv))
    if unknown:
        raise UsageError(_unknown_flag(unknown[0]))
    words: dict[str, FlagWord] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for flag in TORCHRUN + OURS + UNUSED:
        value = getattr(space, flag.dest)
        if flag.many:
            lists[flag.name] = tuple(value or ())
        elif value is not None:
            words[flag.name] = FlagWord(f"--{flag.name}", value)
        elif flag.pet and flag not in OURS and flag.variable in env and _is_set(flag, env[flag.variable]):
            words[flag.name] = FlagWord(flag.variable, env[flag.variable])
    return GivenFlags(words, lists, space.script, tuple(space.script_args))


def _is_set(flag: Flag, text: str) -> bool:
    """Return whether the PET_ variable sets the flag; an on/off flag is not set by the value 0."""
    if flag.value:
        return True
    try:
        return int(text) != 0
    except ValueError:
        raise UsageError(f"{flag.variable}={text} is neither on nor off; set it to 1 or 0, or unset it") from None


def _unknown_flag(word: str) -> str:
    written = word.partition("=")[0]
    wanted = written.replace("_", "-")
    names = [f"--{flag.name}" for flag in TORCHRUN + OURS + UNUSED]
    near = [name for name in names if name.startswith(wanted)] or difflib.get_close_matches(wanted, names, n=1)
    if near and wanted.startswith("--"):
        return f"there is no flag {written}; did you mean {' or '.join(near)}?"
    return f"there is no flag {written}; see holdfast run --help, and write flags of your script after the script"
