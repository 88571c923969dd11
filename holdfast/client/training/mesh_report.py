"""Reports a script's parallel groups to its node. These groups decide which nodes may be lost together."""

import json
import os
import sys
from typing import Any

MESH = "HOLDFAST_MESH"  # the file that one rank of a node writes

# Megatron numbers ranks in this order, the first over the farthest ones; experts are laid over dp and change nothing.
_MEGATRON = (("pp", "pipeline_model"), ("dp", "data"), ("cp", "context"), ("tp", "tensor_model"))


def report_mesh(mesh: object) -> None:
    """Write the mesh to the file that the node's agent reads.

    `mesh` is a DeviceMesh over all ranks in order, or a dict of names and sizes. None stands for Megatron's groups.
    """
    place = os.environ.get(MESH)
    dims = (_megatron_dims() if mesh is None else _mesh_dims(mesh)) if place else []
    if not place or not dims:
        return
    whole = f"{place}.{os.getpid()}"
    with open(whole, "w", encoding="utf-8") as file:
        json.dump(dims, file)
    os.replace(whole, place)


def _mesh_dims(mesh: Any) -> list[tuple[str, int]]:
    if isinstance(mesh, dict):
        return _check_dims([(str(name), int(size)) for name, size in mesh.items()])
    ranks, names = mesh.mesh, mesh.mesh_dim_names
    if ranks.flatten().tolist() != list(range(ranks.numel())):
        raise ValueError("the mesh must list ranks 0 to N-1 in row-major order")
    if not names:
        raise ValueError("the mesh has no dimension names; give mesh_dim_names")
    return _check_dims([*zip(names, map(int, ranks.shape), strict=True)])


def _megatron_dims() -> list[tuple[str, int]]:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return []
    sizes = [(name, getattr(state, f"get_{of}_parallel_world_size", lambda: 1)()) for name, of in _MEGATRON]
    return _check_dims([(name, int(size)) for name, size in sizes if size > 1])


def _check_dims(dims: list[tuple[str, int]]) -> list[tuple[str, int]]:
    ranks = 1
    for _, size in dims:
        ranks *= size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dims and ranks != world:
        told = ",".join(f"{name}={size}" for name, size in dims)
        raise ValueError(f"the mesh {told} has {ranks} ranks, but the job has {world}")
    return dims
