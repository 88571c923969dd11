"""The environment variables that a rank gets from its launch: torchrun's, and those for holdfast's client."""

import os
from pathlib import Path

from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import marked_run_id
from holdfast.model.node_errands import LaunchHere
from holdfast.wire import progress_environment
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.rank_memory import flight_log_writer
from holdfast.wire.releases.staged_release import StagedRelease, skip_variables, staged_environment
from holdfast.wire.run_and_node_specs import CACHE_VARIABLE, NodeSpec


def rank_variables(spec: NodeSpec, errand: LaunchHere, local: int, slots: str, keeper: Path) -> dict[str, str]:
    """Return torchrun's variables, and those that tell holdfast's client its keeper, slot and flight log."""
    seat, world = errand.seat, errand.world_size
    values: dict[str, object] = {
        "RANK": seat.first_rank + local,
        "LOCAL_RANK": local,
        "GROUP_RANK": seat.group_rank,
        "ROLE_RANK": seat.first_rank + local,
        "ROLE_NAME": spec.entry.role,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": seat.nproc,
        "GROUP_WORLD_SIZE": errand.group_world_size,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": errand.store_host,
        "MASTER_PORT": errand.store_port,
        "TORCHELASTIC_RESTART_COUNT": errand.generation - 1,
        "TORCHELASTIC_MAX_RESTARTS": errand.max_restarts,
        "TORCHELASTIC_RUN_ID": errand.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "HOLDFAST_NODE": spec.node,
        "HOLDFAST_KEEPER": keeper,
        "HOLDFAST_GENERATION": errand.generation,
        "HOLDFAST_BEGAN": errand.began_at,
        progress_environment.MADE_UP: int(errand.made_up),
        progress_environment.TOLD: int(errand.told),
        "HOLDFAST_REPLICA_EVERY": spec.settings.replica.every,
        progress_environment.RESUME: max(errand.restore.step, errand.restore.stored, 0),
        progress_environment.PATIENCE: spec.settings.recovery.survive_s,
        "HOLDFAST_SLOT": f"{slots}:{local}",
        "HOLDFAST_FLIGHT": f"{slots}:{flight_log_writer.flight_log_offset(spec.nproc, local)}",
    }
    if spec.settings.logs.trackers:
        values[progress_environment.TRACKED_RUN] = marked_run_id(errand.run_id, errand.mark)
    return {k: str(v) for k, v in values.items()} | skip_variables(errand.skips, errand.eases)


def release_environment(spec: NodeSpec, release: Release, staged: StagedRelease) -> dict[str, str]:
    """Return the environment that all ranks of a release share on this node."""
    given = make_rank_environment(os.environ)
    if spec.compiled and not given.get(CACHE_VARIABLE):
        given[CACHE_VARIABLE] = spec.compiled
    return staged_environment(given, spec.entry, release, staged)
