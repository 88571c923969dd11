"""What a job that lacks nodes waits for: how many, in whose place, since when, and what ends the wait."""

import msgspec

from holdfast.core.decide.job_state import JobState
from holdfast.core.incident.incident_text import list_some
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.job_phase import Phase

_MINUTES_S, _HOURS_S = 180.0, 7200.0  # from which on a time is told in these


class NodeWait(msgspec.Struct, frozen=True, kw_only=True):
    """A wait for nodes. Its facts change only if something happens, but not with the time."""

    since: float
    facts: str
    ends: str  # what ends the wait, and when at the latest

    def describe(self, now: float) -> str:
        stood_s = now - self.since
        so_far = f", for {_span(stood_s)} so far" if stood_s >= 1.0 else ""
        return f"the job waits for nodes{so_far}: {self.facts}; {self.ends}"


def find_node_wait(state: JobState, now: float) -> NodeWait | None:
    """Return the job's wait for nodes; None if it waits for nothing, or for something else."""
    nodes = state.nodes
    other = state.fence.until > now or state.not_before > now or nodes.links.blocks_launch(now, nodes.active)
    if state.phase is not Phase.WAITING or state.wait_until is None or other:
        return None
    facts = "; ".join((_describe_missing(state), *_describe_expected(state))) + nodes.wait_clause
    return NodeWait(since=state.waits_since, facts=facts, ends=_describe_end(state, now, state.wait_until))


def _describe_missing(state: JobState) -> str:
    nodes = state.nodes
    there = f"{nodes.node_count} of {state.job.max_nodes} are there"
    left = [seat for seat in nodes.seats if seat.node in nodes.out]
    empty = [f"{s.node} ({format_ranks(range(s.first_rank, s.first_rank + s.nproc))})" for s in left]
    return f"{there}, to replace {list_some(empty)}" if empty else there


def _describe_expected(state: JobState) -> list[str]:
    """Return what is known of the nodes that are not there: on their way, queued at the fleet, or being checked."""
    standbys = state.nodes.standbys
    coming = len(standbys.coming) - len(standbys.queued)
    checked = len({*standbys.checking.values()} - standbys.pool.keys())
    queue = standbys.fleet.describe_queue(standbys.coming)
    found = {"on the way": coming, "being checked": checked}
    told = [f"{count} {'is' if count == 1 else 'are'} {what}" for what, count in found.items() if count > 0]
    return [*told, *([f"of the others: {queue}"] if queue else [])]


def _describe_end(state: JobState, now: float, until: float) -> str:
    nodes, begun = state.nodes, "goes on" if state.generation else "begins"
    lack = state.job.min_nodes - nodes.node_count
    if lack <= 0:
        left = f" in {_span(state.last_call_at - now)}" if state.last_call_at else ""
        return f"it {begun} with these{left}" if left else f"it {begun} with the next one"
    more = f"it {begun} with {lack} more"
    if due := nodes.choose_unchecked(state.waits_since):
        its = "its check has" if len(due.nodes) == 1 else "their checks have"
        return f"{more}, in {_span(due.at - now)} even if {its} not ended"
    if nodes.waits_in_queue:
        return f"{more}, however long the queue is"
    asks = state.limits.ask_s and not state.requests.asking
    return f"{more}, or {'asks a person' if asks else 'gives up'} in {_span(until - now)}"


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < _MINUTES_S:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS_S else f"{seconds / 3600:.1f} h"
