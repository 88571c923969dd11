"""Collects launchers' reports on how processes ended: the rank, its exit code, and which rank failed first."""

import re
from collections.abc import Iterable

import msgspec

from holdfast.core.log_analysis.line_prefixes import LogLine

_SIGNALS = {"HUP": 1, "INT": 2, "ILL": 4, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "SEGV": 11, "PIPE": 13, "TERM": 15}
_SPOKEN = {
    "killed": 9, "segmentation fault": 11, "bus error": 7, "aborted": 6, "terminated": 15, "out of memory": 9,
    "floating point exception": 8, "illegal instruction": 4, "hangup": 1, "interrupt": 2,
}  # fmt: skip
_SPOKEN_SIGNAL = "|".join(_SPOKEN)
_FIELD = re.compile(
    r"^\s*(?P<key>rank|exitcode|host|traceback)\s*: (?P<value>-?[\w.-]+)(?: \((?:local_rank: \d+|pid: (?P<pid>\d+))\))?"
)
_INIT = re.compile(r"\brank (\d+) nranks \d+")  # NCCL, when it is told to be talkative
_MPI = re.compile(
    r"^\s*Process name: \[(?:\[\d+,\d+\]|[\w.-]+@\d+),(?P<rank>\d+)\]"
)  # the first to end, by mpirun; its code follows
_ABOUT = ("rank", "child")  # who is told about, where it is not who speaks
_ROOT = "Root Cause (first observed failure)"
_ENDS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"^holdfast: (?:incident \d+[^:]*: )?rank (?P<rank>\d+) on (?P<node>[\w.-]+) "
        r"(?:exited with code (?P<code>\d+)|was killed by (?:SIG(?P<name>[A-Z]+)|signal (?P<signal>\d+)))",
        r"^holdfast: (?:incident \d+[^:]*: )?ranks [\d, andmore-]{1,200} on .{1,300}? were killed by "
        r"(?:SIG(?P<name>[A-Z]+)|signal (?P<signal>\d+))",
        r"^srun: error: (?P<node>[\w.-]+): tasks? (?P<rank>\d+)(?:[-,\d]*): "
        rf"(?:exited with exit code (?P<code>\d+)|(?P<spoken>{_SPOKEN_SIGNAL}))",
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>[\w.-]+) exited on signal (?P<signal>\d+)",
        r"(?:process|rank|worker) (?P<rank>\d+) (?:terminated|exit|exited|died|failed) with "
        r"(?:signal (?:SIG)?(?P<name>[A-Z]+)|(?:exit ?code|code|return code|status(?: code)?) (?P<code>-?\d+))",
        r"rank (?P<rank>\d+) (?:was )?killed by signal (?P<signal>\d+)",
        r"(?:process|shard|child) was (?:signaled|killed|terminated)\b.{0,30}\b(?:with|by) signal (?P<signal>\d+)",
        r"(?P<child>Child process) with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)",
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)",
        r"Signal (?P<signal>\d+) \(SIG[A-Z]+\) received by PID (?P<pid>\d+)",
        r"(?:--local_rank=(?P<local>\d+).{0,2000})?exits with return code = (?P<code>-?\d+)",
        r"died with <Signals\.SIG(?P<name>[A-Z]+): \d+>",
        r"returned non-zero exit status (?P<code>\d+)",
        r"(?:exit(?:ed)? with (?:exit )?(?:code|status):?|exit code:?|exit status:?|exitCode\"?:) (?P<code>-?\d+)\b",
        r"^(?:zsh: |\[\d+\] {1,8}\+? {0,8}\d+ )(?P<spoken>killed|segmentation fault|bus error)\b",
        r"^(?:.*: line \d+: +\d+ )?(?P<spoken>Segmentation fault|Bus error|Killed|Aborted|Floating point exception|"
        r"Illegal instruction)(?: +\(core dumped\))?(?: .*)?$",
    )
)


class LauncherSummary(msgspec.Struct, kw_only=True):
    root_rank: int | None = None  # the first that the launcher saw
    is_listed: bool = False  # whether the launcher itself calls that rank the root cause
    local_rank: int | None = None  # of that, on its node
    told: dict[int, int] = {}  # by the id of a line: the rank it is about
    node: str = ""
    codes: dict[int, int] = {}  # by rank
    others: list[int] = []  # codes of nobody knows whom
    pids: dict[int, int] = {}  # pid -> rank
    lines: dict[int, LogLine] = {}  # by code: who says so

    def told_codes(self) -> list[int]:
        """Return the exit code of the rank that failed first. Return all known exit codes if that rank is unknown. If
        the rank is known but its code is not, leave out the codes of ranks that the launcher ended afterwards."""
        if self.root_rank in self.codes:
            return [self.codes[self.root_rank]]
        if self.is_listed:
            return self.others
        return [*self.codes.values(), *self.others]

    def is_about_another(self, said: LogLine) -> bool:
        """Return whether this line is about a rank that did not fail first; the launcher usually ended that rank."""
        return self.root_rank is not None and self.told.get(id(said), self.root_rank) != self.root_rank


def normalize_code(code: int) -> int:
    """Return an exit code as Python has it, with signals as negative numbers. Shells add 128 to a signal."""
    return 128 - code if 128 < code < 128 + 65 else code


def summarize_lines(lines: Iterable[LogLine]) -> LauncherSummary:
    summary = LauncherSummary()
    block = _Block(summary)
    for said in lines:
        if said.pid is not None and (found := _INIT.search(said.text)):
            summary.pids[said.pid] = int(found[1])
        if summary.root_rank is None and (found := _MPI.match(said.text)):
            summary.root_rank = int(found["rank"])
        if _ROOT in said.text:
            block.root = True
        elif found := _FIELD.match(said.text):
            block.add_field(found, said)
        elif ends := next((m for pattern in _ENDS if (m := pattern.search(said.text))), None):
            _note_end(summary, ends, said)
    return summary


class _Block:
    """Reads torchrun's list of failures, field by field."""

    def __init__(self, summary: LauncherSummary) -> None:
        self.summary = summary
        self.root = False  # whether what follows is what it calls the root cause
        self._rank: int | None = None
        self._node = ""

    def add_field(self, found: re.Match[str], said: LogLine) -> None:
        value = found["value"]
        number = int(value) if value.lstrip("-").isdecimal() else None
        if self._rank is not None and found["key"] != "rank":
            self.summary.told[id(said)] = self._rank
        match found["key"]:
            case "host":
                self._node = value
            case "rank":
                self._rank = number
                if self.root:
                    self.summary.root_rank, self.summary.node = number, self._node
                    self.summary.is_listed = True
            case "exitcode" if number is not None and self._rank is not None:
                _note_code(self.summary, self._rank, normalize_code(number), said)
                if found["pid"]:
                    self.summary.pids[int(found["pid"])] = self._rank


def _note_end(summary: LauncherSummary, found: re.Match[str], said: LogLine) -> None:
    told = {name: value for name, value in found.groupdict().items() if value}
    code = _parse_code(told)
    if not code:
        return
    rank = int(told["rank"]) if "rank" in told else said.rank
    if rank is not None and "pid" in told:
        summary.pids[int(told["pid"])] = rank
    _note_code(summary, rank, code, said)
    if summary.local_rank is None and "local" in told:
        summary.local_rank = int(told["local"])
    if summary.root_rank is None and rank is not None and not told.keys().isdisjoint(_ABOUT) and code != -15:
        summary.root_rank, summary.node = rank, told.get("node", "")


def _parse_code(told: dict[str, str]) -> int:
    if "signal" in told:
        return -int(told["signal"])
    if "name" in told:
        return -_SIGNALS.get(told["name"].upper(), 0)
    if "spoken" in told:
        return -_SPOKEN[told["spoken"].lower()]
    return normalize_code(int(told["code"]))


def _note_code(summary: LauncherSummary, rank: int | None, code: int, said: LogLine) -> None:
    if rank is None:
        summary.others.append(code)
    else:
        summary.codes.setdefault(rank, code)
    summary.lines.setdefault(code, said)
