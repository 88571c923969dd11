"""What a job that lacks nodes waits for: how many, in whose place, why they are not there, and until when."""

from collections.abc import Callable

import msgspec

from holdfast.core.decide.job_state import JobState
from holdfast.core.incident.incident_text import list_some
from holdfast.core.rank_ranges import format_nodes, format_ranks
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.model.job_phase import Phase

_MINUTES_S, _HOURS_S = 180.0, 7200.0  # from which on a time is told in these
_LINE_CHARS = 110  # of the whole line, if there is more to say


class NodeWait(msgspec.Struct, frozen=True, kw_only=True):
    """A wait for nodes. Its facts change only if something happens, but not with the time."""

    since: float
    awaited: str  # "1 of 2 nodes, to replace n1 (ranks 2-3)"
    causes: tuple[str, ...]  # why they are not there; the first one matters most
    ends: str  # what happens then at the latest
    until: float = 0.0  # when; 0: the wait has no end of its own

    @property
    def facts(self) -> tuple[str, ...]:
        return (self.awaited, *self.causes)

    def describe(self, now: float, clock: Callable[[float], str] | None = None) -> str:
        """Return one line: what the job waits for, the cause, and the end. Further causes are told if they fit. With
        `clock`, the end is a time of day."""
        stood_s = now - self.since
        waits = f"has waited {_span(stood_s)}" if stood_s >= 1.0 else "waits"
        line, ends = f"the job {waits} for {self.awaited}", self.ends
        if self.until:
            ends += f" at {clock(self.until)}" if clock else f" in {_span(self.until - now)}"
        causes, room = self.causes[:1], _LINE_CHARS - len(line) - len(ends) - len(": ; ")
        for cause in self.causes[1:]:
            if len(", ".join((*causes, cause))) <= room:
                causes = (*causes, cause)
        told = cut_words(", ".join(causes), max(room, _LINE_CHARS // 4))
        return f"{line}{f': {told}' if told else ''}; {ends}"


def find_node_wait(state: JobState, now: float) -> NodeWait | None:
    """Return the job's wait for nodes; None if it waits for nothing, or for something else."""
    nodes = state.nodes
    other = state.fence.until > now or state.not_before > now or nodes.links.blocks_launch(now, nodes.active)
    if state.phase is not Phase.WAITING or state.wait_until is None or other:
        return None
    place, begins = _describe_place(state), "goes on" if state.generation else "begins"
    if due := nodes.choose_unchecked(state.waits_since):
        check = f"the check of {format_nodes(due.nodes)}" if len(due.nodes) == 1 else f"{len(due.nodes)} checks"
        awaited, ends = f"{check}{place}", f"it {begins} unchecked"
        return NodeWait(since=state.waits_since, awaited=awaited, causes=(), ends=ends, until=due.at)
    awaited, (ends, until) = f"{_count_awaited(state)}{place}", _find_end(state, state.wait_until)
    return NodeWait(since=state.waits_since, awaited=awaited, causes=_list_causes(state), ends=ends, until=until)


def _count_awaited(state: JobState) -> str:
    have, most = state.nodes.node_count, state.job.max_nodes
    fewest = state.nodes.fewest_nodes
    wanted, least = (fewest, "at least ") if have < fewest < most else (most, "")
    if not have:
        return f"{'a node' if wanted == 1 else f'{least}{wanted} nodes'}"
    return f"{wanted - have} of {least}{wanted} nodes"


def _describe_place(state: JobState) -> str:
    """Return a clause on the seats that are empty; "" if none is."""
    left = [seat for seat in state.nodes.seats if seat.node in state.nodes.out]
    if len(left) > 1:
        return f", to replace {list_some([seat.node for seat in left])}"
    return "".join(f", to replace {s.node} ({format_ranks(range(s.first_rank, s.first_rank + s.nproc))})" for s in left)


def _list_causes(state: JobState) -> tuple[str, ...]:
    """Return what is known of the nodes that are not there. What somebody must act on comes first."""
    nodes, standbys = state.nodes, state.nodes.standbys
    coming = len(standbys.coming) - len(standbys.queued)
    checked = len({*standbys.checking.values()} - standbys.pool.keys())
    queue = standbys.fleet.describe_queue(standbys.coming)
    found = (
        *nodes.wait_causes,
        f"{_count_nodes(len(standbys.queued))} {queue}" if queue.startswith("queued") else queue,
        f"{_count_nodes(checked)} being checked" if checked else "",
        f"{_count_nodes(coming)} on the way" if coming > 0 else "",
    )
    return tuple(filter(None, found)) or (_describe_none(state),)


def _describe_none(state: JobState) -> str:
    if not state.job.can_acquire:
        return "no other host has joined" if state.nodes.node_count else "no host has joined"
    asked = sum(state.nodes.standbys.acquiring.values())
    return f"{_count_nodes(asked)} asked for" if asked else "none is on the way"


def _count_nodes(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"


def _find_end(state: JobState, until: float) -> tuple[str, float]:
    """Return what ends the wait, and when; 0 if that has no time."""
    if state.nodes.node_count >= state.job.min_nodes:
        begun = "goes on" if state.generation else "begins"
        called = state.last_call_at or 0.0
        return f"it {begun} {'without them' if called else 'with the next one'}", called
    if state.nodes.waits_in_queue:
        return "it waits however long the queue is", 0.0
    asks = state.limits.ask_s and not state.requests.asking
    return f"it {'asks a person' if asks else 'gives up'}", until


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < _MINUTES_S:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS_S else f"{seconds / 3600:.1f} h"
