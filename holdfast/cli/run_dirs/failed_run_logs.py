"""The logs of a run's newest generation that failed, and how its ranks ended according to the journal."""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.agent.rank import last_words
from holdfast.cli.run_dirs import run_directory, run_journal, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.core.incident.cause_name import is_guessed_kill
from holdfast.core.incident.failure_sequence import describe_all_failures
from holdfast.core.incident.first_cause import ECHOES, first_cause, is_echo
from holdfast.core.incident.incident_text import describe_stop
from holdfast.journal.journal_errors import JournalError
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, open_log
from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry

_BEFORE_S = 60.0  # the kernel may have told of a kill so long before ranks were seen to end


def find_run(name: str) -> Path:
    """Return the directory of the run of this name. If there is none, raise UsageError, which says that no file has
    this name either: the caller has looked for one."""
    try:
        return run_selection.find(name)
    except run_selection.NoSuchRun:
        raise UsageError(f"there is no file, folder or run called {name}") from None


def read_failed_run(run_dir: Path) -> tuple[list[RankLog], ProcessEnds]:
    """Return the ranks' logs of the newest generation in which a rank crashed, and how its ranks ended. If the run
    knows which rank failed first, return only the log of that rank. If the logs cannot show the cause, for example
    because the newest incident was a hang, return holdfast's console sentences about incidents instead."""
    entries = _read_entries(run_dir)
    events = [entry.event for entry in entries]
    crashes = [event for event in events if isinstance(event, Alarm) and event.kind is Kind.CRASH]
    generation = max((alarm.generation for alarm in crashes), default=-1)
    stops = (entry.event for entry in entries if entry.decision.phase is Phase.STOPPING)
    opened = [event.generation for event in stops if isinstance(event, Alarm)]
    later = max(opened, default=-1) > generation
    record = None if later else _find_record(entries, generation)
    if later or (record and _left_no_log(record, generation, crashes)):
        text, newest = _write_console(entries), _newest_record(entries) if later else record
        went_on = newest is not None and newest.verdict.remedy is not Remedy.GIVE_UP
        ends = ProcessEnds(verdict=describe_all_failures(newest) if newest else "", went_on=went_on)
        return [RankLog(open=lambda: io.BytesIO(text.encode()))], ends
    if not crashes:
        raise UsageError(f"no rank of {run_dir} has failed; holdfast report shows what happened")
    first = _ranks_to_read(record, [a for a in crashes if a.generation == generation])
    last = [a for a in crashes if a.generation == generation and (not first or set(first) & set(a.ranks))]
    ends = ProcessEnds(
        codes={alarm.ranks[0]: alarm.code for alarm in last if alarm.ranks and alarm.code is not None},
        at={alarm.ranks[0]: alarm.at for alarm in last if alarm.ranks},
        starved=_is_oom_killed(events, last),
        pressed=next((alarm.pressed for alarm in last if alarm.pressed), ""),
        went_on=any(isinstance(event, Progress) and event.generation > generation for event in events),
        verdict=describe_all_failures(record) if record and first else "",
        group=next((alarm.group for alarm in last if alarm.group), ""),
    )
    here = last_words.rank_folder(run_directory.read_spec(run_dir).log_dir, generation, 0).parent
    logs = list(_open_logs(here, first))
    said = [line for alarm in last for line in alarm.evidence if not logs]  # they lie on other machines
    logs += [RankLog(open=lambda: io.BytesIO("\n".join(said).encode()))] if said else []
    return logs, ends


def _open_logs(folder: Path, ranks: Sequence[int]) -> Iterator[RankLog]:
    """Yield the logs in a generation's folder, of these ranks or, if none are given, of all."""
    for path in sorted(folder.rglob("*.log")):
        log = open_log(path)
        if ranks and log.rank not in ranks:
            continue
        if path.is_file():
            yield log
        else:  # a pipe would keep us waiting for ever
            print(f"holdfast diagnose: {path} is no regular file: it is not read", file=sys.stderr)


def _find_record(entries: Sequence[Entry], generation: int) -> Record | None:
    """Return the record of the closed incident that ended this generation; None if there is none. If an incident had
    several failures, it ended several generations."""
    closed = [entry.decision.closed for entry in entries if entry.decision.closed]
    return next((one for one in reversed(closed) if 0 <= generation - one.generation < max(1, one.failures)), None)


def _left_no_log(record: Record, generation: int, crashes: list[Alarm]) -> bool:
    """Return whether no rank of this generation wrote down what the run found."""
    if record.generation != generation:  # a later failure of the incident, of which the record names no ranks
        return False
    crashed = {rank for alarm in crashes if alarm.generation == generation for rank in alarm.ranks}
    return record.kind != Kind.CRASH or crashed.isdisjoint(record.ranks)


def _ranks_to_read(record: Record | None, crashes: list[Alarm]) -> tuple[int, ...]:
    """Return the ranks that failed first in the generation of these crashes; () if nobody knows."""
    if record is None:
        return ()
    if record.generation == crashes[0].generation:
        return record.ranks if record.klass not in ECHOES else ()
    newest = first_cause(crashes)
    return () if is_echo(newest) else newest.ranks


def _newest_record(entries: Sequence[Entry]) -> Record | None:
    """Return the record of the newest incident; None if it is still open."""
    for entry in reversed(entries):
        if entry.decision.closed or (isinstance(entry.event, Alarm) and entry.decision.phase is Phase.STOPPING):
            return entry.decision.closed
    return None


def _write_console(entries: Sequence[Entry]) -> str:
    """Return what the console showed about incidents: a summary of each closed one, the first line of an open one."""
    lines: list[str] = []
    opened, phase = "", Phase.NEW
    for entry in entries:
        if isinstance(entry.event, Alarm) and entry.decision.phase is Phase.STOPPING is not phase:
            opened = f"holdfast: {entry.decision.reason}; {describe_stop(entry.decision.actions)}"
        if entry.decision.closed:
            lines, opened = [*lines, f"holdfast: {entry.decision.closed.sentence}"], ""
        phase = entry.decision.phase
    return "\n".join([*lines, opened])


def _read_entries(run_dir: Path) -> list[Entry]:
    try:
        with contextlib.closing(run_journal.open_to_read(run_dir)) as journal:
            return list(journal.read())
    except JournalError as e:
        raise UsageError(str(e)) from None


def _is_oom_killed(events: Sequence[object], last: Sequence[Alarm]) -> bool:
    """Return whether the kernel reported that it killed ranks of the alarms `last` for lack of memory."""
    since, ranks = min(alarm.at for alarm in last) - _BEFORE_S, {rank for alarm in last for rank in alarm.ranks}
    kills = (e for e in events if isinstance(e, Alarm) and e.klass == "host_oom_kill" and not e.pressed)
    return any(kill.at >= since and ranks & set(kill.ranks) for kill in kills if not is_guessed_kill(kill))
