"""Parsers of flag values: each returns a value, or raises UsageError with one sentence."""

import os
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from math import lcm, prod
from pathlib import Path

import msgspec

from holdfast.cli.run_flags.flag_table import FlagWord, GivenFlags, UsageError
from holdfast.core.replay.node_grid import DATA_PARALLEL
from holdfast.core.snapshots.memory_grant import parse_cap
from holdfast.model.job_and_seats import Dims

_NPROC_KINDS = ("auto", "gpu", "cpu")
_STREAMS = re.compile(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]")
_HOST = re.compile(r"[\w.:-]+")
_REFILL_H, _REFILL_MOST_H = 24.0, 87600.0  # a day, as in `holdfast plan`; ten years
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_HOSTS = "the number of hosts is that of --nnodes and --standbys"
_NAME = "holdfast names a run's jobs, and finds them by that; --rdzv-id names the run"
_OURS = {"--nodes": _HOSTS, "-N": _HOSTS, "--job-name": _NAME, "-J": _NAME}  # flags of sbatch


class StreamChoice(msgspec.Struct, frozen=True):
    """The output streams chosen for each local rank: bit 1 is stdout, bit 2 is stderr."""

    every: int = 0
    by_rank: dict[int, int] = {}

    def streams_of(self, local_rank: int) -> int:
        return self.by_rank.get(local_rank, self.every)


def parse_number(given: GivenFlags, name: str, *, most: int | None = None) -> int | None:
    """Return a whole number from 0 to `most`; None when the flag is absent."""
    word = given.words.get(name)
    if word is None:
        return None
    try:
        value = int(word.text)
    except ValueError:
        raise UsageError(f"{word}: give a whole number") from None
    if value < 0 or (most is not None and value > most):
        raise UsageError(f"{word}: give a number {'of 0 or more' if most is None else f'from 0 to {most}'}")
    return value


def parse_standbys(given: GivenFlags) -> tuple[int, float | None]:
    """Return (number of standbys, None); for `auto`, (1, the hours that replacing a standby takes)."""
    word = given.words.get("standbys")
    if word is None:
        return 0, None
    auto, _, hours = word.text.partition(":")
    if auto != "auto":
        try:
            return parse_number(given, "standbys") or 0, None
        except UsageError as e:
            raise UsageError(f"{e}, or auto") from None
    try:
        refill_h = float(hours) if ":" in word.text else _REFILL_H
    except ValueError:
        refill_h = 0.0
    if not 0 < refill_h <= _REFILL_MOST_H:
        raise UsageError(f"{word}: give auto, or auto:H with the hours that replacing a standby takes, as auto:0.5")
    return 1, refill_h


def parse_nodes(given: GivenFlags) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes that train."""
    word = given.words.get("nnodes", FlagWord("--nnodes", "1"))
    try:
        bounds = [int(part) for part in word.text.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 2:
        raise UsageError(f"{word}: give a number of nodes, or MIN:MAX")
    if bounds[0] < 1:
        raise UsageError(f"{word}: a job needs at least 1 node")
    if bounds[0] > bounds[-1]:
        raise UsageError(f"{word}: the minimum comes first; did you mean {bounds[1]}:{bounds[0]}?")
    return _least_nodes(given, word, bounds), bounds[-1]


def _least_nodes(given: GivenFlags, word: FlagWord, bounds: list[int]) -> int:
    """Return the smallest number of nodes; with --min-nodes, a job may go on with fewer than --nnodes."""
    least = parse_number(given, "min-nodes")
    if least is None:
        return bounds[0]
    told = given.words["min-nodes"]
    if len(bounds) == 2:
        raise UsageError(f"{told} and {word} both set the minimum of nodes; drop one of them")
    if not 1 <= least <= bounds[0]:
        raise UsageError(f"{told}: give a number from 1 to {bounds[0]}, as many as {word} asks for")
    return least


def parse_nproc(given: GivenFlags) -> int | str:
    """Return the number of ranks per node, or `auto`, `gpu` or `cpu`, which each node resolves by itself."""
    word = given.words.get("nproc-per-node", FlagWord("--nproc-per-node", "1"))
    if word.text in _NPROC_KINDS:
        return word.text
    try:
        count = int(word.text)
    except ValueError:
        raise UsageError(f"{word}: give a number of ranks, or one of {', '.join(_NPROC_KINDS)}") from None
    if count < 1:
        raise UsageError(f"{word}: a node needs at least 1 rank")
    return count


def parse_streams(given: GivenFlags, name: str) -> StreamChoice:
    word = given.words.get(name)
    if word is None:
        return StreamChoice()
    if not _STREAMS.fullmatch(word.text):
        raise UsageError(f"{word}: give 0 none, 1 stdout, 2 stderr or 3 both, for all or per local rank as in 0:3,1:2")
    if ":" not in word.text:
        return StreamChoice(int(word.text))
    pairs = (pair.split(":") for pair in word.text.split(","))
    return StreamChoice(0, {int(rank): int(which) for rank, which in pairs})


def parse_local_ranks(given: GivenFlags) -> frozenset[int] | None:
    """Return the local ranks to show; None for all of them."""
    text = given.flag_text("local-ranks-filter")
    if text is None:
        return None
    try:
        return frozenset(int(rank) for rank in text.split(","))
    except ValueError:
        raise UsageError(f"{given.words['local-ranks-filter']}: give local ranks as in 0,1,2") from None


def parse_host_port(word: FlagWord, text: str, default_port: int) -> tuple[str, int]:
    """Parse HOST or HOST:PORT; an IPv6 address may be in brackets."""
    text = text.strip()
    host, colon, port = (text, "", "") if text.endswith("]") else text.rpartition(":")
    if not colon:
        host, port = text, str(default_port)
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"{word}: the port must be a number from 0 to 65535, as in HOST:29400")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not _HOST.fullmatch(host):
        raise UsageError(f"{word}: {host or 'nothing'} is no host name or address; give HOST:PORT")
    return host, int(port)


def parse_rdzv_conf(given: GivenFlags) -> dict[str, str]:
    """Return the keys and values of --rdzv-conf as text."""
    text = (given.flag_text("rdzv-conf") or "").strip()
    pairs = [[side.strip() for side in pair.split("=", 1)] for pair in text.split(",")] if text else []
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise UsageError(f"{given.words['rdzv-conf']}: give KEY=VALUE,KEY=VALUE")
    return dict(pairs)


def parse_seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}={text}: give a time in seconds")
    return value


def parse_settings(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of --set; whether such settings exist is checked later, by the configuration."""
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key.strip()):
            raise UsageError(f"--set {text}: give KEY=VALUE")
        pairs.append((key.strip(), value))
    return tuple(pairs)


def parse_memory(given: GivenFlags, name: str) -> str | None:
    """Return the text of a flag that gives memory as a size or a percentage; None if the flag is absent."""
    word = given.words.get(name)
    if word is None:
        return None
    try:
        parse_cap(word.text)
    except ValueError:
        raise UsageError(f"{word}: give a size as in 64G, or a part of what is free as in 50%") from None
    return word.text


def parse_mesh(given: GivenFlags, name: str) -> Dims:
    """Return the names and sizes of the parallel dimensions; () when the flag is absent."""
    word = given.words.get(name)
    if word is None:
        return ()
    dims = tuple((dim.strip(), size.strip()) for dim, _, size in (part.partition("=") for part in word.text.split(",")))
    good = all(dim.isidentifier() and size.isdecimal() and int(size) > 0 for dim, size in dims)
    if not good or len({dim for dim, _ in dims}) < len(dims):
        raise UsageError(f"{word}: give each dimension once with its size, as in pp=2,dp=4,tp=8")
    return tuple((dim, int(size)) for dim, size in dims)


def check_replicas(mesh: Dims, least: int, nproc: int) -> None:
    """Raise UsageError if --min-nodes nodes hold no whole number of replicas. Jobs shrink only by whole replicas."""
    if not any(dim in DATA_PARALLEL for dim, _ in mesh):
        raise UsageError(f"--min-nodes {least}: --mesh has one replica, which needs all nodes; drop one of these flags")
    ranks = prod(size for dim, size in mesh if dim not in DATA_PARALLEL)
    nodes = lcm(ranks, nproc) // nproc
    if least % nodes:
        raise UsageError(f"--min-nodes {least}: a replica of --mesh needs {nodes} nodes; give a multiple of that")


def parse_modules(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the module names of all --preload flags, each once, in the order given."""
    names = dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip())
    for name in names:
        if not _MODULE.fullmatch(name):
            raise UsageError(f"--preload {name}: give module names as in import, separated by commas")
    return tuple(names)


def parse_sbatch_flags(name: str, texts: Iterable[str]) -> tuple[str, ...]:
    """Return flags for sbatch; the user may write them with dashes, or without as in `partition=gpu exclusive`."""
    try:
        split = [(text.lstrip().startswith("-"), shlex.split(text)) for text in texts]
    except ValueError as e:
        raise UsageError(f"--{name}: {str(e).lower()}; quote its flags as a shell would read them") from None
    flags = tuple(word if whole or word.startswith("-") else f"--{word}" for whole, words in split for word in words)
    for flag in flags:
        if why := _OURS.get(flag.partition("=")[0] if flag.startswith("--") else flag[:2]):
            raise UsageError(f"--{name}: leave {flag} out; {why}")
    return flags


def existing_path(given: GivenFlags, name: str) -> str | None:
    """Return the file that a flag names, None if the flag is absent. Raise UsageError if there is no such file."""
    word = given.words.get(name)
    if word is None:
        return None
    if not os.path.isfile(word.text):
        raise UsageError(f"{word}: there is no such file")
    return word.text


def check_script(path: str, *, compiles: bool) -> None:
    """Raise UsageError if every rank would fail on this script; with `compiles`, also if its syntax is wrong."""
    if not os.path.exists(path):
        raise UsageError(f"there is no script {path}; give its path, or -m for a module, or --no-python for a program")
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "__main__.py")):
            return
        raise UsageError(f"{path} is a directory without a __main__.py; give the script in it")
    if not os.path.isfile(path):
        return  # a pipe can be read only once, and that is for the rank
    try:
        source = Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"the script {path} cannot be read: {e.strerror}") from None
    if not compiles or b"\0" in source:
        return  # a zip archive or compiled code; Python runs those too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will say these themselves
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as e:
        line = f": {e.text.strip()}" if e.text else ""
        raise UsageError(f"{path}, line {e.lineno or 1}: {e.msg}{line}") from None


def resolve_nproc(value: int | str, env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return the number of ranks on this node. For `auto`, `gpu` and `cpu`, count GPUs or CPUs without torch."""
    if isinstance(value, int):
        return value
    visible = 0 if value == "cpu" else _visible_gpus(env, root)
    if value == "gpu" and visible == 0:
        raise UsageError("--nproc-per-node gpu: this node shows no NVIDIA GPU; give a number, or cpu")
    return visible or len(os.sched_getaffinity(0))


def _visible_gpus(env: Mapping[str, str], root: Path) -> int:
    # A container may hold few of the host's devices and yet see the driver's list of all of them.
    devices = [path for path in root.glob("dev/nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()]
    present = len(devices) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    count = 0
    for name in (part.strip() for part in listed.split(",")):
        # CUDA shows the devices up to the first entry that names none.
        if not present or not (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < present)):
            break
        count += 1
    return count
