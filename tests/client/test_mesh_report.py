"""Parallel groups as a script has made them: a mesh, names and sizes, or what Megatron set up."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from holdfast.client.training import mesh_report


class Mesh:
    """As much of a DeviceMesh as can be had without a process group."""

    def __init__(self, ranks: torch.Tensor, *names: str) -> None:
        self.mesh, self.mesh_dim_names = ranks, names or None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_MESH", str(tmp_path / "mesh.json"))
    monkeypatch.setenv("WORLD_SIZE", "8")
    return tmp_path / "mesh.json"


def test_a_device_mesh(place: Path) -> None:
    mesh_report.report_mesh(Mesh(torch.arange(8).reshape(2, 4), "dp", "tp"))
    assert json.loads(place.read_text()) == [["dp", 2], ["tp", 4]]
    assert [path.name for path in place.parent.iterdir()] == ["mesh.json"]


def test_names_and_sizes(place: Path) -> None:
    mesh_report.report_mesh({"pp": 2, "dp": 4})
    assert json.loads(place.read_text()) == [["pp", 2], ["dp", 4]]


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        (Mesh(torch.arange(8).reshape(2, 4).flip(0), "dp", "tp"), "row-major"),
        (Mesh(torch.arange(8).reshape(2, 4)), "mesh_dim_names"),
        (Mesh(torch.arange(4).reshape(2, 2), "dp", "tp"), r"4 ranks.*\b8$"),
        ({"pp": 3}, r"3 ranks.*\b8$"),
    ],
)
def test_a_mesh_that_says_nothing_about_these_ranks(place: Path, mesh: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mesh_report.report_mesh(mesh)
    assert not place.exists()


def test_megatron(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleType("megatron.core.parallel_state")
    ready = False
    sizes = {"tensor_model": 2, "pipeline_model": 2, "data": 2, "context": 1}
    state.model_parallel_is_initialized = lambda: ready  # type: ignore[attr-defined]
    for name, size in sizes.items():
        setattr(state, f"get_{name}_parallel_world_size", lambda size=size: size)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    mesh_report.report_mesh(None)
    assert not place.exists()
    ready = True
    mesh_report.report_mesh(None)
    assert json.loads(place.read_text()) == [["pp", 2], ["dp", 2], ["tp", 2]]


def test_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_MESH", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    mesh_report.report_mesh({"dp": 2})
