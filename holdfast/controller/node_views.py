"""Views of a job's nodes, for its status: their roles, steps and losses, and what their machines tell."""

import msgspec

from holdfast.controller.control_loop import Controller
from holdfast.core.detect.link_traffic import pick_job_links
from holdfast.model.observation import LinkTraffic


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    role: str  # one of core/decide/node_roles.py
    ranks: str = ""
    step: int = -1
    loss: float | None = None
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
        step, loss, phase = (number_step(current), current.loss, current.phase) if current else (-1, None, "")
        share = current.tensor_share if current else None
        shown = NodeView(node=seat.node, role=role, ranks=ranks, step=step, loss=loss, phase=phase, tensor_share=share)
        views.append(_add_traffic(shown, traffic.get(seat.node, ())))
    return (*views, *(NodeView(node=node, role=role, reason=queued.get(node, "")) for node, role in roles.items()))


def _add_traffic(view: NodeView, links: tuple[LinkTraffic, ...]) -> NodeView:
    if not (ours := pick_job_links(links)):
        return view
    into, out = sum(link.in_bytes_s for link in ours), sum(link.out_bytes_s for link in ours)
    return msgspec.structs.replace(view, in_bytes_s=into, out_bytes_s=out)
