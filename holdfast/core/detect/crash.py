"""Crash detector: turns the exit of a rank into an alarm, with its failure class if the rank's log shows one."""

import re

import msgspec

from holdfast.core.incident.incident_text import describe_exit
from holdfast.core.log_analysis.action_choice import ASK, EVICT
from holdfast.core.log_analysis.failure_catalog import UNKNOWN
from holdfast.core.log_analysis.failure_catalog import FailureCatalog as FailureCatalog
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import LogLine, parse_lines
from holdfast.core.log_analysis.log_sieve import sift_log
from holdfast.core.log_analysis.tracebacks import ExceptionChain, RaisedException, parse_tracebacks
from holdfast.core.terminal_sanitizer import CUT, cut_words
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.last_words_diagnosis import Diagnosis
from holdfast.model.observation import Exit

_MUTE = (-9, -15)  # SIGKILL and SIGTERM leave no time for last words: what was said before is about something else
_EVIDENCE = 12  # lines kept in the journal
_LINE_CHARS = 400
_ENOUGH = 0.5  # confidence below which no class is named
_RAISED_CHARS = 200
_OWN_CODE = re.compile(r"SystemExit(?:: -?\d+)?")  # of sys.exit(1), which says nothing
_CAUGHT = re.compile(r"Caught \w+ in (.+)\.$")  # by a DataLoader, a DataParallel
# What a script may raise because another rank failed, because all agreed to end, or because it was told to stop.
_OUTSIDE = re.compile(
    r"(?i)(?<!-)\branks?(?:\b|[\d_])|peer|neighbou?r|worker|sibling|elsewhere|some(?:one|body)"
    r"|other process|process group|\bnodes\b|\bnode\W*\d|\bnode (?:is|was|has|fail|lost|down|left)"
    r"|collective|all_?-?(?:reduce|gather|to_?-?all)|reduce_?-?scatter|barrier|broadcast(?:ing)? from|\brecv\b"
    r"|nccl|rccl|gloo|\bmpi\b|\bucc\b|\brpc\b|connect|socket|network|\btcp|rendezvous|remote|heartbeat|unreachable"
    r"|broken pipe|closed by|reset by|\beof\b|time[sd]?[ _-]?out|out of sync"
    r"|abort|cancel|interrupt|preempt|terminat|shut_?-?down|\bstop|\bquit|\bkill|\bdied\b|exited|vanished|(?:\b|_)exit"
    r"|\bsig[a-z]{3,4}\b|sigterm|signal_?handler|handle_?signal|on_?signal|on_?term"
)
_NEW_EXCEPTION = re.compile(r"^raise (?:\w+\.)*(?P<type>\w+) ?(?:\(|$)")
_ITS_OWN, _SCRIPT = "SystemExit", "script"  # nobody but the script itself raises it


def alarm_of(exit: Exit, catalog: FailureCatalog) -> Alarm:
    whole = _whole_failure(exit)
    words = () if exit.code in _MUTE else exit.words
    # A line that is heard twice would be a rival of itself: of a wrapper, whose cause stands in the words.
    heard = (*words, *((whole,) if whole and not any(line.endswith(whole) for line in words) else ()))
    lines = parse_lines(sift_log("\n".join(heard).encode("utf-8", "replace"), catalog), 0, exit.rank)
    found = classify_failure(_case(exit, lines), catalog)
    there = list(parse_tracebacks(lines))
    traces = [trace for trace in there if not trace.last.cut]
    raised = whole or (traces[-1].last.said.text if traces else "")
    alarm = _make_alarm(exit, found, _unwrap_exception(raised, traces))
    alone = not found.echoes and _is_alone(there)
    own = alone and _is_own(next(trace for trace in there if not trace.last.ignored).chain[0], exit.rank)
    return msgspec.structs.replace(alarm, alone=alone, own=own)


def alarm_without_words(exit: Exit, catalog: FailureCatalog) -> Alarm:
    """Return an alarm from the exit code and the failure that the rank recorded itself. This is for a log that takes
    too long to judge."""
    return _make_alarm(exit, classify_failure(_case(exit, []), catalog), exit.latched)


def _is_alone(traces: list[ExceptionChain]) -> bool:
    """Return whether there is one whole traceback, of an exception that no other one led to in the same process."""
    told = [trace for trace in traces if not trace.last.ignored]
    if len(told) != 1 or told[0].last.headless or not told[0].last.frames:
        return False
    return sum(not one.inner for one in told[0].chain) <= 1


def _is_own(raised: RaisedException, rank: int) -> bool:
    """Return whether a statement of the script's own code raised this, in words about nothing outside the rank.

    What a library raises may tell of a lost peer in words that nobody knows, and so may an exception that was raised
    "from None" in place of another one.
    """
    here, statement = raised.frames[-1], _NEW_EXCEPTION.match(raised.raising)
    if not here.is_user_code or statement is None or raised.raising.endswith(" from None"):
        return False
    words = _without_own_rank(" ".join((raised.message, *(line.text for line in raised.more))), rank)
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", statement["type"])
    return statement["type"] == raised.name and not _OUTSIDE.search(f"{parted} {here.function} {words}")


def tells_of_others(exit: Exit) -> bool:
    """Return whether the failure that the rank recorded itself is in words about something outside the rank."""
    return bool(_OUTSIDE.search(_without_own_rank(exit.latched, exit.rank)))


def _without_own_rank(words: str, rank: int) -> str:
    return re.sub(rf"(?i)\brank[\s:=#]*{rank}\b", "", words)


def _case(exit: Exit, lines: list[LogLine]) -> FailureEvidence:
    return FailureEvidence(lines=lines, codes={exit.rank: exit.code}, starved=exit.starved, pressed=exit.pressed)


def _make_alarm(exit: Exit, found: Diagnosis, raised: str) -> Alarm:
    told = [cut_words(raised, _RAISED_CHARS)] if raised else []
    if exit.said and (not raised or _OWN_CODE.fullmatch(raised)):  # what it printed may say more than its code
        told.append(f'last said: "{cut_words(exit.said, _RAISED_CHARS)}"')
    reason = describe_exit(exit.code) + (f" ({'; '.join(told)})" if told and exit.code > 0 else "")
    if exit.code == _MUTE[0]:
        guess = f"probably the OOM killer: {exit.pressed}" if exit.pressed else "sender unknown"
        reason += " (the kernel killed for want of memory)" if exit.starved else f" ({guess})"
    klass = found.klass if found.klass != UNKNOWN and found.confidence >= _ENOUGH else ""
    return Alarm(
        kind=Kind.CRASH,
        at=exit.at,
        suspects=(exit.node,),
        ranks=(exit.rank,),
        generation=exit.generation,
        code=exit.code,
        raised=cut_words(raised.partition(":")[0], _RAISED_CHARS),
        pressed="" if exit.starved or exit.code != _MUTE[0] else exit.pressed,
        klass=klass,
        title=found.title if klass else "",
        group=found.group if klass else _SCRIPT if raised.startswith(_ITS_OWN) else "",
        action=_without_witness(found.action) if klass else "",
        confidence=found.confidence if klass else 0.0,
        hint=found.hint if klass else "",
        reason=reason,
        signature=f"{klass or 'exit'} {exit.code} {found.origin}".rstrip(),
        evidence=_add_evidence(found.evidence if klass else (), exit.words),
    )


def _without_witness(action: str) -> str:
    """Return the action for a failure that only a rank's output shows. An eviction becomes a question to a person,
    because a script can print anything, even kernel messages. The agent reads the kernel log and the devices itself,
    and evicts a node for what they show."""
    return ASK if action == EVICT else action


def _unwrap_exception(raised: str, traces: list[ExceptionChain]) -> str:
    """Return the exception that `raised` wraps, if it is one of another process, such as a DataLoader worker. Otherwise
    return `raised`. The message of such a wrapper contains the traceback of the other process."""
    for trace in reversed(traces):
        cause, last = trace.chain[0], trace.last
        if cause.inner and not last.inner and last.said.text.startswith(raised.removesuffix(CUT)):
            where = _CAUGHT.match(last.message)
            return f"{cause.said.text}{f', in {where[1]}' if where else ''}"
    return raised


def _whole_failure(exit: Exit) -> str:
    """Return the failure that the rank recorded before it ended. If the record was cut short, return the whole line
    from the rank's log."""
    start = exit.latched.removesuffix(CUT)
    found = (line[line.index(start) :] for line in reversed(exit.words) if start in line)
    return exit.latched if start == exit.latched else next(found, exit.latched)


def _add_evidence(found: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last lines of a rank's log. Earlier lines of evidence take the place of the oldest of them."""
    last = tuple(cut_words(line, _LINE_CHARS) for line in words[-_EVIDENCE:])
    earlier = tuple(line for line in found if line in words and line not in last)
    return (*earlier, *last[len(earlier) :])
