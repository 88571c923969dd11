"""Each wrong value on the command line gets one sentence, and nodes count their own ranks."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.flag_values import resolve_nproc
from holdfast.cli.run_flags.run_arguments import parse_run_args


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('this must not run')\n")
    return str(path)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes 0 S", "--nnodes 0: a job needs at least 1 node"),
        ("--nnodes -1 S", "--nnodes -1: a job needs at least 1 node"),
        ("--nnodes 4:2 S", "--nnodes 4:2: the minimum comes first; did you mean 2:4?"),
        ("--nnodes abc S", "--nnodes abc: give a number of nodes, or MIN:MAX"),
        ("--nnodes 1:2:3 S", "--nnodes 1:2:3: give a number of nodes, or MIN:MAX"),
        ("--nproc-per-node 0 S", "--nproc-per-node 0: a node needs at least 1 rank"),
        ("--nproc-per-node -2 S", "--nproc-per-node -2: a node needs at least 1 rank"),
        ("--nproc_per_node foo S", "--nproc-per-node foo: give a number of ranks, or one of auto, gpu, cpu"),
        ("--max-restarts -1 S", "--max-restarts -1: give a number of 0 or more"),
        ("--max-restarts x S", "--max-restarts x: give a whole number"),
        ("--standbys -1 S", "--standbys -1: give a number of 0 or more, or auto"),
        ("--standbys many S", "--standbys many: give a whole number, or auto"),
        (
            "--standbys auto:x S",
            "--standbys auto:x: give auto, or auto:H with the hours that replacing a standby takes",
        ),
        ("--standbys auto:0 S", "--standbys auto:0: give auto, or auto:H"),
        ("--standbys auto: S", "--standbys auto:: give auto, or auto:H"),
        ("--nnodes 2 --min-nodes 3 S", "--min-nodes 3: give a number from 1 to 2, as many as --nnodes 2 asks for"),
        ("--nnodes 2 --min-nodes 0 S", "--min-nodes 0: give a number from 1 to 2"),
        ("--nnodes 1:2 --min-nodes 1 S", "--min-nodes 1 and --nnodes 1:2 both set the minimum of nodes; drop one"),
        ("--port 70000 S", "--port 70000: give a number from 0 to 65535"),
        ("--rdzv-endpoint h:x S", "--rdzv-endpoint h:x: the port must be a number from 0 to 65535, as in HOST:29400"),
        ("--rdzv-endpoint :80 S", "--rdzv-endpoint :80: nothing is no host name or address; give HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint h:0 S", "--rdzv-endpoint h:0: port 0 means any free port, which the other "),
        ("--rdzv-backend etcd --rdzv-endpoint h S", "--rdzv-backend etcd: holdfast does not use etcd; name one"),
        ("--nnodes 2 --node-rank 2 S", "--node-rank 2: the job has 2 nodes, counted from 0 to 1"),
        ("--rdzv-conf x S", "--rdzv-conf x: give KEY=VALUE,KEY=VALUE"),
        ("--node-rank 0 --rdzv-conf join_timeout=x S", "--rdzv-conf join_timeout=x: give a time in seconds"),
        ("--tee 4 S", "--tee 4: give 0 none, 1 stdout, 2 stderr or 3 both, for all or per local rank as in 0:3,1:2"),
        ("--local-ranks-filter a S", "--local-ranks-filter a: give local ranks as in 0,1,2"),
        ("--fleet moon S", "--fleet moon: there is no such fleet; known are local, join, slurm"),
        ("--fleet join S", "--fleet join: name the host that runs the controller, with --rdzv-endpoint HOST:PORT"),
        ("--fleet join --standalone S", "--standalone keeps the job on this host; drop it or --fleet join"),
        ("--preload a/b.py S", "--preload a/b.py: give module names as in import, separated by commas"),
        ("--set x S", "--set x: give KEY=VALUE"),
        ("--config no.toml S", "--config no.toml: there is no such file"),
        ("--token-file no S", "--token-file no: there is no such file"),
        (
            "--resume . --port 1",
            "--port does not go with --resume: the nodes of that run expect its ",
        ),
        (
            "--resume . --token-file t",
            "--token-file does not go with --resume: the nodes of that run present ",
        ),
        ("--snapshot-memory lots S", "--snapshot-memory lots: give a size as in 64G, or a part of what is free as in"),
        ("--snapshot-memory 0 S", "--snapshot-memory 0: give a size as in 64G"),
        ("--snapshot-memory 101% S", "--snapshot-memory 101%: give a size as in 64G"),
        ("--resume . S", "--resume continues the script of that run; drop "),
        ("--nnodes 2", "no script given; write holdfast run [flags] SCRIPT"),
        ("--role", "argument --role: expected one argument; see holdfast run --help"),
        ("--standbies 1 S", "there is no flag --standbies; did you mean --standbys?"),
        ("--master S", "there is no flag --master; did you mean --master-addr or --master-port?"),
        ("--zzz=1 S", "there is no flag --zzz; see holdfast run --help, and write flags of your script after the"),
        ("-m --no-python S", "-m runs a Python module and --no-python runs no Python; drop one of them"),
        ("nofile.py", "there is no script nofile.py; give its path, or -m for a module, or --no-python for a program"),
        (".", ". is a directory without a __main__.py; give the script in it"),
    ],
)
def test_bad_input(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").touch()
    with pytest.raises(UsageError) as raised:
        parse_run_args([script if word == "S" else word for word in line.split()], {})
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nnodes 4 --min-nodes 3 --mesh pp=2,dp=2", "--min-nodes 3: a replica of --mesh needs 2 nodes; give a "),
        ("--nnodes 4 --min-nodes 2 --mesh pp=2,dp=2", ""),
        ("--nnodes 4 --nproc-per-node 2 --min-nodes 1 --mesh dp=4,tp=2", ""),
        (
            "--nnodes 3 --nproc-per-node 2 --min-nodes 2 --mesh dp=2,pp=3",
            "--min-nodes 2: a replica of --mesh needs 3 ",
        ),
        ("--nnodes 4 --min-nodes 3 --mesh pp=2,fsdp=2", "--min-nodes 3: --mesh has one replica, which needs "),
        ("--nnodes 3:4 --mesh pp=2,dp=2", ""),
    ],
)
def test_fewer_nodes_are_whole_replicas(script: str, line: str, sentence: str) -> None:
    args = parse_run_args([*line.split(), script], {})
    if not sentence:
        assert args.ranks_per_node() >= 1
        return
    with pytest.raises(UsageError) as raised:
        args.ranks_per_node()
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("PET_NNODES", "0", "PET_NNODES=0: a job needs at least 1 node"),
        ("PET_MAX_RESTARTS", "", "PET_MAX_RESTARTS=: give a whole number"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE=yes is neither on nor off; set it to 1 or 0, or unset it"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x: give a time in seconds"),
    ],
)
def test_bad_variables_are_named(script: str, variable: str, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_run_args([script], {variable: text})
    assert str(raised.value) == sentence


def test_a_syntax_error_is_shown_before_anything_starts(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n\ndef f(:\n    pass\n")
    with pytest.raises(UsageError, match=r"bad\.py, line 3: invalid syntax: def f\(:$"):
        parse_run_args([str(bad)], {})
    assert parse_run_args(["--no-python", str(bad)], {}).no_python
    assert parse_run_args(["-m", str(bad)], {}).module
    assert parse_run_args([str(bad)], {"PYTHON_EXEC": "/usr/bin/other"}).python == "/usr/bin/other"


def test_scripts_that_python_runs_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").touch()
    packed, latin = tmp_path / "app.pyz", tmp_path / "latin.py"
    packed.write_bytes(b"PK\x03\x04\0\0not text")
    latin.write_bytes(b"# coding: latin-1\ns = '\xe9\\d'\nreturn_ = 1 is 1\n")  # and two SyntaxWarnings
    for path in (tmp_path, packed, latin):
        assert parse_run_args([str(path)], {}).script == str(path)


def test_unreadable_script(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # chmod would not stop root

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=rf"train\.py .*{os.strerror(errno.EACCES)}$"):
        parse_run_args([script], {})


def test_nproc_is_counted_as_torchrun_counts() -> None:
    from torch.distributed.run import determine_local_world_size

    assert resolve_nproc("cpu") == determine_local_world_size("cpu")
    assert resolve_nproc(7) == 7


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("0,2", 2), ("3,1,0", 3), ("0,-1,2", 1), ("0,4,1", 1), ("GPU-5e, GPU-7a", 2), ("", 0), ("-1", 0)],
)
@pytest.mark.parametrize("where", ["dev", "proc"])
def test_gpus_are_counted_as_cuda_would_show_them(tmp_path: Path, where: str, visible: str | None, count: int) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia-uvm").touch()
    for gpu in range(4):
        if where == "dev":
            (tmp_path / "dev" / f"nvidia{gpu}").touch()
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{gpu}:00.0").mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert resolve_nproc("auto", env, tmp_path) == (count or resolve_nproc("cpu"))
    if count:
        assert resolve_nproc("gpu", env, tmp_path) == count
    else:
        with pytest.raises(UsageError, match="--nproc-per-node gpu: "):
            resolve_nproc("gpu", env, tmp_path)
