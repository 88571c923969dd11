"""One sentence about what a job is doing now; incidents and planned restarts describe what it did before."""

from typing import TYPE_CHECKING

from holdfast.core.incident import incident_text
from holdfast.model.event import Phase

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider


def tell_present(d: "Decider", now: float, step: int, ending: str) -> str:
    """Return one line on what the job is doing now. It uses only the current state, because the reason of the last
    decision may be hours old."""
    match d.phase:
        case Phase.NEW:
            return "the job has not begun"
        case Phase.WAITING:
            return _waited_for(d, now) + _trouble_text(d)
        case Phase.LAUNCHING:
            return (
                f"generation {d.generation} is being launched on {', '.join(s.node for s in d.seats)}{_trouble_text(d)}"
            )
        case Phase.STARTING:
            return f"the ranks of generation {d.generation} run; no step was seen yet{_trouble_text(d)}"
        case Phase.TRAINING:
            return f"training; every rank has made step {step}{_named_ranks(d, now)}"
        case Phase.STOPPING:
            return f"all ranks are being stopped{_trouble_text(d)}"
        case Phase.PROBING:
            return f"nodes are being tested{_trouble_text(d)}"
        case Phase.PAUSING:
            return f"all ranks are being ended for a planned restart: {d.pause.why if d.pause else d.people.held}"
        case Phase.HELD:
            return f"no rank runs; {f'{d.people.held} holds the job' if d.people.held else 'a person is asked'}"
        case Phase.ENDING:
            return f"the job is ending: {ending}"
        case Phase.DONE:
            return f"the job has ended: {ending}"


def _waited_for(d: "Decider", now: float) -> str:
    if d.fence.until > now:
        return d.fence.describe_wait(now)
    if d.not_before > now:
        return f"the next launch waits for another {d.not_before - now:.0f} s"
    return f"the job waits for nodes: {d.nodes.node_count} of {d.job.max_nodes} are there"


def _trouble_text(d: "Decider") -> str:
    """Return a clause about the open incident or the planned restart under way; "" if there is neither."""
    if d.incident is not None and d.incident.alarms:
        return f", as {incident_text.describe_cause(d.incident.alarms[0])}"
    return f", after a planned restart: {d.pause.why}" if d.pause is not None else ""


def _named_ranks(d: "Decider", now: float) -> str:
    if d.named is None or d.named.generation != d.generation:
        return ""
    who = f"rank {', '.join(map(str, d.named.ranks))} on {', '.join(d.named.suspects)}"
    return f"; {who} keeps the others waiting for {now - d.named.at:.0f} s"
