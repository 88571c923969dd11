"""The manifests of pods: what holdfast adds to a template, and what it leaves as it is."""

import json
import re
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from holdfast.fleet.kubernetes_client import check_pod
from holdfast.fleet.pod_manifest import (
    AvoidedHosts,
    PodShape,
    find_template_fault,
    make_pod,
    make_secret,
    object_name,
    owner_reference,
    template_image,
)

OWNER = owner_reference("gpt", "0b3f")
AVOIDED = AvoidedHosts(never=("gpu-9", "gpu-1"), last=("gpu-4", "gpu-3"))
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "speech"}, "annotations": {"who": "me"}},
    "spec": {
        "priorityClassName": "research",
        "serviceAccountName": "trainer",
        "terminationGracePeriodSeconds": 7,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Equal", "value": "h100", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                    ]
                }
            }
        },
        "containers": [
            {"name": "logs", "image": "fluent:1"},
            {
                "name": "holdfast",
                "image": "ours:2",
                "env": [{"name": "HOLDFAST_HOME", "value": "/scratch"}],
                "resources": {"limits": {"nvidia.com/gpu": "8", "rdma/ib": "8"}},
                "volumeMounts": [{"name": "big-shm", "mountPath": "/dev/shm"}],
            },
        ],
        "volumes": [{"name": "big-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Gi"}}],
    },
}


def shape(**changed: Any) -> PodShape:
    own = PodShape(run="gpt", namespace="ml", gpus=4, group=5, folder="/src")
    return msgspec.structs.replace(own, **changed)


def pod_of(**changed: Any) -> dict[str, Any]:
    made = make_pod(shape(**changed), "n3", ("python3", "-m", "x"), OWNER, AVOIDED)
    kubernetes_validate.validate(made, "1.37", strict=True)
    kubernetes_validate.validate(made, "1.27", strict=True)
    check_pod(made)
    return made


def test_without_a_template_a_pod_has_all_that_a_node_needs() -> None:
    pod = pod_of(image="img:1", grace_s=90.0, endure_s=1800.0)
    meta, spec, [own] = pod["metadata"], pod["spec"], pod["spec"]["containers"]
    assert (meta["name"], meta["namespace"], meta["ownerReferences"]) == ("gpt-n3", "ml", [OWNER])
    assert meta["labels"]["holdfast.dev/run"] == "gpt" and meta["labels"]["holdfast.dev/node"] == "n3"
    assert spec["restartPolicy"] == "Never" and spec["terminationGracePeriodSeconds"] == 90
    assert spec["automountServiceAccountToken"] is False, "ranks may not speak for anybody"
    assert own["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert (own["image"], own["command"], own["workingDir"]) == ("img:1", ["python3", "-m", "x"], "/src")
    mounts = {one["mountPath"]: one["name"] for one in own["volumeMounts"]}
    sources = {one["name"]: one for one in spec["volumes"]}
    assert sources[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert sources[mounts["/etc/holdfast"]]["secret"] == {"secretName": "gpt-n3", "defaultMode": 0o440}
    tolerated = {one["key"]: one.get("tolerationSeconds") for one in spec["tolerations"]}
    assert tolerated == {
        "nvidia.com/gpu": None,
        "node.kubernetes.io/not-ready": 1800,
        "node.kubernetes.io/unreachable": 1800,
    }
    [spread] = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"


@pytest.mark.parametrize(
    ("pod", "container", "told"),
    [
        ({}, {}, {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}),
        ({"runAsUser": 7}, {}, {"runAsUser": 7, "fsGroup": 7, "fsGroupChangePolicy": "OnRootMismatch"}),
        ({"fsGroupChangePolicy": "Always"}, {"runAsUser": 9}, {"fsGroup": 9, "fsGroupChangePolicy": "Always"}),
        ({"runAsUser": 7, "fsGroup": 8}, {}, {"runAsUser": 7, "fsGroup": 8}),
    ],
)
def test_only_the_pods_own_group_reads_its_secret(
    pod: dict[str, Any], container: dict[str, Any], told: dict[str, Any]
) -> None:
    """A file of a secret belongs to root, so whoever the container runs as reads it by the group of the pod."""
    template = {"securityContext": pod, "containers": [{"name": "holdfast", "securityContext": container}]}
    assert pod_of(template=template, image="img:1")["spec"]["securityContext"] == told
    assert "fsGroup" not in pod or template["securityContext"] == pod


def test_hosts_are_avoided_in_every_alternative_of_the_template() -> None:
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["gpu-1", "gpu-9"]}
    for template, count in (({}, 1), (TEMPLATE, 2)):
        affinity = pod_of(template=template, image="img:1")["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert len(terms) == count and all(rule in term["matchExpressions"] for term in terms)
        assert not any("gpu-3" in json.dumps(term) for term in terms), "it may run there if there is no other host"
        [wish] = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["preference"]["matchExpressions"] == [rule | {"values": ["gpu-3", "gpu-4"]}]
    assert "affinity" not in make_pod(shape(image="i"), "n0", (), OWNER)["spec"]


def test_what_a_template_says_stays_as_it_is() -> None:
    pod = pod_of(template=TEMPLATE)
    spec, own = pod["spec"], pod["spec"]["containers"][1]
    assert pod["metadata"]["labels"]["team"] == "speech" and pod["metadata"]["annotations"] == {"who": "me"}
    assert (spec["priorityClassName"], spec["terminationGracePeriodSeconds"]) == ("research", 7)
    assert spec["containers"][0] == {"name": "logs", "image": "fluent:1"}
    assert own["image"] == "ours:2" and own["resources"]["limits"]["rdma/ib"] == "8"
    assert [one["name"] for one in own["env"]] == ["HOLDFAST_HOME", "HOLDFAST_HOST_ID"]
    assert own["env"][0]["value"] == "/scratch"
    assert [one["name"] for one in spec["volumes"]] == ["big-shm", "holdfast-secret", "holdfast-home"]
    assert sum(one["key"] == "nvidia.com/gpu" for one in spec["tolerations"]) == 1
    assert TEMPLATE["spec"]["containers"][1]["env"] == [{"name": "HOLDFAST_HOME", "value": "/scratch"}], (
        "a copy is used"
    )


def test_a_template_may_be_a_spec_alone() -> None:
    assert pod_of(template=TEMPLATE["spec"])["spec"] == pod_of(template=TEMPLATE)["spec"]
    assert template_image(TEMPLATE["spec"]) == template_image(TEMPLATE) == "ours:2" and template_image({}) == ""


def test_pods_in_a_queue_of_kueue_are_one_group() -> None:
    queued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}}
    meta = pod_of(template=queued, image="i")["metadata"]
    assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "gpt"
    assert meta["annotations"] == {"kueue.x-k8s.io/pod-group-total-count": "5"}
    assert shape(template=queued).is_queued and not shape().is_queued
    assert "annotations" not in pod_of(image="i")["metadata"]


def test_a_secret_brings_the_token() -> None:
    secret = make_secret(shape(), "n3", {"token": b"hf-node.1.2", "run.json": b"{}"}, OWNER)
    kubernetes_validate.validate(secret, "1.37", strict=True)
    assert secret["metadata"]["ownerReferences"] == [OWNER] and "hf-node" not in json.dumps(secret)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ([], "not a mapping"),
        ({"kind": "Deployment", "spec": {}}, "is a Deployment, not a Pod"),
        ({"spec": []}, "are not mappings"),
        ({"containers": {}}, "not a list"),
        ({"containers": [{"name": "a"}, {"name": "b"}]}, "name the one that trains holdfast"),
        ({"containers": [{"name": "a"}, {"name": "holdfast"}]}, ""),
        ({}, ""),
    ],
)
def test_templates_that_cannot_be_used(template: object, words: str) -> None:
    assert words in find_template_fault(template) and bool(find_template_fault(template)) == bool(words)


def test_a_field_that_no_pod_has_is_named() -> None:
    for template, words in (
        (
            {"containers": [{"image": "i", "resorces": {}, "imagePullPolice": "Always"}]},
            "containers[0].imagePullPolice",
        ),
        ({"nodeSelectors": {"a": "b"}}, "spec.nodeSelectors"),
        ({"terminationGracePeriodSeconds": "soon"}, "terminationGracePeriodSeconds"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            check_pod(make_pod(shape(template=template, image="i"), "n0", (), OWNER))


def test_names_of_runs_become_names_of_objects() -> None:
    for given, name in (
        ("GPT 4/x", "gpt-4-x"),
        ("20261117-22", "run-20261117-22"),
        ("a" * 90, "a" * 50),
        ("__", "run"),
    ):
        assert object_name(given) == name
