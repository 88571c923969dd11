"""The parallel groups that a script tells of: they count unless the user has named some."""

from holdfast.core.decide.job_state import JobState
from holdfast.model.action import Say
from holdfast.model.decider_events import MeshReport


def on_mesh_report(state: JobState, event: MeshReport) -> str:
    """Take over the parallel groups that the script has reported, unless the user gave some."""
    if not state.job.mesh:
        state.nodes.reported_mesh = event.mesh
        groups = ",".join(f"{name}={size}" for name, size in event.mesh)
        nodes, least = state.nodes, state.job.min_nodes
        more = f"; a replica takes {nodes.replica_nodes} nodes, so the job goes on with {nodes.fewest_nodes} or more"
        told = more if nodes.fewest_nodes > least else ""
        state.emit(Say(text=f"parallel groups of the script: {groups}{told}"))
    return ""
