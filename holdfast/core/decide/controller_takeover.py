"""Takeover by a new controller, including the case that its journal lacks entries that the nodes have seen."""

from typing import TYPE_CHECKING

from holdfast.core.decide import launching, recovery
from holdfast.model.action import Say
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Lost, Phase, Successor

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider

IDS = 10**6  # of actions in one epoch
_UNDER_WAY = (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING)
_UNKNOWN = "nodes that the journal does not name"
_OVER = (Phase.ENDING, Phase.DONE)


class ActionIds:
    """An iterator of action numbers that never repeats one: nodes never carry out the same number twice."""

    def __init__(self) -> None:
        self._next = 1

    def __iter__(self) -> "ActionIds":
        return self

    def __next__(self) -> int:
        self._next += 1
        return self._next - 1

    def skip_to(self, number: int) -> None:
        self._next = max(self._next, number + 1)


def lost_journal_sentence(lost: Lost) -> str:
    """Return a sentence that tells a person which journal entries were lost."""
    if lost.damaged:
        of = f", of at least {lost.of:,}" if lost.of > lost.kept + 1 else ""
        return f"the journal is damaged: entry {lost.kept + 1:,}{of}, and what came after it are lost"
    if not lost.of:
        return f"the journal ends at entry {lost.kept:,}, and the nodes know of more"
    if not lost.kept:
        return f"the journal lost all of its entries (at least {lost.of:,})"
    return f"the journal lost its entries after {lost.kept:,} (of at least {lost.of:,})"


def on_successor(d: "Decider", now: float, event: Successor) -> str:
    d.ids.skip_to(event.epoch * IDS)  # those of lost entries were below
    if event.lost is None:
        return f"controller {event.epoch} has taken over"
    return _on_lost_journal(d, now, event.lost)


def _on_lost_journal(d: "Decider", now: float, lost: Lost) -> str:
    """Keep the ranks if the journal still knows their generation; otherwise end them and launch a newer one."""
    told, known, running = lost_journal_sentence(lost), d.generation, d.releases.running.number
    d.generation = max(known, lost.generation)
    if lost.release not in (0, running):
        told += f"; release {lost.release} ran, and release {running} is gone on with until the next holdfast update"
    if d.phase in _OVER or lost.phase in _OVER:
        d.actions.append(Say(text=told))
        return told if d.phase in _OVER else launching.finish_job(d, now, 1, f"{told}; the job was ending")
    runs_on = d.generation == known and d.phase in _UNDER_WAY and lost.phase in (None, *_UNDER_WAY)
    what = "its ranks are not touched" if runs_on else f"generation {d.generation} is ended where it still runs"
    d.actions.append(Say(text=f"{told}; {what}, and the job goes on from what the nodes still know"))
    if runs_on:
        return told
    d.nodes.standbys.doubt_all(now)
    d.wait_until = d.last_call_at = None  # whoever comes is waited for anew
    if d.generation > known:
        d.nodes.set_lineage(lost.nodes)
        d.actions += d.fence.raise_fence(now, set(lost.nodes or (_UNKNOWN,)).difference(s.node for s in d.seats))
    if not d.seats:  # whoever runs ranks is told to end them when it reports
        return told if d.phase is Phase.HELD else f"{told}; {launching.wait_for_nodes(d, now)}"
    d.case = None
    alarm = Alarm(kind=Kind.CRASH, at=now, suspects=(), reason=told, generation=d.generation, signature="journal")
    return recovery.open_trouble(d, now, alarm)
