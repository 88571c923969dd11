"""Takeover by a new controller, including one whose journal has lost its newest entries."""

from holdfast.core.decide import incident_course, launching
from holdfast.core.decide.action_ids import EPOCH_IDS
from holdfast.core.decide.job_state import JobState
from holdfast.model.action import Say
from holdfast.model.decider_events import Lost, Successor
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase

_UNDER_WAY = (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING)
_UNKNOWN = "nodes that the journal does not name"
_OVER = (Phase.ENDING, Phase.DONE)


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


def on_successor(state: JobState, now: float, event: Successor) -> str:
    state.ids.skip_to(event.epoch * EPOCH_IDS)  # those of lost entries were below
    state.full_disks.on_successor(event)
    if state.phase in _UNDER_WAY:
        state.taken_over_at, state.untold = now, True
    if event.lost is None:
        full = f", as the disk that holds {event.full_disk} has room again" if event.full_disk else ""
        return f"controller {event.epoch} has taken over{full}"
    return _on_lost_journal(state, now, event.lost)


def _on_lost_journal(state: JobState, now: float, lost: Lost) -> str:
    """Keep the ranks if the journal still knows their generation. Otherwise end them and launch a new generation."""
    told, known, running = lost_journal_sentence(lost), state.generation, state.releases.running.number
    state.generation = max(known, lost.generation)
    if lost.release not in (0, running):
        told += f"; release {lost.release} ran, and release {running} runs on until the next holdfast update"
    if state.phase in _OVER or lost.phase in _OVER:
        state.emit(Say(text=told))
        return told if state.phase in _OVER else launching.finish_job(state, now, 1, f"{told}; the job was ending")
    runs_on = state.generation == known and state.phase in _UNDER_WAY and lost.phase in (None, *_UNDER_WAY)
    what = "its ranks are not touched" if runs_on else f"generation {state.generation} is ended where it still runs"
    state.emit(Say(text=f"{told}; {what}, and the job goes on from what the nodes still know"))
    if runs_on:
        return told
    state.nodes.standbys.doubt_all(now)
    state.wait_until = state.last_call_at = None  # whoever comes is waited for anew
    if state.generation > known:
        state.nodes.set_lineage(lost.nodes)
        unknown = set(lost.nodes or (_UNKNOWN,)) - state.nodes.seated
        state.emit(*state.fence.raise_fence(now, unknown))
    if not state.nodes.seats:  # whoever runs ranks is told to end them when it reports
        return told if state.phase is Phase.HELD else f"{told}; {launching.wait_for_nodes(state, now)}"
    state.case = None
    alarm = Alarm(kind=Kind.CRASH, at=now, suspects=(), reason=told, generation=state.generation, signature="journal")
    # Nobody goes on in its process: which release that runs, the journal does not say any more.
    return incident_course.open_trouble(state, now, alarm, may_park=False)
