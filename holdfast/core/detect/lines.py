"""Line detector: finds messages that the catalog knows in the kernel log and in the output of ranks.

Some messages are reported but never acted on. One kind is what a rank writes, since a script may print anything. The
other kind is about a disk or GPU that the job does not use. The detector reports an OOM kill of a process that is no
rank only if the kernel has just counted a kill in our own cgroup. One node per host reports messages about the machine.
The node that owns a process reports messages about that process.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.incident.alarm_rate_limit import RepeatFilter, SlidingSum, cap_stance
from holdfast.core.incident.incident_text import advice_clause
from holdfast.core.log_analysis.regex_line_budget import CHARS, allowed_chars
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Line

_EVIDENCE_CHARS = 300
_OF_CHARS = 80


class LineLimits(msgspec.Struct, frozen=True, kw_only=True):
    stance: Stance = Stance.ACT  # the most that an alarm of this detector may be for
    bytes_s: int = 1 << 20  # of what a node's ranks write is looked at; the rest is skipped
    catalog: str = ""  # a file of rows beside our own


class LineRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Catalog row that says what one message means; the pattern's group `of` captures the message's subject."""

    klass: str
    group: str
    action: str
    needle: str  # a part of every such line: looked for first, as patterns are slow
    pattern: str
    say: str  # with {of}
    sample: str
    source: str
    rank: bool = False  # written by ranks, not by the kernel
    owner: str = ""  # what `of` names: "gpu", "disk" or "rank"; acted on only if it is one of the job's
    times: int = 1
    within_s: float = 300.0
    stance: Stance = Stance.NOTIFY
    hard: bool = False
    hint: str = ""


class MachineUse(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of this machine that the job uses."""

    node: str
    suspects: tuple[str, ...]  # the nodes on this host
    speaks: bool = True  # whether this node speaks for the host
    gpus: frozenset[str] = frozenset()  # by their PCI address; empty: not known, so all of them
    disks: frozenset[str] = frozenset()
    ranks: Mapping[int, int] = {}  # pid -> rank
    bereaved: bool = False  # the kernel has just killed something of this node's own for want of memory
    elsewhere: frozenset[int] = frozenset()  # pids of ranks that other nodes on this host have


class LineCatalog:
    def __init__(self, rows: Iterable[LineRow]) -> None:
        self.rows = tuple(rows)
        self._patterns = [(row, re.compile(row.pattern), allowed_chars(row.pattern)) for row in self.rows]
        self._needles = {rank: {r.needle.encode() for r in self.rows if r.rank is rank} for rank in (True, False)}

    def may_match(self, text: bytes, *, rank: bool) -> bool:
        """Return whether the text contains a literal of any row, so that splitting it into lines is worthwhile."""
        return any(needle in text for needle in self._needles[rank])

    def match_line(self, text: str, *, rank: bool) -> list[tuple[LineRow, str]]:
        """Return the rows that match this line, each with the subject of the message, which may be empty."""
        text = text[: CHARS[0]]
        rows = [known for known in self._patterns if known[0].rank is rank and known[0].needle in text]
        found = ((row, pattern.search(text[:chars])) for row, pattern, chars in rows)
        return [(row, (m.groupdict().get("of") or "")[:_OF_CHARS]) for row, m in found if m]


class LineDetector:
    def __init__(self, limits: LineLimits, catalog: LineCatalog) -> None:
        self.limits = limits
        self.catalog = catalog
        self._tally = SlidingSum()
        self._told = RepeatFilter()

    def on_line(self, line: Line, owned: MachineUse) -> Alarm | None:
        found = self.catalog.match_line(line.text, rank=line.rank >= 0)
        if not found:
            return None
        row, of = found[0]
        ours = _is_ours(row, of, owned)
        rank = owned.ranks.get(_parse_number(of), -1) if row.owner == "rank" else line.rank
        if rank < 0 and not owned.speaks:
            return None
        if rank < 0 and row.owner == "rank" and (_parse_number(of) in owned.elsewhere or not owned.bereaved):
            return None  # another node's, or nobody's of this job: a machine may have many tenants
        key = (row.pattern, of, line.rank)
        if self._tally.add(line.at, key, 1, row.within_s) < row.times or self._told.is_repeat(line.at, key):
            return None
        most = self.limits.stance if ours else Stance.NOTIFY
        said = row.say.format(of=of)
        return Alarm(
            kind=Kind.LINES,
            at=line.at,
            suspects=owned.suspects if rank < 0 else (owned.node,),
            ranks=(rank,) if rank >= 0 else (),
            klass=row.klass,
            group=row.group,
            reason=f"{said}{advice_clause(row.hint)}",
            signature=f"{row.klass} {said}" if row.owner != "rank" else row.klass,
            evidence=(cut_words(line.text, _EVIDENCE_CHARS),),
            stance=cap_stance(cap_stance(row.stance, most), self.limits.stance),
            hard=row.hard and ours,
        )


def _is_ours(row: LineRow, of: str, owned: MachineUse) -> bool:
    match row.owner:
        case "gpu":
            return not owned.gpus or of in owned.gpus
        case "disk":
            return of in owned.disks
        case "rank":
            return _parse_number(of) in owned.ranks
    return True


def _parse_number(of: str) -> int:
    return int(of) if of.isdecimal() else -1


def find_row_fault(row: LineRow) -> str:
    """Return what is wrong with one row, without regard to other rows; "" if nothing is."""
    try:
        pattern = re.compile(row.pattern)
    except re.error as e:
        return f"has a bad pattern: {e}"
    if not allowed_chars(row.pattern):
        return "has too many repeats one after another; give them limits, as in .{0,80}"
    if row.needle not in row.sample or not row.needle:
        return "has a needle that is not in its sample"
    if not pattern.search(row.sample):
        return "does not match its own sample"
    if row.owner and (row.owner not in ("gpu", "disk", "rank") or "of" not in pattern.groupindex):
        return "has an owner other than gpu, disk or rank, or no group 'of' that names it"
    if row.rank and (row.hard or row.stance is Stance.ACT):
        return "would act on what a rank writes, which may be anything"
    try:
        row.say.format(of="")
    except (KeyError, IndexError, ValueError):
        return "may name {of} in what it says, nothing else"
    return ""
