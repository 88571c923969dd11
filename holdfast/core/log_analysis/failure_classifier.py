"""Names the failure class of a failed job: finds the first cause among all log lines and returns a diagnosis."""

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.incident.incident_text import describe_exit
from holdfast.core.log_analysis.action_choice import ASK, EVICT, choose_action
from holdfast.core.log_analysis.catalog_hits import CatalogHit, find_hits
from holdfast.core.log_analysis.collective_mismatch import find_mismatch
from holdfast.core.log_analysis.driver_hang import find_driver_hangs
from holdfast.core.log_analysis.failure_catalog import UNKNOWN, CatalogRow, FailureCatalog, FailureClass
from holdfast.core.log_analysis.holdfast_console_log import (
    ConsoleIncident,
    drop_survived_stands,
    is_own_sentence,
    read_last_incident,
    retell_incident,
)
from holdfast.core.log_analysis.launcher_summary import LauncherSummary, normalize_code, summarize_lines
from holdfast.core.log_analysis.line_prefixes import LogLine, fill_times
from holdfast.core.log_analysis.loss_divergence import find_divergence
from holdfast.core.log_analysis.lost_peer import find_peer
from holdfast.core.log_analysis.root_cause import CauseFinding, best_hint, find_root, rival_causes
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.model.last_words_diagnosis import Diagnosis

_EVIDENCE = 5
_LINE_CHARS = 400
_PROOF = 8.0
_CLEAR = 5.0  # weight of a clear exception
_BUGS = frozenset({"python_exception", "shape_dtype_device", "import_dependency", "config_argument"})
_LOUD = (-9, -7, -11, -4, -8)  # signals that no echo ends with
_KILL = -9
_SURE_OF_KILL = 0.5  # confidence that the OOM killer sent a SIGKILL if only the signal is known, at most
_VAGUE = 2.5  # weight of an exception without a traceback that no row knows: others' hints say more


class FailureEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one failure: log lines, exit codes and signs of memory shortage."""

    lines: Sequence[LogLine]
    code: int | None = None  # of the launcher, or of the only process
    codes: Mapping[int, int] = {}  # by rank
    ended_at: Mapping[int, float] = {}  # by rank
    starved: bool | None = None  # whether the kernel killed for want of memory; None: nobody has looked
    pressed: str = ""  # where nobody can know that: the sign that memory was scarce just before


def classify_failure(case: FailureEvidence, catalog: FailureCatalog) -> Diagnosis:
    fill_times(case.lines)
    case = msgspec.structs.replace(case, lines=drop_survived_stands(case.lines))
    told = read_last_incident(case.lines)
    if told is None:
        return _classify_lines(case, catalog)
    return retell_incident(_classify_lines(_narrow_case(case, told), catalog), told)


def _classify_lines(case: FailureEvidence, catalog: FailureCatalog) -> Diagnosis:
    hits = [*find_hits(case.lines, catalog), *find_mismatch(case.lines), *find_divergence(case.lines)]
    hits += find_driver_hangs(case.lines)
    summary = summarize_lines(case.lines)
    hits = [hit for hit in hits if not summary.is_about_another(hit.said)]
    hits, hints = [hit for hit in hits if hit.row.role != "hint"], [hit for hit in hits if hit.row.role == "hint"]
    summary.codes |= {rank: normalize_code(code) for rank, code in case.codes.items()}
    root = find_root(hits, case.lines, case.ended_at)
    root = _prefer_user_bug(root, hits, catalog) or root
    if (root is None or root.klass == UNKNOWN or root.weight <= _VAGUE) and not _is_loud_signal(summary, case):
        root = best_hint(hints, case.lines) or root
    mute = summary.root_rank is not None and all(hit.rank != summary.root_rank for hit in hits)
    guess = mute and root is not None and not root.row.pattern and summary.codes.get(summary.root_rank or 0) in _LOUD
    if root is None or root.row.role == "echo" or (root.weight < 2 and root.row.role != "hint") or guess:
        code = _telling_code(summary, case, words=root is not None and root.weight >= 2, mute=mute)
        if code is not None and code in catalog.codes:
            found = _diagnose_code(code, summary, catalog)
            return _judge_kill(found, case, summary, catalog) if code == _KILL else found
        if mute and code:
            root = None  # the others only tell that it has gone
    if root is None:
        quiet = not hits and not hints and summary.root_rank is None and not any((case.code, *summary.codes.values()))
        return _diagnose_quiet(case) if quiet else _diagnose_unknown(case, summary, catalog)
    found = _diagnose_hit(CauseFinding(root=root, hits=hits, summary=summary), catalog)
    if _KILL in catalog.codes and found.klass == catalog.codes[_KILL].klass and found.most_sure < 1.0:
        return _judge_kill(found, case, summary, catalog)
    return found


def _narrow_case(case: FailureEvidence, told: ConsoleIncident) -> FailureEvidence:
    """Return the evidence of the last incident only, with any memory shortage that the console log reports."""
    starved = case.starved if told.starved is None else told.starved
    return msgspec.structs.replace(case, lines=told.lines, starved=starved, pressed=case.pressed or told.pressed)


def _prefer_user_bug(root: CatalogHit | None, hits: list[CatalogHit], catalog: FailureCatalog) -> CatalogHit | None:
    """Return the first clear bug in the user's code, if the root cause accuses a machine without proof. Otherwise
    return None. A machine fault does not cause a TypeError, so the bug comes first."""
    if root is None or root.raised or root.weight >= _PROOF:
        return None
    if catalog.action_of(root.row) != EVICT:
        return None
    bugs = [hit for hit in hits if hit.klass in _BUGS and hit.raised and hit.raised.frames and hit.weight >= _CLEAR]
    return min(bugs, key=lambda hit: (hit.said.source, hit.said.index)) if bugs else None


def _telling_code(summary: LauncherSummary, case: FailureEvidence, *, words: bool, mute: bool) -> int | None:
    """Return the exit code that says most about the cause; None if no code says anything. A signal such as SIGSEGV
    comes first. If log lines name a cause (`words`), no other code counts. But if the rank that failed first has no
    such line (`mute`), every code except SIGTERM counts."""
    codes = [*summary.told_codes(), *([normalize_code(case.code)] if case.code is not None else [])]
    strong = [code for code in codes if code in _LOUD]
    if strong:
        return strong[0]
    if words:
        return codes[0] if mute and codes and codes[0] != -15 else None
    # Launchers end the others with SIGTERM: it says something only where nobody ended otherwise.
    telling = [code for code in codes if code not in (0, -15)] or codes
    return telling[0] if telling else None


def _is_loud_signal(summary: LauncherSummary, case: FailureEvidence) -> bool:
    """Return whether exit codes outweigh hints. They do if one of them is a signal such as SIGSEGV, which is never the
    mere effect of another rank's failure. They also do if all of them are SIGTERM."""
    codes = [*summary.told_codes(), *([normalize_code(case.code)] if case.code is not None else [])]
    return any(code in _LOUD for code in codes) or (bool(codes) and all(code == -15 for code in codes))


def _diagnose_hit(finding: CauseFinding, catalog: FailureCatalog) -> Diagnosis:
    root, row = finding.root, finding.root.row
    klass = catalog.class_of(row)
    choice = choose_action(finding, catalog)
    rank, most_sure = finding.rank, _most_sure(finding)
    klass = klass if most_sure == 1.0 else msgspec.structs.replace(klass, title=f"{klass.title}, perhaps")
    return Diagnosis(
        klass=row.klass,
        group=row.group or klass.group,
        action=choice.action,
        confidence=min(_hit_confidence(root, doubted=bool(rival_causes(finding))), most_sure),
        most_sure=most_sure,
        explanation=f"{_explain_finding(finding, klass)} {choice.reason}".rstrip(),
        evidence=_evidence_lines(finding),
        root_rank=rank,
        title=klass.title,
        hint=(row.hint if most_sure == row.most_sure else "") or choice.hint or klass.hint,
        origin=root.raised.origin if root.raised else "",
        echoes=finding.echoes,
        fault_known=row.role != "echo",
        peer=_lost_peer(finding) if row.role == "echo" else "",
        node=root.node or (finding.summary.node if rank == finding.summary.root_rank else ""),
    )


def _most_sure(finding: CauseFinding) -> float:
    """Return how sure one may be of the root cause's class at most, by all lines that are of this class."""
    klass, role = finding.root.klass, finding.root.row.role
    alike = (hit.row for hit in finding.hits if hit.klass == klass and hit.row.role == role)
    return max(row.most_sure for row in (finding.root.row, *alike))


def _lost_peer(finding: CauseFinding) -> str:
    """Return the first lost peer named in an echo (a line about another rank's failure); "" if there is none."""
    echoes = (hit for hit in (finding.root, *finding.hits) if hit.row.role == "echo")
    return next((peer for hit in echoes if (peer := find_peer(hit.said.text))), "")


def _hit_confidence(root: CatalogHit, *, doubted: bool) -> float:
    """Return the confidence in the class: about how often such hits were right on logs that no row was written from."""
    if root.row.role != "cause":
        return 0.5  # a hint or an echo: as often wrong as right
    confidence = min(0.98, 0.35 + 0.07 * root.weight)
    return round(confidence * (0.85 if doubted else 1.0), 2)


def _explain_finding(finding: CauseFinding, klass: FailureClass) -> str:
    root = finding.root
    who = (f"rank {finding.rank}" if finding.rank is not None else "") + (f" on {root.node}" if root.node else "")
    if root.row.role == "echo":
        return f"{klass.title}. This is what ranks say when another one has failed, and nothing shows which, or why."
    if root.row.role == "hint":
        return f"{klass.title}, perhaps: nobody says so plainly, what {who.strip() or 'somebody'} says hints at it."
    others = {hit.rank for hit in finding.hits if hit.klass == root.klass and hit.row.role == "cause"} - {
        root.rank,
        None,
    }
    order = "first" if not others or root.rank is None else "and others, in an order that is not known"
    first = f"{who.strip() or 'somebody'} said so {order}" if not is_own_sentence(root.said) else "holdfast said so"
    at = f", at {root.raised.origin}" if root.raised and root.raised.origin else ""
    count = finding.echoes
    lines = "1 line is a mere echo" if count == 1 else f"{count} lines are mere echoes"
    return f"{klass.title}: {first}{at}." + (f" {lines} of it." if count else "")


def _evidence_lines(finding: CauseFinding) -> tuple[str, ...]:
    same = [hit.said for hit in finding.hits if hit.klass == finding.root.klass and hit.row.role != "context"]
    shown = dict.fromkeys(cut_words(said.raw, _LINE_CHARS) for said in (finding.root.said, *same))
    return tuple(shown)[:_EVIDENCE]


def _diagnose_code(code: int, summary: LauncherSummary, catalog: FailureCatalog) -> Diagnosis:
    row = catalog.codes[code]
    klass = catalog.class_of(row)
    ranks = [rank for rank, mine in summary.codes.items() if mine == code]
    rank = summary.root_rank if summary.root_rank in ranks else min(ranks, default=None)
    if rank is None and summary.root_rank not in summary.codes:
        rank = summary.root_rank  # named without a code of its own
    said = summary.lines.get(code)
    who = f"Rank {rank}" if rank is not None else "A process"
    return Diagnosis(
        klass=row.klass,
        group=row.group or klass.group,
        action=row.action or klass.action,
        confidence=0.6,
        explanation=f"{who} {describe_exit(code)} and nothing else was said; {klass.title} is the usual reason.",
        evidence=(cut_words(said.raw, _LINE_CHARS),) if said else (f"exit code {code}",),
        root_rank=rank,
        title=klass.title,
        hint=row.hint or klass.hint,
        node=summary.node if rank == summary.root_rank else "",
    )


def _judge_kill(
    found: Diagnosis, case: FailureEvidence, summary: LauncherSummary, catalog: FailureCatalog
) -> Diagnosis:
    """Return the diagnosis `found` of a SIGKILL, as sure as its evidence: an exit code, or words that name no sender.
    The OOM killer sent it if the kernel counted a kill for want of memory, and probably sent it if memory was short. If
    the kernel's count is not known, the OOM killer is a guess. If the kernel counted no kill, the sender is unknown."""
    title = catalog.class_of(catalog.codes[_KILL]).title
    who = f"Rank {found.root_rank}" if found.root_rank is not None else "A process"
    if case.starved:
        told = f"{who} {describe_exit(_KILL)} as the kernel counted a kill for want of memory."
        return msgspec.structs.replace(found, title=title, confidence=0.8, most_sure=1.0, explanation=told)
    if case.pressed:
        how = f"{who} {describe_exit(_KILL)}, probably by the OOM killer"
        told = f"{how}: {case.pressed}, and the kernel tells nobody here."
        return msgspec.structs.replace(found, title=title, confidence=0.6, most_sure=0.6, explanation=told)
    unknown = f"{who} {describe_exit(_KILL)}, sender unknown"
    if case.starved is None:
        most = min(found.most_sure, _SURE_OF_KILL)
        guess = f"{unknown}; {title.lower()} is the usual reason, and nothing here shows it."
        title = f"{title}, perhaps"
        return msgspec.structs.replace(found, title=title, confidence=0.4, most_sure=most, explanation=guess)
    nothing = _diagnose_unknown(case, summary, catalog)
    told = f"{unknown}: the kernel told of no kill for want of memory."
    hint = "Ask who may end processes on this node: a person, a script, or what has given out the machine."
    return msgspec.structs.replace(
        nothing, explanation=told, hint=hint, evidence=found.evidence, root_rank=found.root_rank, node=found.node
    )


def _diagnose_unknown(case: FailureEvidence, summary: LauncherSummary, catalog: FailureCatalog) -> Diagnosis:
    klass = catalog.class_of(CatalogRow(klass=UNKNOWN, source="nothing is known"))
    last = [cut_words(said.raw, _LINE_CHARS) for said in case.lines if said.text.strip()][-3:]
    code = f"it {describe_exit(normalize_code(case.code))}; " if case.code else ""
    return Diagnosis(
        klass=UNKNOWN,
        group=klass.group,
        action=klass.action,
        confidence=0.3 if case.lines else 0.1,
        explanation=f"{klass.title}: {code}nothing in what was said shows why.",
        evidence=tuple(last),
        root_rank=summary.root_rank,
        title=klass.title,
        hint=klass.hint,
        node=summary.node,
    )


def _diagnose_quiet(case: FailureEvidence) -> Diagnosis:
    """Return a diagnosis with confidence 0, for logs in which nothing says that anything failed."""
    last = [cut_words(said.raw, _LINE_CHARS) for said in case.lines if said.text.strip()][-3:]
    return Diagnosis(
        klass=UNKNOWN,
        group="unknown",
        action=ASK,
        confidence=0.0,
        explanation="Nothing was found: nothing in it shows a failure.",
        evidence=tuple(last),
        root_rank=None,
        title="Nothing was found",
        hint="If a job has failed, give the logs of all its ranks, or --exit-code.",
    )
