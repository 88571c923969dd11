"""Matches log lines with catalog rows and weighs how much each hit says about the cause."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

from holdfast.core.log_analysis.benign_lines import discount_benign, find_guesses
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog, RowPattern
from holdfast.core.log_analysis.line_prefixes import WARNED, LogLine
from holdfast.core.log_analysis.tracebacks import CUT, ExceptionChain, RaisedException, parse_tracebacks

_LINE_CHARS = 4000
# Raised and caught every day: one of these is a cause only if nothing came of handling it.
_FLOW = frozenset(
    "KeyError AttributeError IndexError StopIteration StopAsyncIteration Empty Full ImportError ModuleNotFoundError "
    "LookupError TypeError NameError CancelledError".split()
)
# What the network says; who wanted something of it says which service it was.
_CARRIER = re.compile(
    r"^gaierror$|^timeout$|Connect(?:ion)?\w*Error$|Timeout(?:Error)?$|ProtocolError|Disconnected|SSL\w*Error|MaxRetry"
)
# Services outside are not at fault where collectives, stores, a configuration library or the local disk speak.
_SERVICES = frozenset({"hub_network_error", "tracker_service_error"})
_OF_JOBS = re.compile(
    r"\bNCCL (?:WARN|INFO|ERROR)\b|\b(?:pyxis|enroot): |\bgloo\b|ProcessGroup|TCPStore|\bc10d\b|HYDRA_FULL_ERROR|\bibv_"
    r"|\[Errno (?:5|12|13|24|28|30|122)\]|No space left"
)
_LESS = 2.5
_CAUGHT_LESS = 5.0
_CUT_LESS = 1.0  # an exception that only the code above it names
_RETRIED = re.compile(
    r"\b(?:retry(?:ing)?|attempt \d+|back(?:ing)? off|ignor(?:ed|ing)|skipp(?:ed|ing)|fall(?:ing)? back|non-fatal)\b",
    re.IGNORECASE,
)
# Said before a traceback: it is shown by who has caught it and goes on.
_CAUGHT = re.compile(
    r"\b(?:fail|error|exception|could not|unable|problem)\w*\b.{0,200}\b(?:retry(?:ing)?|try(?:ing)? again"
    r"|ignor(?:ed|ing)|skipp(?:ed|ing)|fall(?:ing)? back|continuing|non-fatal)\b",
    re.IGNORECASE,
)
_GAVE_UP = re.compile(
    r"max(?:imum)? retries|retries exceeded|giving up|gave up|after \d+ (?:attempts|retries|tries)", re.IGNORECASE
)
_PYTHON = CatalogRow(klass="python_exception", source="an exception that no row knows", weight=3)
_BARE = CatalogRow(klass="python_exception", source="an exception without a traceback that no row knows", weight=2)
_FRAMEWORK = CatalogRow(klass="framework_runtime_error", source="an exception of a library that no row knows", weight=3)
_STOPPED = CatalogRow(klass="preempted_cancelled", source="a person or a launcher interrupts", weight=2, role="echo")
_LIVE = CatalogRow(klass="process_hang", source="a stack without any exception", weight=3, role="hint")
_WAITS = re.compile(
    r"^_*(?:try_)?(?:wait|acquire|recv|get|poll|select|synchronize|barrier|broadcast|all_\w|join|sleep|read)"
)
# What anything may be raised as: then a hint in the message says more than the type. The others are bugs.
_ANYTHING = re.compile(
    r"(?:Runtime|Value|Assertion|OS|IO|System|Timeout|Environment)Error|(?!.*Key|.*Index)\w*Exception"
)
_OF_TYPES = ("python_exception", "framework_runtime_error")
_HINTS_MORE = 0.25
_ASIDE = ("context", "hint")
_MILDER = {"warning": 1.5, "info": 1.5, "debug": 1.5, WARNED: 3.5}  # by how a line was said


class CatalogHit(msgspec.Struct, kw_only=True):
    row: CatalogRow
    said: LogLine
    weight: float
    raised: RaisedException | None = None
    rank: int | None = None
    named: bool = False  # whether the words name the rank, not only who says them
    node: str = ""

    @property
    def klass(self) -> str:
        return self.row.klass


def find_hits(lines: Sequence[LogLine], catalog: FailureCatalog) -> list[CatalogHit]:
    """Return the catalog hits of these lines. Of a chain of exceptions, the exception that says most gives hits."""
    traces = list(parse_tracebacks(lines))
    joined = {id(raised): raised.joined_message() for trace in traces for raised in trace.chain}
    heard = [*lines, *(trace.last.said for trace in traces if trace.last.cut)]
    wanted = [said.raw for said in heard]
    for one in (said for said in joined.values() if said is not None):
        heard.append(one)
        wanted.append(one.text)
    known = {id(heard[index]): rows for index, rows in catalog.candidate_rows(wanted).items()}
    inside: set[int] = set()
    found: list[CatalogHit] = []
    for trace in traces:
        for raised in trace.chain:
            inside |= {id(said) for said in (raised.said, *raised.more)}
        found += _hits_of_trace(trace, known, joined)
    for said in lines:
        if id(said) not in inside and id(said) in known and not said.code:
            found += _keep_heaviest(list(_hits_of_line(said, known[id(said)], None)))
    return found


def _hits_of_trace(
    trace: ExceptionChain, known: dict[int, list[RowPattern]], joined: dict[int, LogLine | None]
) -> Iterator[CatalogHit]:
    """Yield the hits of the exception in a chain with the heaviest hit; among equals, of the first exception."""
    best: list[CatalogHit] = []
    worth = -1.0
    for place, raised in enumerate(trace.chain):
        if best and raised.is_wrapper:
            continue  # it names the type of its cause, and nothing more
        hits = _hits_of_exception(raised, known, joined[id(raised)])
        after = trace.chain[place + 1].link if place + 1 < len(trace.chain) else ""
        less = (
            _LESS if (after == "during" and raised.name in _FLOW) or (after and _CARRIER.search(raised.name)) else 0.0
        )
        mine = max((hit.weight for hit in hits), default=0.0) - less
        if mine > worth:
            best, worth = hits, mine
    yield from best


def _hits_of_exception(
    raised: RaisedException, known: dict[int, list[RowPattern]], joined: LogLine | None
) -> list[CatalogHit]:
    found: list[CatalogHit] = []
    for said in (raised.said, *raised.more, *((joined,) if joined else ())):
        plain = (row for row in known.get(id(said), ()) if row.row.role != "hint")
        found += _hits_of_line(said, plain, raised)
    if _ANYTHING.fullmatch(raised.name) and all(_is_type_only(hit) for hit in found):
        hints = (row for row in known.get(id(raised.said), ()) if row.row.role == "hint")
        best = max(_hits_of_line(raised.said, hints, raised), key=lambda hit: hit.row.weight, default=None)
        if best is not None:
            least = float((_PYTHON if raised.frames else _BARE).weight)
            worth = max((hit.weight for hit in found), default=least) + _HINTS_MORE
            return [msgspec.structs.replace(best, row=msgspec.structs.replace(best.row, role="cause"), weight=worth)]
    if any(hit.row.role != "context" for hit in found):
        return _keep_heaviest(found)
    if raised.type == CUT:
        return [*found, _make_hit(_LIVE, raised.said, raised)] if _is_live(raised) else found
    if raised.name == "KeyboardInterrupt":
        return [_make_hit(_STOPPED, raised.said, raised)]
    if raised.name == "SystemExit" or raised.is_mere_report:
        return found  # what it wraps is cut off, and its type says nothing
    theirs = raised.name == "RuntimeError" and raised.frames and not raised.frames[-1].is_user_code
    return [*found, _make_hit((_FRAMEWORK if theirs else _PYTHON) if raised.frames else _BARE, raised.said, raised)]


def _is_live(raised: RaisedException) -> bool:
    """Return whether these frames look like the stack of a waiting process, and not like the middle of a traceback."""
    return raised.headless and _WAITS.search(raised.frames[-1].function) is not None


def _is_type_only(hit: CatalogHit) -> bool:
    """Return whether the hit's row says no more than the exception's type, or only describes what was going on."""
    bare = f"{hit.raised.type}:" if hit.raised else ""
    return hit.row.role == "context" or (hit.klass in _OF_TYPES and re.search(hit.row.pattern, bare) is not None)


def _keep_heaviest(hits: list[CatalogHit]) -> list[CatalogHit]:
    """Return the heaviest hits of one line, and all hits that only describe circumstances or give a hint."""
    top = max((hit.weight for hit in hits if hit.row.role not in _ASIDE), default=0.0)
    return [hit for hit in hits if hit.row.role in _ASIDE or hit.weight >= top]


def _hits_of_line(said: LogLine, rows: Iterable[RowPattern], raised: RaisedException | None) -> Iterator[CatalogHit]:
    text, whole = said.text[:_LINE_CHARS], said.raw[:_LINE_CHARS]
    among_ranks = _OF_JOBS.search(text) is not None
    for known in rows:
        if among_ranks and known.row.klass in _SERVICES:
            continue
        if known.raised and not (raised and known.raised.fullmatch(raised.name)):
            continue
        if known.frames and not (raised and known.frames.search(raised.stack)):
            continue
        if (found := _search_line(known, text, whole)) and not _is_guessed(known.row, found):
            yield _make_hit(known.row, said, raised, found)


def _is_guessed(row: CatalogRow, found: re.Match[str]) -> bool:
    """Return whether the row matches only inside a list of possible causes."""
    return row.role in ("cause", "hint") and found.start() >= find_guesses(found.string)


@lru_cache(maxsize=4096)  # who fails says the same again and again
def _search_line(known: RowPattern, text: str, whole: str) -> re.Match[str] | None:
    return known.pattern.search(text) or known.pattern.search(whole)


def _make_hit(
    row: CatalogRow, said: LogLine, raised: RaisedException | None, found: re.Match[str] | None = None
) -> CatalogHit:
    told = {name: value or "" for name, value in found.groupdict().items()} if found else {}
    if "{" in row.hint:
        row = msgspec.structs.replace(row, hint=_fill_hint(row.hint, told))
    rank = told.get("rank") or told.get("rank2") or ""
    return CatalogHit(
        row=row,
        said=said,
        weight=_weigh_hit(row, said, raised),
        raised=raised,
        rank=int(rank) if rank.isdecimal() else said.rank,
        named=rank.isdecimal(),
        node=told.get("node") or said.node,
    )


def _fill_hint(hint: str, told: dict[str, str]) -> str:
    """Return the hint with each `{name}` replaced by what the group of that name matched. Other braces remain."""
    for name, value in told.items():
        hint = hint.replace(f"{{{name}}}", value)
    return hint


def _weigh_hit(row: CatalogRow, said: LogLine, raised: RaisedException | None) -> float:
    weight = float(row.weight)
    if raised is None and row.role in ("cause", "hint") and weight < 9:
        if not said.kernel:
            weight -= _MILDER.get(said.level, 0.0)
        if _is_retried(said.text):
            weight -= 2
    if raised is None and row.role in ("cause", "hint"):
        weight = discount_benign(weight, row.klass, said.text)
    if raised is not None and raised.ignored:
        return min(weight, 1.0)
    if raised is not None and _CAUGHT.search(raised.before[:400]) and not _GAVE_UP.search(raised.before):
        return max(weight - _CAUGHT_LESS, 0.5)
    if raised is not None and raised.frames:
        weight += -_CUT_LESS if raised.cut else 0.5
    return max(weight, 0.5)


@lru_cache(maxsize=256)
def _is_retried(text: str) -> bool:
    return _RETRIED.search(text) is not None and not _GAVE_UP.search(text)
