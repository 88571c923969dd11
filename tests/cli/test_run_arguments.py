"""`holdfast run` takes what the installed torchrun takes and means the same by it."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cli.run_flags.flag_table import TORCHRUN, UNUSED
from holdfast.cli.run_flags.flag_values import StreamChoice
from holdfast.cli.run_flags.run_arguments import RunArgs, parse_run_args

# Values for flags whose text has a syntax of its own; any other flag gets one made from its type and choices.
SAMPLES = {
    "nnodes": "2:3",
    "nproc_per_node": "4",
    "rdzv_endpoint": "node-a:29411",
    "rdzv_conf": "join_timeout=30,last_call_timeout=5",
    "redirects": "0:1,1:2",
    "tee": "3",
    "local_ranks_filter": "0,2",
    "master_addr": "10.0.0.7",
}
# A flag may matter only beside another: standalone overrides an endpoint, local-addr needs a job to join.
SETTINGS: tuple[list[str], ...] = ([], ["--rdzv-endpoint", "node-b:29412"])


class Theirs(msgspec.Struct):
    """What the installed torchrun makes of a command line, stopped just before it launches."""

    space: argparse.Namespace
    config: Any
    entry: list[str]
    logs: dict[str, Any]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("flags") / "train.py"
    path.write_text("raise SystemExit('the command line must not run the script')\n")
    return str(path)


def actions() -> Iterator[argparse.Action]:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            yield action


def sample(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return []
    if action.choices:
        return [str(list(action.choices)[-1])]
    return [SAMPLES.get(action.dest, "3" if action.type in (int, float) else "word")]


def torchrun(argv: Sequence[str], env: Mapping[str, str]) -> Theirs:
    import torch

    run: Any = importlib.import_module("torch.distributed.run")
    kept: dict[str, Any] = {}

    def launch(config: Any, entrypoint: Any) -> Any:
        return lambda *args: kept.update(config=config, entry=[entrypoint, *args])

    def logs(_name: str | None) -> Any:
        return lambda **chosen: kept.setdefault("logs", dict(chosen))  # with None, torch makes a folder of its own

    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(run, "elastic_launch", launch),
        mock.patch.object(run, "_get_logs_specs_class", logs),
        mock.patch.object(torch.multiprocessing, "_set_thread_name"),
        mock.patch.object(run.logger, "warning"),
    ):
        space = run.get_args_parser().parse_args(list(argv))
        run.run(argparse.Namespace(**vars(space)))
    return Theirs(space, **kept)


def streams(chosen: Any) -> StreamChoice:
    return (
        StreamChoice(0, {k: int(v) for k, v in chosen.items()})
        if isinstance(chosen, dict)
        else StreamChoice(int(chosen))
    )


def assert_same(ours: RunArgs, theirs: Theirs) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    config, space = theirs.config, theirs.space
    assert (ours.min_nodes, ours.max_nodes) == (config.min_nodes, config.max_nodes)
    assert str(ours.nproc) == space.nproc_per_node
    assert (ours.max_restarts or 0) == config.max_restarts
    assert (ours.run_id or "none", ours.role) == (space.rdzv_id, config.role)
    assert (ours.script, ours.script_args) == (space.training_script, tuple(space.training_script_args))
    assert (ours.log_dir, ours.local_ranks_filter) == (theirs.logs["log_dir"], theirs.logs["local_ranks_filter"])
    assert (ours.redirects, ours.tee) == (streams(theirs.logs["redirects"]), streams(theirs.logs["tee"]))
    assert ours.log_line_prefix_template == config.log_line_prefix_template
    assert (30.0 if ours.grace_s is None else ours.grace_s) == config.shutdown_timeout
    if not space.run_path:
        start = [] if ours.no_python else [ours.python, "-u", *["-m"] * ours.module]
        assert [*start, ours.script, *ours.script_args] == theirs.entry
    if ours.fleet == "join":
        assert (ours.node_rank or 0, ours.local_addr) == (space.node_rank, config.local_addr)
        assert ours.rdzv_conf == {k: float(v) for k, v in config.rdzv_configs.items() if k.endswith("_timeout")}
        # For other backends torchrun drops --master-addr with a warning; here it is taken at its word.
        if space.rdzv_endpoint or space.rdzv_backend == "static":
            assert ours.endpoint == parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)


def test_every_torchrun_flag_is_known() -> None:
    known = {flag.dest for flag in TORCHRUN + UNUSED}
    new = sorted({action.option_strings[0] for action in actions() if action.dest not in known})
    assert not new, (
        f"torchrun has gained {new}: give each a row in TORCHRUN or UNUSED of holdfast/cli/run_flags/flag_table.py"
    )


def test_every_torchrun_spelling_means_the_same(script: str) -> None:
    for action in actions():
        for option in action.option_strings:
            argv = [option, *sample(action), script, "--lr", "1"]
            assert_same(parse_run_args(argv, {}), torchrun(argv, {}))
            if sample(action):
                argv = [f"{option}={sample(action)[0]}" if option[1] == "-" else option + sample(action)[0], script]
                assert_same(parse_run_args(argv, {}), torchrun(argv, {}))


def test_every_torchrun_variable_means_the_same(script: str) -> None:
    for action in actions():
        for text in sample(action) or ["1", "0"]:
            env = {f"PET_{action.dest.upper()}": text}
            assert_same(parse_run_args([script], env), torchrun([script], env))
            # The command line is stronger than the variable.
            argv = [action.option_strings[-1], *sample(action), script]
            silly = {f"PET_{action.dest.upper()}": "0" if not sample(action) else "17"}
            assert_same(parse_run_args(argv, silly), torchrun(argv, silly))


def test_every_torchrun_flag_is_used_or_said_to_be_unused(script: str) -> None:
    for action in actions():
        flag = [action.option_strings[-1], *sample(action)]
        changed = [
            parse_run_args([*others, *flag, script], {}) != parse_run_args([*others, script], {}) for others in SETTINGS
        ]
        assert any(changed), f"{flag} is swallowed in silence"


def test_unused_flags_are_named_where_they_stood(script: str) -> None:
    assert parse_run_args([script, "--start-method", "fork"], {}).notes == ()
    for flag in UNUSED:
        argv = [f"--{flag.name}", *["x"] * bool(flag.value), script]
        assert parse_run_args(argv, {}).notes == (f"--{flag.name} has no effect: {flag.help}",)
        noted = parse_run_args([script], {flag.variable: "1"}).notes
        assert noted == ((f"{flag.variable} has no effect: {flag.help}",) if flag.pet else ())


def test_abbreviations_torchrun_takes_keep_its_meaning(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    taken, theirs = 0, get_args_parser()
    for action, option in ((a, o) for a in actions() for o in a.option_strings):
        for end in range(3, len(option)):
            argv = [option[:end], *sample(action), script]
            try:
                theirs.parse_args(argv)
            except SystemExit:
                continue  # torchrun finds it ambiguous
            taken += 1
            assert parse_run_args(argv, {}) == parse_run_args([option, *sample(action), script], {}), argv
    capsys.readouterr()
    assert taken > 100
    assert parse_run_args(["--stand", script], {}).standbys == 0  # --standalone, though --standbys begins alike
    assert parse_run_args(["--standb", "2", script], {}).standbys == 2


FLAGS = st.sampled_from(
    [
        ("--nnodes", ["1", "3", "2:4"]),
        ("--nproc-per-node", ["1", "2", "cpu", "auto"]),
        ("--max-restarts", ["0", "3"]),
        ("--rdzv-backend", ["static", "c10d"]),
        ("--rdzv-endpoint", ["node-a:29411", "[fd00::1]:5", "10.0.0.7:80"]),
        ("--rdzv-id", ["none", "job7"]),
        ("--rdzv-conf", ["join_timeout=30", " join_timeout = 3 ,last_call_timeout=5"]),
        ("--node-rank", ["0", "1"]),
        ("--master-addr", ["node-b", "127.0.0.1", "[fd00::2]"]),
        ("--master-port", ["29501"]),
        ("--role", ["default", "trainer"]),
        ("--redirects", ["0", "3", "0:1,1:2"]),
        ("--tee", ["1", "2:3"]),
        ("--standalone", []),
        ("--no-python", []),
    ]
)
SPOKEN = FLAGS.flatmap(
    lambda flag: st.tuples(
        st.sampled_from([flag[0], flag[0].replace("-", "_").replace("__", "--")]),
        st.sampled_from(flag[1]) if flag[1] else st.none(),
        st.sampled_from(["apart", "joined", "variable"]),
    )
)
SCRIPT_ARGS = st.lists(
    st.sampled_from(["--", "-", "-m", "--nnodes", "--lr=1", "a b", "", "-1", "--p", "--no-z", "--set", "-h", "x.py"])
    | st.text(max_size=6)
)


@settings(max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(spoken=st.lists(SPOKEN, max_size=6), dashes=st.booleans(), rest=SCRIPT_ARGS)
def test_any_command_line_reads_as_in_torchrun(
    script: str, spoken: list[tuple[str, str | None, str]], dashes: bool, rest: list[str]
) -> None:
    argv: list[str] = []
    env: dict[str, str] = {}
    for option, value, how in spoken:
        if how == "variable":
            env["PET_" + option[2:].replace("-", "_").upper()] = "1" if value is None else value
        else:
            argv += [option] if value is None else [f"{option}={value}"] if how == "joined" else [option, value]
    argv += [*["--"] * dashes, script, *rest]
    with mock.patch("argparse.ArgumentParser.error", side_effect=SystemExit):
        try:
            theirs = torchrun(argv, env)
        except SystemExit:
            # argparse also tries the script's own arguments as abbreviations, and trips over ambiguous ones.
            theirs = None
    ours = parse_run_args(argv, env)
    if theirs is not None:
        assert_same(ours, theirs)
    elif rest[0] != "--":  # argparse drops this one, once
        assert (ours.script, ours.script_args) == (script, tuple(rest))


def test_arguments_of_the_script_are_its_own(script: str) -> None:
    rest = ("--p", "--s", "--r", "--n", "5", "--resume", "--help", "--", "--nnodes=0")
    assert parse_run_args([script, *rest], {}).script_args == rest


def test_defaults(script: str) -> None:
    args = parse_run_args([script], {})
    assert (args.min_nodes, args.max_nodes, args.nproc, args.standbys, args.max_restarts) == (1, 1, 1, 0, None)
    assert (args.fleet, args.endpoint, args.run_id, args.port, args.zygote) == ("local", None, None, 0, True)
    assert args.notes == ()


def test_our_own_flags(script: str, tmp_path: Path) -> None:
    toml, token = tmp_path / "h.toml", tmp_path / "token"
    toml.touch()
    token.touch()
    argv = ["--nnodes=4", "--standbys", "2", "--run_dir", "runs/a", "--preload", "numpy,my.mod", "--preload", "numpy"]
    argv += ["--no-zygote", "--set", "detect.hang_s=9", "--set", "a=b=c", "--config", str(toml)]
    argv += ["--min-nodes", "3", "--on-incident", "mail -s 'holdfast' me"]
    args = parse_run_args([*argv, "--snapshot-memory", "64G", "--port", "8080", "--token-file", str(token), script], {})
    assert (args.standbys, args.run_dir, args.preload, args.zygote) == (2, "runs/a", ("numpy", "my.mod"), False)
    assert args.settings == (("detect.hang_s", "9"), ("a", "b=c"))
    assert args.snapshot_memory == "64G"
    assert (args.min_nodes, args.max_nodes, args.shrinks) == (3, 4, True)
    assert args.on_incident == "mail -s 'holdfast' me"
    assert (args.config, args.port, args.token_file, args.notes) == (str(toml), 8080, str(token), ())
    assert msgspec.json.decode(msgspec.json.encode(args), type=RunArgs) == args


@pytest.mark.parametrize(
    ("argv", "fleet", "endpoint"),
    [
        ([], "local", None),
        (["--master-port", "1234"], "local", None),
        (["--nnodes", "4", "--rdzv-endpoint", "h"], "join", ("h", 29400)),
        (["--nnodes", "4", "--rdzv-endpoint", "h:7", "--standalone"], "local", None),
        (["--nnodes", "4", "--rdzv-endpoint", "h:7", "--fleet", "local"], "local", None),
        (["--nnodes", "4", "--rdzv-endpoint", "h:7", "--master-addr", "other"], "join", ("h", 7)),
        (["--nnodes", "2", "--master-addr", "h"], "join", ("h", 29500)),
        (["--nnodes", "2", "--node-rank", "1", "--master-port", "8"], "join", ("127.0.0.1", 8)),
        (["--node-rank", "0", "--master-addr", "h"], "join", ("localhost", 0)),
        (["--standbys", "1", "--node-rank", "1"], "join", ("127.0.0.1", 29500)),
        (["--rdzv-endpoint", "localhost:0"], "join", ("localhost", 0)),
    ],
)
def test_fleet_and_endpoint(script: str, argv: list[str], fleet: str, endpoint: tuple[str, int] | None) -> None:
    args = parse_run_args([*argv, script], {})
    assert (args.fleet, args.endpoint) == (fleet, endpoint)


def test_flags_out_of_place_are_said() -> None:
    def notes(*argv: str) -> tuple[str, ...]:
        return parse_run_args([*argv, "-m", "train"], {"PET_MASTER_PORT": "1"}).notes

    here = "is ignored: nodes are started on this host"
    assert notes("--standalone", "--rdzv-endpoint=h") == (f"--rdzv-endpoint {here}", f"PET_MASTER_PORT {here}")
    [note] = notes("--rdzv-endpoint=h")
    assert note.startswith("PET_MASTER_PORT ") and "--rdzv-endpoint" in note
    [note] = notes("--node-rank=0", "--rdzv-conf=is_host=1,join_timeout=2")
    assert note.startswith("--rdzv-conf is_host ")


def test_resume_needs_no_script(tmp_path: Path) -> None:
    args = parse_run_args(["--resume", str(tmp_path), "--nnodes", "3"], {"PET_NNODES": "2"})
    assert (args.resume, args.script) == (str(tmp_path), "")
    assert [note.split()[0] for note in args.notes] == ["--nnodes"]


def test_console_streams(script: str) -> None:
    args = parse_run_args(["-r", "3", "-t", "0:1", "--local-ranks-filter", "0,1", script], {})
    assert [args.console_streams(rank) for rank in range(3)] == [1, 0, 0]
    assert parse_run_args([script], {}).console_streams(5) == 3


def test_run_path_is_stronger_than_no_python(script: str) -> None:
    args = parse_run_args(["--run-path", "--no-python", "-m", script], {})
    assert (args.module, args.no_python) == (False, False)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run_args(["--help"], {})
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.index("--nnodes") < shown.index("what holdfast adds") < shown.index("--standbys")
    assert shown.index("--token-file") < shown.index("without effect") < shown.index("--rdzv-backend")
    assert all(f"--{flag.name}" in shown for flag in TORCHRUN + UNUSED)
    assert "--nproc_per_node" not in shown


def test_the_command_line_is_read_without_torch() -> None:
    heavy = "print(sorted({'torch', 'aiohttp', 'rich'} & set(sys.modules)))"
    code = f"import sys, holdfast.cli.run_flags.run_arguments; {heavy}"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
