"""Parses the command line of `holdfast run`, torchrun's flags and PET_ variables included, into one checked RunArgs."""

import sys
from collections.abc import Mapping, Sequence
from math import prod

import msgspec

from holdfast.cli.run_flags import flag_values as values
from holdfast.cli.run_flags.flag_table import OURS, TORCHRUN, UNUSED, FlagWord, GivenFlags, UsageError, read_flags
from holdfast.cli.run_flags.flag_values import StreamChoice, resolve_nproc
from holdfast.model.job_and_seats import Dims

__all__ = ["FLEETS", "RunArgs", "StreamChoice", "UsageError", "parse_run_args", "resolve_nproc"]

FLEETS = ("local", "join", "slurm", "kubernetes")
_RDZV_PORT = 29400
_MASTER_PORT = 29500
_PLACES = ("rdzv-endpoint", "master-addr", "node-rank")  # any of these says: a job that spans hosts
_JOIN_ONLY = (*_PLACES, "master-port", "rdzv-conf")
_CONF_KEYS = ("join_timeout", "last_call_timeout")
_KEPT_ON_RESUME = ("resume", "config")
_NOT_ON_RESUME = {
    "port": "the nodes of that run expect its controller at the old port",
    "token-file": "the nodes of that run present the token it was started with",
}


class PodFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags about the pods of --fleet kubernetes: image, namespace and template."""

    image: str | None
    namespace: str | None
    template: str | None  # a file


class RunArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The checked arguments of `holdfast run`; None means that the flag is absent, so the settings decide."""

    min_nodes: int
    max_nodes: int
    shrinks: bool  # by --min-nodes; MIN:MAX is torchrun's, and takes any mesh
    nproc: int | str  # "auto", "gpu" and "cpu" are counted on each node, by resolve_nproc
    standbys: int
    refill_h: float | None  # with auto, hours to replace a standby; `standbys` is then the least number
    max_restarts: int | None
    fleet: str
    endpoints: tuple[tuple[str, int], ...]  # join and kubernetes only; port 0: any free one, the job has a single node
    journal: str | None  # the address of a database
    node_rank: int | None
    local_addr: str | None
    run_id: str | None
    rdzv_conf: dict[str, float]  # join only; of join_timeout and last_call_timeout those that were given
    role: str
    log_dir: str | None
    run_dir: str | None
    detach: bool
    resume: str | None
    redirects: StreamChoice
    tee: StreamChoice
    local_ranks_filter: frozenset[int] | None
    log_line_prefix_template: str | None
    grace_s: float | None
    preload: tuple[str, ...]
    zygote: bool
    release: bool  # whether the code that the job begins with is copied
    snapshot_memory: str | None
    on_incident: str | None
    mesh: Dims
    settings: tuple[tuple[str, str], ...]
    config: str | None
    port: int
    token_file: str | None
    slurm: tuple[str, ...]  # flags of sbatch
    pods: PodFlags  # kubernetes only
    python: str
    module: bool
    no_python: bool
    script: str  # empty with resume only
    script_args: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """The first address at which the controller may listen; None unless the job spans hosts."""
        return self.endpoints[0] if self.endpoints else None

    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node. Raise UsageError if the mesh does not fit the number of ranks."""
        nproc = resolve_nproc(self.nproc)
        dims, ranks = prod(size for _, size in self.mesh), self.max_nodes * nproc
        if self.mesh and dims != ranks:
            raise UsageError(f"--mesh has {dims} ranks, but {self.max_nodes} x {nproc} are {ranks}; change one of them")
        if self.mesh and self.shrinks and self.min_nodes < self.max_nodes:
            values.check_replicas(self.mesh, self.min_nodes, nproc)
        return nproc

    def console_streams(self, local_rank: int) -> int:
        """Return the streams of a local rank that the console shows: bit 1 stdout, bit 2 stderr."""
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return 0
        return (3 & ~self.redirects.streams_of(local_rank)) | self.tee.streams_of(local_rank)


def parse_run_args(argv: Sequence[str], env: Mapping[str, str]) -> RunArgs:
    """Read the command line after `holdfast run`; raises UsageError, and SystemExit after --help."""
    given = read_flags(argv, env)
    (min_nodes, max_nodes), (standbys, refill_h) = values.parse_nodes(given), values.parse_standbys(given)
    fleet, (module, no_python) = _choose_fleet(given), _script_kind(given)
    args = RunArgs(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        shrinks="min-nodes" in given.words,
        nproc=values.parse_nproc(given),
        standbys=standbys,
        refill_h=refill_h,
        max_restarts=values.parse_number(given, "max-restarts"),
        fleet=fleet,
        endpoints=_find_endpoints(given, fleet, max_nodes + standbys),
        journal=_journal_address(given, fleet),
        node_rank=_join_node_rank(given, max_nodes + standbys, refill_h) if fleet == "join" else None,
        local_addr=given.flag_text("local-addr") if fleet != "local" else None,
        run_id=_given_run_id(given),
        rdzv_conf=_time_limits(given) if fleet == "join" else {},
        role=given.flag_text("role") or "default",
        log_dir=given.flag_text("log-dir"),
        run_dir=given.flag_text("run-dir"),
        detach="detach" in given.words,
        resume=given.flag_text("resume"),
        redirects=values.parse_streams(given, "redirects"),
        tee=values.parse_streams(given, "tee"),
        local_ranks_filter=values.parse_local_ranks(given),
        log_line_prefix_template=env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        grace_s=_shutdown_grace_s(given, env),
        preload=values.parse_modules(given.lists["preload"]),
        zygote="no-zygote" not in given.words,
        release="no-release" not in given.words,
        mesh=values.parse_mesh(given, "mesh"),
        snapshot_memory=values.parse_memory(given, "snapshot-memory"),
        on_incident=given.flag_text("on-incident"),
        settings=values.parse_settings(given.lists["set"]),
        config=values.existing_path(given, "config"),
        port=values.parse_number(given, "port", most=65535) or 0,
        token_file=values.existing_path(given, "token-file"),
        slurm=values.parse_sbatch_flags("slurm", given.lists["slurm"]),
        pods=_pod_flags(given),
        python=env.get("PYTHON_EXEC") or sys.executable,
        module=module,
        no_python=no_python,
        script=given.script,
        script_args=given.script_args,
        notes=_flag_notes(given, fleet, max_nodes + standbys),
    )
    return _with_checked_script(args)


def _with_checked_script(args: RunArgs) -> RunArgs:
    if not (args.resume or args.module or args.no_python):
        values.check_script(args.script, compiles=args.python == sys.executable)
    return args


def _flag_notes(given: GivenFlags, fleet: str, nodes: int) -> tuple[str, ...]:
    return (*_unused_flags(given), *_misplaced_flags(given, fleet, nodes), *_flags_beside_resume(given))


def _pod_flags(given: GivenFlags) -> PodFlags:
    return PodFlags(
        image=given.flag_text("kube-image"),
        namespace=given.flag_text("kube-namespace"),
        template=values.existing_path(given, "kube-pod-template"),
    )


def _given_run_id(given: GivenFlags) -> str | None:
    run_id = given.flag_text("rdzv-id")
    return None if run_id == "none" else run_id


def _choose_fleet(given: GivenFlags) -> str:
    fleet = given.flag_text("fleet")
    if fleet is not None and fleet not in FLEETS:
        raise UsageError(f"--fleet {fleet}: there is no such fleet; known are {', '.join(FLEETS)}")
    places = any(given.flag_text(name) for name in _PLACES)
    if "standalone" in given.words:
        if fleet not in (None, "local"):
            raise UsageError(
                f"{given.words['standalone'].source} keeps the job on this host; drop it or --fleet {fleet}"
            )
        return "local"
    if fleet == "join" and not places:
        raise UsageError("--fleet join: name the host that runs the controller, with --rdzv-endpoint HOST:PORT")
    if given.lists["slurm"] and fleet != "slurm" and "resume" not in given.words:
        raise UsageError(f"--slurm {given.lists['slurm'][0]} is for nodes from Slurm; give --fleet slurm too")
    if fleet == "kubernetes" and not given.flag_text("rdzv-endpoint"):
        raise UsageError("--fleet kubernetes: say where pods reach this controller, with --rdzv-endpoint HOST:PORT")
    return fleet or ("join" if places else "local")


def _find_endpoints(given: GivenFlags, fleet: str, hosts: int) -> tuple[tuple[str, int], ...]:
    if fleet == "kubernetes":
        return (_join_endpoint(given, hosts=1),)  # pods are told the port, whichever it is
    return _join_endpoints(given, hosts) if fleet == "join" else ()


def _journal_address(given: GivenFlags, fleet: str) -> str | None:
    url = given.flag_text("journal")
    if url is None or "resume" in given.words:
        return url
    if fleet == "slurm":
        return url  # all hosts see the run directory, by which another one goes on with the run
    if fleet == "local":
        raise UsageError("--journal needs --rdzv-endpoint: on one host a database adds nothing to the run directory")
    if _given_run_id(given) is None:
        raise UsageError("--journal needs --rdzv-id NAME, the same on every host: by it hosts find the run")
    return url


def _join_endpoints(given: GivenFlags, hosts: int) -> tuple[tuple[str, int], ...]:
    """Return the addresses at which a `--fleet join` job's controller may listen; several only with --journal."""
    texts = (given.flag_text("rdzv-endpoint") or "").split(",")
    if len(texts) == 1:
        return (_join_endpoint(given, hosts),)
    word = given.words["rdzv-endpoint"]
    if given.flag_text("journal") is None:
        raise UsageError(f"{word}: several hosts can carry the controller only with --journal; name one, or give that")
    endpoints = tuple(values.parse_host_port(word, text, _RDZV_PORT) for text in texts)
    if any(port == 0 for _, port in endpoints):
        raise UsageError(f"{word}: port 0 means any free port, which the other hosts cannot know; name one")
    return endpoints


def _join_endpoint(given: GivenFlags, hosts: int) -> tuple[str, int]:
    """Return the address of a `--fleet join` job's controller, with torchrun's defaults."""
    port = values.parse_number(given, "master-port", most=65535)
    text = given.flag_text("rdzv-endpoint")
    if text is not None:
        word = given.words["rdzv-endpoint"]
        backend = given.words.get("rdzv-backend")
        if backend and backend.text.startswith("etcd"):
            raise UsageError(f"{backend}: holdfast does not use etcd; name one of the job's own hosts in {word.source}")
        endpoint = values.parse_host_port(word, text, _RDZV_PORT)
    elif hosts == 1 and port is None:
        return "localhost", 0  # as torchrun: nobody else has to find it, so jobs on one host do not collide
    else:
        word = FlagWord("--master-addr", given.flag_text("master-addr") or "127.0.0.1")
        port = _MASTER_PORT if port is None else port
        endpoint = values.parse_host_port(word, f"{word.text}:{port}", port)
    if hosts > 1 and endpoint[1] == 0:
        raise UsageError(f"{word}: port 0 means any free port, which the other hosts cannot know; name one")
    return endpoint


def _join_node_rank(given: GivenFlags, hosts: int, refill_h: float | None) -> int | None:
    rank = values.parse_number(given, "node-rank")
    counted = refill_h is None  # with --standbys auto nobody knows yet how many hosts there are
    if rank is not None and rank >= hosts > 1 and counted:  # torchrun takes any rank for a single node
        raise UsageError(f"{given.words['node-rank']}: the job has {hosts} nodes, counted from 0 to {hosts - 1}")
    return rank


def _time_limits(given: GivenFlags) -> dict[str, float]:
    conf = values.parse_rdzv_conf(given)
    return {key: values.parse_seconds(f"--rdzv-conf {key}", conf[key]) for key in _CONF_KEYS if key in conf}


def _shutdown_grace_s(given: GivenFlags, env: Mapping[str, str]) -> float | None:
    grace = values.parse_number(given, "shutdown-timeout")
    if grace is not None:
        return float(grace)
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # where torchrun looks next
    return values.parse_seconds(name, env[name]) if env.get(name) else None


def _script_kind(given: GivenFlags) -> tuple[bool, bool]:
    """Return whether the script is a module, and whether it is a program that is not Python."""
    module, no_python = "module" in given.words, "no-python" in given.words
    if "resume" in given.words:
        if given.script:
            raise UsageError(f"--resume continues the script of that run; drop {given.script}")
        return module, no_python
    if not given.script:
        raise UsageError("no script given; write holdfast run [flags] SCRIPT [arguments of the script]")
    if "run-path" in given.words:
        module = no_python = False  # torchrun's rule
    if module and no_python:
        raise UsageError("-m runs a Python module and --no-python runs no Python; drop one of them")
    return module, no_python


def _unused_flags(given: GivenFlags) -> list[str]:
    notes = [f"{given.words[f.name].source} has no effect: {f.help}" for f in UNUSED if f.name in given.words]
    for key in values.parse_rdzv_conf(given):
        if key not in _CONF_KEYS:
            notes.append(f"{given.words['rdzv-conf'].source} {key} has no effect: there is no rendezvous")
    return notes


def _misplaced_flags(given: GivenFlags, fleet: str, hosts: int) -> list[str]:
    """Return notes about flags that have no effect in combination with the other flags given."""
    names: tuple[str, ...]
    if fleet == "local":
        names, why = (*_JOIN_ONLY, "local-addr"), "nodes are started on this host"
    elif fleet == "slurm":
        names, why = _JOIN_ONLY, "Slurm says on which hosts nodes run"
    elif fleet == "kubernetes":
        own = () if given.flag_text("journal") else ("token-file",)  # with a journal elsewhere it opens the keys there
        names, why = ("master-addr", "master-port", "node-rank", "local-addr", *own), "pods get what they need"
    elif given.flag_text("rdzv-endpoint"):
        names, why = ("master-addr", "master-port"), f"{given.words['rdzv-endpoint'].source} names the endpoint already"
    elif hosts == 1 and "master-port" not in given.words:
        names, why = ("master-addr",), "a single node needs no endpoint"
    else:
        return []
    return [f"{given.words[name].source} is ignored: {why}" for name in names if given.flag_text(name)]


def _flags_beside_resume(given: GivenFlags) -> list[str]:
    """Return notes about flags, but not PET_ variables, that --resume ignores. Raise UsageError for forbidden flags."""
    if "resume" not in given.words:
        return []
    for name, why in _NOT_ON_RESUME.items():
        if name in given.words:
            raise UsageError(f"--{name} does not go with --resume: {why}; drop it")
    names = [f.name for f in TORCHRUN + OURS if f.name not in _KEPT_ON_RESUME]
    told = [name for name in names if name in given.words and given.words[name].source == f"--{name}"]
    told += ["preload"] if given.lists["preload"] else []
    return [f"--{name} is ignored: the run continues as it was recorded" for name in told]
