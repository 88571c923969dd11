"""The requests to a Kubernetes API server that a fleet makes; a failure is an OSError with the server's own words."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

import httpx2
import msgspec
import yaml
from lightkube import ApiError, AsyncClient, KubeConfig, operators
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, Pod, Secret
from lightkube.types import PatchType

from holdfast.controller_interfaces import FleetRefusal
from holdfast.fleet.pod_manifest import RUN_LABEL, Manifest
from holdfast.fleet.pod_reading import HostView, PodView, view_host, view_pod

Kind = TypeVar("Kind", Pod, Secret)
Answer = TypeVar("Answer")
FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 403, 404, 409, 410
_REFUSED = (400, 403, 404, 422)  # for good, unless it is a quota, which others may free
_LACKS_RIGHT = " cannot "  # an API server that has just started says so to everybody, until it knows who may what
_PLUGINS = ("v1alpha1", "v1beta1")  # versions of client.authentication.k8s.io
_RIGHTS_S = 30.0
_AGAIN_S = 1.0
_CHUNK = 500
_TIMEOUT_S = 20.0


class KubernetesError(OSError):
    """The API server refused or failed; `status` is the HTTP status, or 0 if it did not answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class UnknownFieldError(ValueError):
    """A manifest has an unknown field, which this client would drop."""


def read_config() -> KubeConfig:
    """Return the credentials of this pod's service account or of the kubeconfig. Raise OSError if there are none that
    can be used."""
    try:
        config = KubeConfig.from_env()
        if chosen := config.get():
            _check_credentials(chosen)
        return config
    except (ConfigError, OSError) as e:
        refusal = KubernetesError(f"there are no credentials for a Kubernetes cluster: {e}")
    except KeyError as e:
        refusal = KubernetesError(f"there are no credentials for a Kubernetes cluster: the kubeconfig lacks {e}")
    except (yaml.YAMLError, ValueError) as e:
        refusal = KubernetesError(f"the kubeconfig cannot be read: {' '.join(str(e).split())}")
    except (AttributeError, TypeError):  # of lightkube, for parts of another kind, or none
        refusal = KubernetesError("the kubeconfig is empty, or no mapping with clusters, users and contexts")
    raise refusal  # without the error that led to it, whose frames would keep lightkube's temporary files open


def _check_credentials(chosen: SingleConfig) -> None:
    """Raise ConfigError or OSError if no client can be made of a cluster and a user."""
    if chosen.user is None:
        raise ConfigError(f"the context {chosen.context_name} of the kubeconfig names no user")
    if chosen.user.exec and not chosen.user.exec.apiVersion.endswith(_PLUGINS):
        known = " and ".join(_PLUGINS)
        raise ConfigError(f"the kubeconfig's plugin speaks {chosen.user.exec.apiVersion}; known are {known}")
    for path in (chosen.cluster.certificate_auth, chosen.user.client_cert, chosen.user.client_key):
        if path and not os.path.exists(chosen.abs_file(path)):
            raise ConfigError(f"there is no {path}, which the kubeconfig names")
    ConnectionParams().httpx_params(chosen)


def default_namespace(config: KubeConfig) -> str:
    chosen = config.get()
    return chosen.namespace if chosen else "default"


def check_pod(manifest: Manifest) -> None:
    """Raise UnknownFieldError if the manifest has a field that pods lack, ValueError if a field has a wrong type."""
    try:
        kept = Pod.from_dict(manifest).to_dict()
    except (msgspec.ValidationError, TypeError) as e:
        raise ValueError(str(e)) from None
    if missing := _first_missing(manifest, kept, ""):
        raise UnknownFieldError(f"no pod has a field {missing}")


def _typed(kind: type[Kind], manifest: Manifest) -> Kind:
    return cast(Kind, kind.from_dict(manifest))


def _first_missing(given: object, kept: object, path: str) -> str:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            where = f"{path}.{key}".lstrip(".")
            if value in (None, [], {}):
                continue
            if key not in kept:
                return where
            if found := _first_missing(value, kept[key], where):
                return found
    elif isinstance(given, list) and isinstance(kept, list):
        for at, (one, other) in enumerate(zip(given, kept, strict=False)):
            if found := _first_missing(one, other, f"{path}[{at}]"):
                return found
    return ""


@contextlib.contextmanager
def _told_errors() -> Iterator[None]:
    try:
        yield
    except ApiError as e:
        status = e.status.code or 0
        raise KubernetesError(f"Kubernetes says: {e.status.message or f'status {status}'}", status) from None
    except httpx2.HTTPStatusError as e:
        status = e.response.status_code
        raise KubernetesError(f"Kubernetes answers with status {status}", status) from None
    except (httpx2.HTTPError, ConfigError) as e:
        raise KubernetesError(f"the Kubernetes API server cannot be asked: {str(e) or type(e).__name__}") from None
    except (msgspec.DecodeError, json.JSONDecodeError, KeyError) as e:  # of a proxy, or a plugin for credentials
        raise KubernetesError(f"what answers for the Kubernetes API server is not understood: {_line_of(e)}") from None


def _line_of(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())


async def ask_until_refused(ask: Callable[[], Awaitable[Answer]], tell: Callable[[str], None]) -> Answer:
    """Return the result of `ask`. If Kubernetes says that we lack a right, `tell` its words, and call `ask` again for
    up to 30 s. Raise FleetRefusal after that, or at once for another refusal."""
    until, told = time.monotonic() + _RIGHTS_S, ""
    while True:
        try:
            return await ask()
        except KubernetesError as e:
            if e.status not in _REFUSED or "exceeded quota" in str(e):
                raise
            if _LACKS_RIGHT not in str(e) or time.monotonic() > until:
                raise FleetRefusal(str(e)) from None
            if str(e) != told:
                tell(told := str(e))
        await asyncio.sleep(_AGAIN_S)


class KubernetesClient:
    """Sends requests to one namespace of a Kubernetes cluster."""

    def __init__(self, config: KubeConfig, namespace: str, before_change: Callable[[], object]) -> None:
        """`before_change` is called before every request that changes pods, secrets or machines. It raises if another
        controller acts by now."""
        self._before_change = before_change
        self._client = AsyncClient(
            config, namespace=namespace, timeout=httpx2.Timeout(_TIMEOUT_S), field_manager="holdfast"
        )

    async def close(self) -> None:
        await self._client.close()

    async def create_pod(self, manifest: Manifest) -> PodView:
        self._before_change()
        with _told_errors():
            return view_pod((await self._client.create(_typed(Pod, manifest))).to_dict())

    async def create_secret(self, manifest: Manifest) -> None:
        self._before_change()
        with _told_errors():
            await self._client.create(_typed(Secret, manifest))

    async def find_pod(self, name: str) -> PodView | None:
        try:
            with _told_errors():
                return view_pod((await self._client.get(Pod, name)).to_dict())
        except KubernetesError as e:
            if e.status == NOT_FOUND:
                return None
            raise

    async def list_pods(self, run: str | None) -> tuple[list[PodView], str]:
        """Return the pods of a run, or of all runs if None, and the version from which a watch can continue."""
        with _told_errors():
            listed = self._client.list(Pod, labels={RUN_LABEL: run or operators.exists()}, chunk_size=_CHUNK)
            found = [view_pod(pod.to_dict()) async for pod in listed]
            return found, listed.resourceVersion

    async def watch_pods(self, run: str, version: str) -> AsyncIterator[tuple[PodView, bool]]:
        """Yield every change of the run's pods after `version`, and whether the change removed the pod."""
        with _told_errors():
            async for kind, pod in self._client.watch(Pod, labels={RUN_LABEL: run}, resource_version=version):
                yield view_pod(pod.to_dict()), kind == "DELETED"

    async def delete_pod(self, name: str, grace_s: float) -> bool:
        """Delete a pod; its kubelet ends the containers first. Return False if there is no such pod."""
        return await self._delete(Pod, name, max(1, round(grace_s)))  # 0 would not wait for the kubelet

    async def delete_secret(self, name: str) -> bool:
        return await self._delete(Secret, name)

    async def delete_lease(self, name: str) -> bool:
        return await self._delete(Lease, name)

    async def _delete(self, kind: Any, name: str, grace_s: int | None = None) -> bool:
        self._before_change()
        try:
            with _told_errors():
                await self._client.delete(kind, name, grace_period=grace_s)
        except KubernetesError as e:
            if e.status == NOT_FOUND:
                return False
            raise
        return True

    async def find_host(self, name: str) -> HostView:
        with _told_errors():
            return view_host((await self._client.get(Node, name)).to_dict())

    async def taint_host(self, name: str, key: str, value: str) -> None:
        """Keep new pods off a machine until somebody removes the taint."""
        self._before_change()
        with _told_errors():
            host = await self._client.get(Node, name)
            taints = [one.to_dict() for one in (host.spec.taints if host.spec else None) or []]
            if any(one["key"] == key for one in taints):
                return
            patch = {
                "metadata": {"resourceVersion": host.metadata.resourceVersion if host.metadata else None},
                "spec": {"taints": [*taints, {"key": key, "value": value, "effect": "NoSchedule"}]},
            }
            await self._client.patch(Node, name, patch, patch_type=PatchType.MERGE)

    async def get_or_make_lease(self, name: str, labels: dict[str, str]) -> Lease:
        """Return the lease of this name. Make it if there is none."""
        with _told_errors():
            try:
                return await self._client.get(Lease, name)
            except ApiError as e:
                if e.status.code != NOT_FOUND:
                    raise
            try:
                return await self._client.create(Lease(metadata=ObjectMeta(name=name, labels=labels)))
            except ApiError as e:
                if e.status.code != CONFLICT:
                    raise
                return await self._client.get(Lease, name)

    async def replace_lease(self, lease: Lease) -> Lease:
        """Write a lease back. Raise KubernetesError with CONFLICT if somebody else was faster."""
        with _told_errors():
            return await self._client.replace(lease)
