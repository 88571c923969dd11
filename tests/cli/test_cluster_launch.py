"""What all clusters have in common: how their nodes join, and what does not go with them."""

from pathlib import Path

import msgspec
import pytest

from holdfast import config
from holdfast.cli import main
from holdfast.cli.launch.cluster_launch import join_args
from holdfast.cli.launch.kubernetes_launch import make_pod_spec
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

JOB = Job(run_id="r 1", min_nodes=2, max_nodes=4, standbys=1, max_restarts=None)


@pytest.mark.parametrize(
    "entry",
    [
        EntryPoint(argv=("no_such_script.py", "--lr", "1"), python="/usr/bin/python3", role="r"),
        EntryPoint(argv=("package.train",), module=True, python="/usr/bin/python3"),
        EntryPoint(argv=("./program",)),
    ],
)
def test_a_node_joins_with_what_the_run_has_though_its_host_may_lack_the_script(entry: EntryPoint) -> None:
    run = RunSpec(
        job=JOB, entry=entry, settings=Settings(), fleet="slurm", nproc=8, log_dir="", host="10.0.0.1", port=29
    )
    args = join_args(run, "n12", "--redirects", "3")
    assert (args.fleet, args.endpoints, args.run_id, args.node_rank) == ("join", (("10.0.0.1", 29),), "r 1", 12)
    assert (args.min_nodes, args.max_nodes, args.nproc, args.role) == (2, 4, 8, entry.role)
    assert (args.script, *args.script_args) == entry.argv and args.redirects.streams_of(0) == 3
    assert (args.module, args.no_python) == (entry.module, not entry.python)


@pytest.mark.parametrize("flag", [("--nproc-per-node", "gpu"), ("--set", "door.key=k")])
def test_what_needs_a_node_of_this_host_is_refused(
    flag: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("")
    both = ("--set", "door.certificate=c", "--set", "door.authority=a") if flag[0] == "--set" else ()
    where = ("--fleet", "kubernetes", "--rdzv-endpoint", "127.0.0.1:0", "--kube-image", "lab:1")
    assert main(["run", *where, *flag, *both, str(tmp_path / "train.py")]) == 2
    said = capsys.readouterr().err
    named = ("--nproc-per-node gpu",) if not both else ("door.key", "--fleet kubernetes")
    assert all(f" {name}" in said for name in named), said


def test_a_pod_is_not_told_where_people_are_told() -> None:
    settings = config.load(None, [("hook.url", "https://hooks.test/services/5ec2e7"), ("silence.silence_s", "7")])
    run = RunSpec(
        job=Job(run_id="r", min_nodes=1, max_nodes=1),
        entry=EntryPoint(argv=("train.py",)),
        settings=settings,
        fleet="kubernetes",
        nproc=1,
        log_dir="",
        console_files=("out",),
    )
    told = msgspec.json.encode(make_pod_spec(run))
    assert b"5ec2e7" not in told
    read = msgspec.json.decode(told, type=RunSpec)
    assert (read.console_files, read.settings.silence.silence_s) == ((), 7)
