"""A real control plane for the tests of this folder, where its binaries are: see `make test-kube`."""

from collections.abc import Iterator

import pytest

from tests.kube.cluster import BINARIES, ControlPlane


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if not (BINARIES / "kube-apiserver").exists():
        pytest.skip("there is no Kubernetes here; make test-kube builds one")
    plane = ControlPlane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()
