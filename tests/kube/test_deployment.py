"""The manifests that we ship: every one is what current schemas allow, and what a cluster takes."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from holdfast.cli.run_flags.run_arguments import parse_run_args
from holdfast.fleet.pod_manifest import PodShape, find_template_fault, make_pod, object_name, owner_reference
from tests.cli.driver import ROOT, until
from tests.kube.cluster import BINARIES

DEPLOY = ROOT / "deploy" / "kubernetes"
PARTS = ("kustomization.yaml", "pod_template.yaml", "journal.yaml")  # of manifests, and not these themselves
FILES = sorted(
    path
    for path in DEPLOY.rglob("*.yaml")
    if path.name not in PARTS and path.parent.name != "postgres"  # patches
)
FOREIGN = ("ServiceMonitor", "JobSet", "TrainJob")  # custom resources: their schemas are elsewhere
BUILDS = ("base", *(f"overlays/{path.name}" for path in sorted((DEPLOY / "overlays").iterdir())))


def manifests(text: str) -> Iterator[dict[str, Any]]:
    yield from filter(None, yaml.safe_load_all(text))


def kubectl() -> str:
    """Debian's, where it was built for the tests, else any."""
    own = BINARIES / "kubectl"
    found = str(own) if own.exists() else shutil.which("kubectl")
    if found is None:
        pytest.skip("there is no kubectl here")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_manifests_are_valid(path: Path) -> None:
    for found in manifests(path.read_text()):
        if found["kind"] not in FOREIGN:
            kubernetes_validate.validate(found, "1.37", strict=True)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("pod_template.yaml")), ids=lambda path: path.parent.name)
def test_templates_make_valid_pods(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    assert not find_template_fault(template)
    shape = PodShape(run="r", namespace="n", template=template, group=2)
    kubernetes_validate.validate(make_pod(shape, "n0", ("x",), owner_reference("r", "u"), ()), "1.37", strict=True)
    assert shape.is_queued == (path.parent.name == "kueue")


def test_the_controller_is_started_with_flags_that_there_are_and_as_its_lease_is_called(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "pod_template.yaml").touch()
    [deployment] = manifests((DEPLOY / "base" / "controller.yaml").read_text())
    [lease] = manifests((DEPLOY / "base" / "lease.yaml").read_text())
    [own] = deployment["spec"]["template"]["spec"]["containers"]
    told = {"/etc/holdfast-run": str(tmp_path), "$(NAMESPACE)": "ml"}
    words = [re.sub(r"/etc/holdfast-run|\$\(NAMESPACE\)", lambda found: told[found[0]], word) for word in own["args"]]
    args = parse_run_args([str(tmp_path / word) if word == "train.py" else word for word in words], {})
    assert args.fleet == "kubernetes" and args.endpoints == (("holdfast.ml.svc", 29400),)
    assert object_name(args.run_id or "") == lease["metadata"]["name"]


def build(folder: str) -> list[dict[str, Any]]:
    built = subprocess.run([kubectl(), "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=True)
    return list(manifests(built.stdout))


def test_controllers_with_a_journal_in_a_database_share_no_volume() -> None:
    found = {one["kind"]: one for one in build("overlays/postgres")}
    assert "PersistentVolumeClaim" not in found and found["Deployment"]["spec"]["replicas"] == 2
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "state", "emptyDir": {}} in pod["volumes"]
    [own] = pod["containers"]
    words = own["args"][: own["args"].index("train.py")]
    args = parse_run_args([*(word for word in words if "template" not in word), "-m", "train"], {})
    assert args.journal == "postgres://holdfast@postgres/holdfast" and args.fleet == "kubernetes"
    assert {"HOLDFAST_TOKEN", "PGPASSWORD", "HOLDFAST_HOME"} <= {one["name"] for one in own["env"]}


@pytest.mark.parametrize("folder", BUILDS)
def test_kustomize_builds_base_and_overlays(folder: str) -> None:
    found = build(folder)
    for one in found:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, "1.37", strict=True)
    [pod] = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"]
    [generated] = [one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"]
    assert generated in [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]


CONTROLLER = (DEPLOY / "base" / "controller.sh").read_text()


@pytest.mark.e2e
def test_the_controllers_script_begins_takes_up_and_stays_after_the_end(tmp_path: Path) -> None:
    """The script itself, with a `holdfast` that notes its words and waits."""
    run, note = tmp_path / "run", tmp_path / "words"
    stands_in = f'#!/bin/sh\nmkdir -p {run}\ntouch {run}/run.json\necho "$@" >>{note}\nexec sleep 1000\n'
    (tmp_path / "holdfast").write_text(stands_in)
    (tmp_path / "holdfast").chmod(0o755)
    script = tmp_path / "controller.sh"
    script.write_text(CONTROLLER.replace("/state/run", str(run)))
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", str(script), "--nnodes=2", "train.py"], env=env, start_new_session=True)

    def end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        os.killpg(process.pid, signal.SIGKILL)  # as the end of a container does

    for count, words in ((1, f"run --run-dir {run} --nnodes=2 train.py"), (2, f"run --resume {run}")):
        process = begin()
        until(lambda count=count: note.exists() and len(note.read_text().splitlines()) == count, "a start")  # type: ignore[misc]
        assert note.read_text().splitlines()[-1] == words
        end(process)
    (run / "exit.json").touch()
    process = begin()
    until(lambda: re.search(r"\bsleep\b", _children(process.pid)), "it to stay")
    assert len(note.read_text().splitlines()) == 2, "a run that has ended is not started again"
    end(process)


@pytest.mark.e2e
def test_the_controllers_script_leaves_a_run_in_a_database_to_holdfast(tmp_path: Path) -> None:
    """It begins anew after whatever end but 0, which says that the run has ended."""
    (tmp_path / "holdfast").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/words\nexit $(cat {tmp_path}/code)\n')
    (tmp_path / "holdfast").chmod(0o755)
    (tmp_path / "controller.sh").write_text(CONTROLLER.replace("/state/run", str(tmp_path / "run")))
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", str(tmp_path / "controller.sh"), "--journal=postgres://db/h", "--nnodes=2", "train.py"]
    (tmp_path / "code").write_text("3")
    assert subprocess.run(command, env=env, check=False).returncode == 3
    (tmp_path / "code").write_text("0")
    process = subprocess.Popen(command, env=env, start_new_session=True)
    until(lambda: re.search(r"\bsleep\b", _children(process.pid)), "it to stay")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    words = "run --journal=postgres://db/h --nnodes=2 train.py"
    assert (tmp_path / "words").read_text().splitlines() == [words, words]


def _children(pid: int) -> str:
    return " ".join(child.name() for child in psutil.Process(pid).children())
