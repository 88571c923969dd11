"""`holdfast ls --fleet`: the runs of a cluster, as its own commands tell of them."""

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs.run_directory import NO_RUN
from tests.kube.cluster import write_kubeconfig
from tests.kube.fake_api import FakeApi


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A squeue that says what Slurm's would, in the form that it is asked for."""
    (folder / "squeue").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_runs_on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "RUNNING|4|ann|1700000100|holdfast-gpt-n0\nPENDING|2|ann|1700000200|holdfast-gpt-n4\n"
    asked = '[ "$2" = "--format=%T|%D|%u|%V|%j" ] && [ "$SLURM_TIME_FORMAT" = %s ] || exit 1'
    stand_in(tmp_path, monkeypatch, f"{asked}\ncat <<'END'\n{lines}END")
    assert main(["ls", "--fleet", "slurm"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gpt  running with 4 nodes, step unknown, and 2 more waiting  of ann  started ")
    assert main(["ls", "--fleet", "slurm", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["nodes"], row["step"], row["who"], row["started_at"]) == (6, None, "ann", 1700000100.0)
    stand_in(tmp_path, monkeypatch, "echo 'slurm_load_jobs error: down' >&2; exit 1")
    assert main(["ls", "--fleet", "slurm"]) == 2
    assert "squeue: slurm_load_jobs error: down" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(["ls", "--fleet", "slurm"]) == 2
    assert " squeue " in capsys.readouterr().err


def test_runs_on_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = FakeApi()
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path, api.url, "none")))
    words = ["ls", "--fleet", "kubernetes", "--kube-namespace", "ml"]
    try:
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(NO_RUN)
        for name, labels in (("gpt-n0", {"holdfast.dev/run": "gpt"}), ("other", {})):
            spec = {"containers": [{"name": "holdfast", "image": "lab:1"}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
            api.objects.create("pods", "ml", pod)
        assert main(words) == 0
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 1 and said[0].startswith("gpt  waiting with 1 node, step unknown  started ")
        assert said[0].endswith("namespace ml")
    finally:
        api.close()
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("holdfast ls: --fleet kubernetes: ")


def test_a_list_is_of_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--fleet", "slurm", "--journal", "postgres://h/d"]) == 2
    assert "--journal " in (said := capsys.readouterr().err) and "--fleet " in said
    assert main(["ls", "--kube-namespace", "ml"]) == 2
    assert "--kube-namespace " in (said := capsys.readouterr().err) and "--fleet kubernetes" in said
