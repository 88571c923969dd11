"""What the controller says on the console of `holdfast run`: phases, the end, and why it ends itself."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.cli.launch.stoppable_wait import WaitStoppedError, note_stop
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.terminal.quantity_text import (
    FIRST_STEP,
    clock_text,
    ettr_said,
    incidents_text,
    no_step_said,
    storage_said,
)
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.incident_text import count_failures, describe_stop
from holdfast.core.record.job_account import Account, TimeUse
from holdfast.core.terminal_sanitizer import sentence_of_ours
from holdfast.journal.journal_errors import JournalFullError
from holdfast.logs.secret_masking import Masker
from holdfast.model.action import Finish, Launch, Say
from holdfast.model.decider_events import Begin, Ended, Progress, Successor
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.wire.run_and_node_specs import RunEnd, RunSpec


class SaidLog:
    """RUN_DIR/said.log: holdfast's messages for the console, which the supervisor shows. They go through a file,
    because a console that blocks or is closed must not stop the controller. Secrets in them are masked."""

    def __init__(self, run_dir: Path, mask: Masker) -> None:
        self._mask = mask
        fd = os.open(run_dir / "said.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "a", encoding="utf-8", errors="replace")

    def __call__(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nor must a full disk
            said = "\n".join(self._mask.mask_lines(text.split("\n")))
            self._file.write(f"holdfast: {sentence_of_ours(said)}\n")
            self._file.flush()


class ConsoleTeller:
    """Prints each change of the job's phase, and the job's end. Closed incidents are reported by the decider itself."""

    def __init__(self, run_dir: Path, say: SaidLog) -> None:
        self._run_dir = run_dir
        self._say = say
        self._phase = Phase.NEW
        self._begun_at = 0.0
        self._trained = False
        self._unheard: Successor | None = None  # no step is known to have been made since this takeover
        self._unheard_until = 0.0
        self._last_step_at = 0.0

    def set_phase(self, phase: Phase) -> None:
        self._phase = phase

    def on_entry(self, entry: Entry, view: JobView) -> None:
        """Print a line if this entry changes the job's phase, which `view` already shows."""
        phase, self._phase = self._phase, entry.decision.phase
        if isinstance(entry.event, Begin):
            self._begun_at = entry.event.started_at or entry.at
        self._watch_takeover(entry)
        if self._phase is phase:
            return
        match self._phase:
            case Phase.TRAINING if self._begun_at and not self._trained:
                self._trained = True
                self._say(f"{FIRST_STEP} after {entry.at - self._begun_at:.1f} s")
            case Phase.STOPPING if isinstance(entry.event, Alarm):
                done = describe_stop(entry.decision.actions)
                done = "stopping any ranks that are left" if self._unheard else done
                self._say(f"{entry.decision.reason}; {done}")
            case Phase.PAUSING:
                self._say(f"{view.summary}; ending all ranks")
            case Phase.HELD if not any(isinstance(action, Say) for action in entry.decision.actions):
                self._say(f"{entry.decision.reason}; {_standing_text(view)}")
            case Phase.ENDING if isinstance(entry.event, Ended) and self._unheard:
                self._say(f"the script had ended by itself {self._unwatched_text(self._unheard)}")
            case Phase.ENDING:
                for action in entry.decision.actions:
                    if isinstance(action, Finish) and action.code:
                        self._say(f"ending: {action.reason}")

    def _watch_takeover(self, entry: Entry) -> None:
        if any(isinstance(action, Launch) for action in entry.decision.actions):
            self._unheard = None  # what ranks do from here on is heard
        match entry.event:
            case Successor():
                self._unheard, self._unheard_until, self._last_step_at = entry.event, entry.at, 0.0
            case Progress(at=at):
                self._last_step_at = at
                if at > self._unheard_until:
                    self._unheard = None

    def _unwatched_text(self, taken_over: Successor) -> str:
        since = f"from {clock_text(taken_over.alone_since)} to" if taken_over.alone_since else "until"
        when = (
            f"its last step was made at {clock_text(self._last_step_at)}" if self._last_step_at else "when is not known"
        )
        return f"while nobody watched, {since} {clock_text(self._unheard_until)}; {when}"

    def tell_end(self, account: Account, code: int, *, goes_on: bool = False) -> None:
        """Print how the job ended. With `goes_on`, the run has not ended: its supervisor waits for other nodes."""
        what = "so far" if goes_on else "done" if code == 0 else f"ended with code {code}"
        count = incidents_text(len(account.incidents), count_failures(account.incidents))
        ettr = ettr_said(account.ettr, account.at_most)
        early_end = "" if account.stepped else account.early_end
        why = no_step_said(account.spent_s(TimeUse.RUN), over=True, early_end=early_end)
        ettr += f", because {why}" if why else ""
        written = f"; {said}" if (said := storage_said(account.storage)) else ""
        self._say(f"{what}: {count}, {ettr}{written}; more: holdfast report {self._run_dir}")


def _standing_text(view: JobView) -> str:
    """Say for which order of a person a job without ranks keeps its nodes and state."""
    if view.question and not view.held_by:
        kept = "keeping nodes and state until holdfast approve or holdfast stop"
        return f"{kept}, as it asks: {view.question}"
    return "keeping nodes and state until holdfast resume"


def tell_stopped_wait(run: RunSpec, run_dir: Path, stopped: Exception, say: SaidLog) -> RunEnd | None:
    """Say that the wait for another controller is over. Return the end of a run that never began; None if the run goes
    on elsewhere, or can be resumed."""
    assert isinstance(stopped, WaitStoppedError)
    if not run.journal and not (run_dir / "journal.db").exists():
        say(f"{stopped} while it waited; nothing of this run has begun")
        return RunEnd(code=stopped.code, reason=f"{stopped} before it had begun")
    say(f"{stopped} while it waited; what runs elsewhere goes on, and holdfast run --resume {run_dir} waits again")
    note_stop(run_dir, stopped.code)
    return None


def tell_interruption(run_dir: Path, group: BaseExceptionGroup[Exception], say: Callable[[str], None]) -> None:
    """Say why the controller ends although the job goes on. If the disk of the run is full, the supervisor says so."""
    sentence = "; ".join(dict.fromkeys(str(e) for e in leaf_exceptions(group)))
    logging.error("ending: %s", sentence)
    if not group.subgroup(JournalFullError) or not run_directory.is_disk_full(run_dir):
        say(sentence)


def leaf_exceptions(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for e in group.exceptions:
        if isinstance(e, BaseExceptionGroup):
            yield from leaf_exceptions(e)
        else:
            yield e
