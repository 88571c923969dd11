"""Fits a log of any length into a character budget: templates for repeated lines, full text for rare or grave ones."""

import math
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from holdfast.logs.line_templates import LineKind, LineWindow, TemplateMiner, mine_log, replace_variables

_LINES_PART = 0.65  # of the budget that goes to lines; the rest is for templates
_TAIL_PART = 0.2  # and of that to the last lines, which tell at least how it ended
_LINE_CHARS = 400
_MISSES = 30  # that do not fit: then the budget is spent
_TEMPLATE_CHARS = 220
_AGAIN = 15  # places further back: where the second of a kind stands
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_GRAVE = re.compile(
    r"Traceback|\w(Error|Exception)\b|\bFATAL\b|\bXid\b|panic|[Kk]illed|out of memory|core dumped|[Ss]ignal"
    r"|Assertion|Segmentation|[Uu]ncorrectable|terminate called"
)
_MILD = re.compile(r"\bwarn|\bdeprecat|\bdebug\b", re.IGNORECASE)


class LineTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """One template that stands for all similar lines."""

    text: str
    count: int
    first: int  # the number of the first such line, from 1
    last: int


class ShownLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log that the digest shows."""

    number: int
    text: str  # masked and cut
    raw: str


class LogDigest(msgspec.Struct, frozen=True, kw_only=True):
    lines: int
    kinds: int
    skipped: int  # lines that were not looked at, being as new as thousands beside them
    templates: tuple[LineTemplate, ...]
    shown: tuple[ShownLine, ...]

    def format_text(self) -> str:
        skipped = f", {self.skipped} of them sampled" if self.skipped else ""
        parts = [f"log of {self.lines} lines{skipped}; {self.kinds} kinds of lines, {len(self.templates)} listed"]
        parts += ["", "how often, first and last line number, template (<n> a number or hash, <*> anything):"]
        parts += [_template_line(t) for t in self.templates]
        parts += ["", "lines by number (... stands for lines left out):"]
        before = 0
        for line in self.shown:
            parts += ["..."] if line.number != before + 1 else []
            parts.append(f"{line.number}| {line.text}")
            before = line.number
        return "\n".join(parts)


def digest_log(chunks: Iterable[bytes | str], *, budget: int, mask: Callable[[str], str] = str) -> LogDigest:
    """Read a log and return a digest of about `budget` characters. All text in the digest passes through `mask`."""
    miner = mine_log(chunks)
    score = {id(kind): _kind_score(kind, miner.lines) for kind in miner.kinds}
    by_score = sorted(miner.kinds, key=lambda kind: (-score[id(kind)], kind.first))
    lines_budget = int(budget * _LINES_PART)
    tail = _shown_tail(miner, int(lines_budget * _TAIL_PART), mask)
    shown = _shown_windows(by_score, lines_budget - _count_chars(tail), mask) | tail
    by_count = sorted(miner.kinds, key=lambda kind: (-kind.count, kind.first))
    mixed = [kind for pair in zip(by_score, by_count, strict=True) for kind in pair]
    templates = _fit_templates(mixed, budget - lines_budget - 300, mask)
    return LogDigest(
        lines=miner.lines,
        kinds=len(miner.kinds),
        skipped=miner.skipped,
        templates=tuple(sorted(templates, key=lambda t: t.first)),
        shown=tuple(shown[number] for number in sorted(shown)),
    )


def rank_trouble(miner: TemplateMiner) -> tuple[list[str], list[str]]:
    """Return samples of the kinds of lines that tell of trouble, gravest first, and the last lines, newest first."""
    scored = [(_kind_score(kind, miner.lines), kind) for kind in miner.kinds if kind.alarming or _is_grave(kind)]
    scored.sort(key=lambda one: (-one[0], one[1].first))
    return [plain_line(kind.sample) for _, kind in scored], [plain_line(raw) for raw in reversed(miner.tail)]


def plain_line(raw: bytes | str) -> str:
    """Return a line without colours and other control characters."""
    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    return _CONTROL.sub("", text).rstrip()


def _is_grave(kind: LineKind) -> bool:
    return bool(_GRAVE.search(plain_line(kind.sample)))


def _kind_score(kind: LineKind, lines: int) -> float:
    text = plain_line(kind.sample)
    rarity = min(4.0, math.log10(max(lines, 1) / max(kind.count, 1)))
    grave = 4.0 if _is_grave(kind) else 2.0 if kind.alarming else 0.0
    return rarity + grave - (2.0 if _MILD.search(text) else 0.0)


def _shown_tail(miner: TemplateMiner, budget: int, mask: Callable[[str], str]) -> dict[int, ShownLine]:
    found: dict[int, ShownLine] = {}
    for back, raw in enumerate(reversed(miner.tail)):
        line = _make_shown(miner.lines - back, raw, mask)
        budget -= _count_chars({0: line})
        if budget < 0:
            break
        found[line.number] = line
    return found


def _shown_windows(kinds: list[LineKind], budget: int, mask: Callable[[str], str]) -> dict[int, ShownLine]:
    """Return the worst and rarest lines, each with the lines around it, or alone if more would exceed the budget."""
    found: dict[int, ShownLine] = {}
    misses = 0
    for window in _ranked_windows(kinds):
        new = {n: _make_shown(n, raw, mask) for n, raw in enumerate(window.lines, window.first) if n not in found}
        if _count_chars(new) > budget:
            misses += 1
            new = {n: line for n, line in new.items() if n == window.number and _count_chars({n: line}) <= budget}
        budget -= _count_chars(new)
        found |= new
        if misses > _MISSES:
            break
    return found


def _ranked_windows(kinds: list[LineKind]) -> Iterator[LineWindow]:
    """Yield windows in the order of their kinds. Windows of some other kinds stand between two of the same kind."""
    ranked = [(at + _AGAIN * again, window) for at, k in enumerate(kinds) for again, window in enumerate(k.windows)]
    return (window for _, window in sorted(ranked, key=lambda one: (one[0], one[1].first)))


def _fit_templates(kinds: list[LineKind], budget: int, mask: Callable[[str], str]) -> list[LineTemplate]:
    found: dict[int, LineTemplate] = {}
    for kind in kinds:
        if id(kind) in found:
            continue
        words = replace_variables(mask(plain_line(kind.sample))).split()
        if len(words) == len(kind.words):  # masking may have joined some
            words = [word if word == was else "<*>" for word, was in zip(words, kind.words, strict=True)]
        text = _cut_text(" ".join(words), _TEMPLATE_CHARS)
        template = LineTemplate(text=text, count=kind.count, first=kind.first, last=kind.last)
        budget -= len(_template_line(template)) + 1
        if budget < 0:
            break
        found[id(kind)] = template
    return list(found.values())


def _template_line(t: LineTemplate) -> str:
    where = f"{t.first}-{t.last}" if t.last > t.first else str(t.first)
    return f"{t.count}x {where}  {t.text}"


def _make_shown(number: int, raw: bytes, mask: Callable[[str], str]) -> ShownLine:
    text = plain_line(raw)
    return ShownLine(number=number, text=_cut_text(mask(text), _LINE_CHARS), raw=text)


def _cut_text(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most * 3 // 4]} ... {text[len(text) - most // 4 + 5 :]}"


def _count_chars(lines: dict[int, ShownLine]) -> int:
    return sum(len(line.text) + len(str(line.number)) + 5 for line in lines.values())
