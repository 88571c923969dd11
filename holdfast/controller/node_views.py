"""Views of a job's nodes, for its status: their roles, steps and losses, and what their machines tell."""

import msgspec

from holdfast.controller.control_loop import Controller
from holdfast.core.detect.link_traffic import pick_job_links
from holdfast.model.observation import Beat, LinkTraffic


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    role: str  # one of core/decide/node_roles.py
    ranks: str = ""
    step: int = -1
    loss: float | None = None
    loss_step: int = -1  # the step of that loss: what a script logs comes after the step is counted; -1: not known
    phase: str = ""
    reason: str = ""  # why the cluster has it wait, in its own words
    in_bytes_s: float | None = None  # over the links of its machine; None: not known, or another node there tells it
    out_bytes_s: float | None = None
    tensor_share: float | None = None  # of the time, its GPUs' tensor cores worked; None: as with the links


def view_nodes(controller: Controller, queued: dict[str, str]) -> tuple[NodeView, ...]:
    """Return a view of every node; nodes with ranks come first."""
    view, number_step = controller.view, controller.detectors.pace.number_step
    beats, traffic = controller.registry.beats, controller.detectors.network.list_traffic(controller.clock())
    roles, views = view.assign_roles(controller.ledger.admitting), []
    for seat in view.seats:
        beat, role = beats.get(seat.node), roles.pop(seat.node)
        current = beat if beat and beat.generation == view.generation else None
        ranks = f"{seat.first_rank}-{seat.first_rank + seat.nproc - 1}" if seat.nproc > 1 else str(seat.first_rank)
        shown = NodeView(node=seat.node, role=role, ranks=ranks)
        if current:
            shown = _add_progress(shown, current, number_step(current))
        views.append(_add_traffic(shown, traffic.get(seat.node, ())))
    left = {node: why for node, why in view.departures.items() if node in view.gone}
    told = left | queued
    return (*views, *(NodeView(node=node, role=role, reason=told.get(node, "")) for node, role in roles.items()))


def _add_progress(view: NodeView, beat: Beat, step: int) -> NodeView:
    """Add what a beat tells of training; `step` is the beat's step in the job's numbering."""
    loss_step = beat.loss_step + step - beat.step if beat.loss_step >= 0 and step >= 0 else -1
    told = {"step": step, "loss": beat.loss, "loss_step": loss_step}
    return msgspec.structs.replace(view, phase=beat.phase, tensor_share=beat.tensor_share, **told)


def _add_traffic(view: NodeView, links: tuple[LinkTraffic, ...]) -> NodeView:
    if not (ours := pick_job_links(links)):
        return view
    into, out = sum(link.in_bytes_s for link in ours), sum(link.out_bytes_s for link in ours)
    return msgspec.structs.replace(view, in_bytes_s=into, out_bytes_s=out)
