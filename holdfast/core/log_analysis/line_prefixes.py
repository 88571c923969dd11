"""Strips the prefixes of one or several tools from log lines, and reads rank, node, time and level from them."""

import json
import re
from calendar import timegm
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.log_analysis.pasted_text import restore_pasted

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
_MONTHS = {name: n for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}
_LEVELS = {"w": "warning", "e": "error", "i": "info", "f": "fatal", "d": "debug", "c": "fatal", "v": "debug"}
_ROUNDS = 8  # marks of different tools before one line
_HABIT = 0.6  # of the lines that must have a mark which could be anything else as well

_CLOCK = r"(?P<h>[0-2]\d):(?P<mi>[0-5]\d):(?P<s>[0-6]\d)(?P<f>[.,]\d{1,9})?"
_LEVEL = r"(?P<level>DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|ERR|CRITICAL|FATAL)"
# What a line may begin with, by its first character: a digit (0), a letter (a), or that character itself.
_TOLD = (
    # 2024-05-01T10:22:33.123Z, [2024-05-01 10:22:33,123], 2024/05/01 10:22:33, with the stream of a container
    (
        "0[(",
        rf"[\[(]?(?P<y>20\d\d)[-/](?P<mo>[01]\d)[-/](?P<d>[0-3]\d)[T ]{_CLOCK} ?(?P<z>Z|UTC|[+-]\d\d:?\d\d)?"
        r"(?: ?(?:DP|PP|EP)\d+)*(?: ?TP(?P<rank>\d{1,4})(?: (?:DP|PP|EP)\d+)*)?[\])]?"
        r"(?: (?:stdout|stderr) [FP](?= ))?[:,]?(?: - )?\s?",
    ),
    # 09-03 22:14:51 [core.py:632], as vLLM writes them
    ("0", rf"(?P<mo>[01]\d)-(?P<d>[0-3]\d) {_CLOCK} (?:\[?[\w./-]{{1,80}}\.py:\d+\]\s?)?"),
    ("0[", rf"\[?(?P<mo>[01]\d)/(?P<d>[0-3]\d)/(?:20)?\d\d {_CLOCK}\]?(?: - )?\s{{0,4}}"),  # 05/01/2024 10:22:33
    # 2024-05-01-10:22:33 (PID:33, Device:0, RankID:0), as Ascend's libraries write them
    (
        "0",
        rf"(?P<y>20\d\d)-(?P<mo>[01]\d)-(?P<d>[0-3]\d)-{_CLOCK}[.\d]* ?"
        r"(?:\(PID:(?P<pid>\d+), Device:-?\d+, RankID:(?:(?P<rank>\d{1,6})|-1)\) ?)?",
    ),
    # [NeMo E 2024-08-02 09:13:40 utils:215]
    (
        "[",
        rf"\[NeMo (?P<glog>[IWEDCF]) (?P<y>20\d\d)-(?P<mo>[01]\d)-(?P<d>[0-3]\d) {_CLOCK} [\w.]{{1,80}}:\d+\]\s?",
    ),
    ("a", r"(?P<facility>kern) {0,5}: {0,8}\w{3,8} {0,8}: ?"),  # dmesg -x
    # May  1 10:22:33 node17 kernel:
    (
        "a",
        rf"(?P<mon>[A-Z][a-z][a-z]) {{1,2}}(?P<d>\d\d?) {_CLOCK} (?P<node>[\w.-]+) "
        r"(?P<who>[\w./@-]+)(?:\[(?P<pid>\d+)\])?: ",
    ),
    # [Wed May  1 10:22:33 2024]
    ("[", rf"\[[A-Z][a-z][a-z] (?P<mon>[A-Z][a-z][a-z]) {{1,2}}(?P<d>\d\d?) {_CLOCK} (?P<y>20\d\d)\]\s?"),
    # E0501 10:22:33.123456 12345 file.cc:12] and [E501 10:22:33.123456789 ProcessGroupNCCL.cpp:616]
    (
        "a[",
        rf"\[?(?P<glog>[IWEF])(?:20\d\d)?(?P<mo>[01]?\d)(?P<d>[0-3]\d) {_CLOCK} +(?:(?P<pid>\d+) )?"
        r"(?P<who>[\w./-]+:\d+)\]\s?",
    ),
    ("a0", r"(?:(?P<node>[\w.-]+) )?(?P<who>kernel): "),
    ("[", r"\[(?P<glog>[IWEF]) (?P<who>[\w.]+\.(?:cpp|h|cc):\d+)\]\s?"),  # [W socket.cpp:601]
    (
        "[",
        r"\[ {0,8}(?P<boot>[+<]? {0,8}\d+\.\d{6}>?)\]\s?",
    ),  # since the machine started, which nobody else counts from
    ("0[", rf"\[?{_CLOCK}\]?\s"),
    ("<", r"<\d{1,3}>(?=\[)"),  # the kernel's priority
    # [rank3]:, [rank 3], Rank 3:, [Rank 3/8], (rank3)
    ("[(<a", r"[\[(<]?(?:global[_ ])?(?:RANK|[Rr]ank)[ _:=-]{0,2}(?P<rank>\d{1,6})(?:/\d+)?(?:[\])>]:?|:)\s?"),
    ("[(", r"[\[(](?:[Rr]|local[_ ]rank[ :=]{0,2})(?P<rank>\d{1,6})[\])]:?\s?"),  # [r3]
    ("[(", r"[\[(](?:[Gg]pu|GPU|[Ww]orker|[Pp]roc(?:ess)?)[ _:#-]?(?P<rank>\d{1,6})[\])]:?\s?"),
    ("(", r"\((?P<who>raylet|autoscaler|gcs_server|pid)(?:[ =,+][^)\n]{1,40})?\)\s"),
    ("[", r"\[default(?P<rank>\d{1,6})\]:"),
    ("[", r"\[\d+,(?:mpirank:)?(?P<rank>\d{1,6})(?:,[\w.-]+)?\]<std(?:out|err)>:"),
    ("[", r"\[(?P<rank>\d{1,6})\](?:<std(?:out|err)>)?:\s?"),
    ("(", r"\((?P<who>[\w.:<>]+),? (?:rank=(?P<rank>\d+),? ?)?pid=(?P<pid>\d+)(?:, ip=(?P<node>[\w.:-]+))?\)\s?"),
    ("[", r"\[(?:pod/)?(?P<node>[\w.-]+)/[\w.-]+\]\s"),
    ("a0", r"(?P<node>[\w.-]{1,60}?)\s+\|\s"),
    # node17:12345:12399 [3] NCCL INFO
    ("a0", r"(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<dev>-?\d*)\] (?=\S* ?NCCL )"),
    ("[", r"\[(?P<node>[A-Za-z][\w.-]*):(?P<pid>\d+)\]\s"),
    ("[", rf"\[{_LEVEL}\]:?\s?"),
    ("a", rf"{_LEVEL}(?:\s+-\s+(?:[\w.]+ - )?|:[\w.]+:|:?\s+)"),
    # submitit WARNING (2021-06-09 02:16:05,338) -
    (
        "a",
        rf"[\w.]{{1,40}} {_LEVEL} \((?P<y>20\d\d)-(?P<mo>[01]\d)-(?P<d>[0-3]\d) {_CLOCK}\)(?: - |: ?)",
    ),
    ("a-", rf"(?:- )?[\w.]+(?: - |: \[){_LEVEL}(?: - |\]\s?)"),
    ("|", rf"\|\s*{_LEVEL}\s*\|\s?(?:[\w.:<>]+\s-\s)?"),
    ("[", r"\[[\w./-]+\.py:\d+(?::\w+)?\]\s"),
    ("[", r"\[[A-Za-z][\w.-]{1,30}\](?=\[)"),  # [TensorRT-LLM][ERROR]
    (">", r"(?:> ){1,4}(?=\S| )"),  # quoted in a mail or a thread
)
_COMPILED = [(starts, re.compile(pattern)) for starts, pattern in _TOLD]
_MARKS = {start: [pattern for starts, pattern in _COMPILED if start in starts] for start in "0a[(<|->"}
_TIME = _COMPILED[0][1]
_ANY_RANK = re.compile(r" {0,5}(?P<rank>\d{1,5}): ?")  # srun -l
_SURE_RANK = re.compile(r' {0,5}\d{1,5}: ?(?:Traceback \(most recent|  File ")')  # nothing else begins so
_ANY_NODE = re.compile(r"(?P<node>[A-Za-z][\w.-]{0,60}|\d+\.\d+\.\d+\.\d+): ")  # pdsh, deepspeed
_NO_NODE = re.compile(  # says so of itself, not of where it runs
    r"(?:Error|Exception|Warning)$|^[A-Z_]+$|^(?:srun|sbatch|slurm\w*|mpi\w+|prte\w*|orte\w*|pdsh|ssh|bash|sh|python[\d.]*|"
    r"holdfast|torchrun|deepspeed|accelerate|ray|docker|kubelet|kernel|nvidia-\S+|wandb|pip|error|warning|info|fatal|"
    r"usage)$"
)
_FAILURE = re.compile(
    r"^(?:exc(?:_?info|_?text|eption)?|err(?:or)?|stack_?(?:trace)?|traceback|reason|details?)$", re.IGNORECASE
)
_WARNING = re.compile(r"(?:\S{1,300}\.py:\d+: )?(?:\w+\.)*[A-Z]\w*Warning: ")  # as Python shows them
WARNED = "warned"  # the level of those: nothing ends with one
_INSIDE = re.compile(r"\[(?:RANK|[Rr]ank) ?(\d{1,6})\]|\b[Rr]ank (\d{1,6})[\]:]|\brank=(\d{1,6})\b")


class LogLine(msgspec.Struct, kw_only=True):
    """One log line: its text without prefixes, and the facts that the prefixes state."""

    text: str
    raw: str  # as it is shown
    source: int = 0  # which file
    index: int = 0  # which line of it
    rank: int | None = None
    node: str = ""
    pid: int | None = None
    device: int | None = None  # the GPU that NCCL names
    at: float | None = None  # seconds, comparable between those that have them
    day_s: float | None = None  # a mere time of day
    own_clock: bool = True  # whether it told the time itself
    level: str = ""
    kernel: bool = False
    code: bool = False  # a frame, or the line of a program shown below it


class PrefixHabits(msgspec.Struct, frozen=True):
    """Prefixes that could be something else but are trusted in this log, because most of its lines have them."""

    ranks: bool = False
    nodes: frozenset[str] = frozenset()


def find_habits(lines: Iterable[str]) -> PrefixHabits:
    lines = [line for line in lines if line.strip()]
    ranks = sum(1 for line in lines if _ANY_RANK.match(line))
    nodes = Counter(m["node"] for line in lines if (m := _ANY_NODE.match(line)))
    often = frozenset(node for node, count in nodes.items() if count > 2 and not _NO_NODE.search(node))
    return PrefixHabits(
        ranks=ranks > 1 and (ranks >= _HABIT * len(lines) or any(_SURE_RANK.match(line) for line in lines)),
        nodes=often if sum(nodes[node] for node in often) >= _HABIT * len(lines) else frozenset(),
    )


def strip_ansi(line: str) -> str:
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    return _CONTROL.sub(" ", line).rstrip()


def strip_prefixes(line: str, habits: PrefixHabits) -> LogLine:
    """Return a line without its prefixes, together with the rank, node, time and level that its prefixes state."""
    line = strip_ansi(line)
    said = LogLine(text=line, raw=line.strip())
    if line.startswith("{") and line.endswith("}"):
        _unwrap_json(said)
    if habits.ranks and (m := _ANY_RANK.match(said.text)):
        _note_prefix(said, m)
    elif habits.nodes and (m := _ANY_NODE.match(said.text)) and m["node"] in habits.nodes:
        _note_prefix(said, m)
    for _ in range(_ROUNDS):
        found = next((m for mark in _MARKS.get(_start_kind(said.text), ()) if (m := mark.match(said.text))), None)
        if found is None:
            break
        _note_prefix(said, found)
    if said.text.count("\\n") > 1 and "Traceback (most recent call last)" in said.text:
        said.text = said.text.replace("\\n", "\n").replace(
            '\\"', '"'
        )  # a traceback that somebody has put into one line
    if found := _WARNING.match(said.text):
        said.text, said.level = said.text[found.end() :], WARNED
    said.kernel = said.kernel or said.text.startswith("NVRM: ")
    if said.rank is None and (m := _INSIDE.search(said.text[:200])):
        said.rank = int(m[1] or m[2] or m[3])
    return said


def _start_kind(text: str) -> str:
    first = text[:1]
    return "a" if first.isalpha() else "0" if first.isdecimal() else first


def _note_prefix(said: LogLine, found: re.Match[str]) -> None:
    said.text = said.text[found.end() :]
    told = {name: value for name, value in found.groupdict().items() if value}
    if "rank" in told:
        said.rank = int(told["rank"])
    if "node" in told and not said.node:
        said.node = told["node"]
    if "pid" in told:
        said.pid = int(told["pid"])
    if "glog" in told:
        said.level = _LEVELS[told["glog"].lower()]
    if "level" in told:
        said.level = _LEVELS[told["level"][0].lower()]
    if told.get("who") == "kernel" or "boot" in told or "facility" in told:
        said.kernel = True
    if told.get("dev", "").isdecimal():
        said.device = int(told["dev"])
    if "h" in told and said.at is None:
        said.at = _parse_time(told)
        said.day_s = int(told["h"]) * 3600.0 + int(told["mi"]) * 60 + int(told["s"])


def _parse_time(told: dict[str, str]) -> float | None:
    """Return the time in seconds since the year began, because many tools omit the year; None without a date."""
    month = int(told["mo"]) if "mo" in told else _MONTHS.get(told.get("mon", "").lower(), 0)
    if not month or "d" not in told:
        return None  # a mere time of day: no two logs agree on the day
    clock = int(told["h"]), int(told["mi"]), int(told["s"])
    at = timegm((2000, month, int(told["d"]), *clock)) + float("0" + told.get("f", ".0").replace(",", "."))
    zone = told.get("z", "")
    if zone and zone[0] in "+-":
        at -= int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return at


def _unwrap_json(said: LogLine) -> None:
    """Turn a JSON log line, as containers and some loggers write it, into its message. Time, rank, node and level are
    taken from the fields of the line. A line that is not JSON stays as it is."""
    try:
        tree = json.loads(said.text)
    except (ValueError, RecursionError):
        return
    words = [tree[k] for k in ("log", "message", "msg", "text", "event") if isinstance(tree.get(k), str)][:1]
    more = [told for key, value in tree.items() for told in _failure_text(key, value) if told not in words]
    if not words and not more:
        return
    at = next((tree[k] for k in ("time", "timestamp", "ts", "asctime", "@timestamp") if k in tree), None)
    rank = next((tree[k] for k in ("rank", "global_rank") if isinstance(tree.get(k), int)), None)
    said.text = "\n".join(strip_ansi(line) for line in "\n".join([*words, *more]).rstrip("\n").split("\n"))
    said.raw = said.text.strip()
    said.rank = rank
    if isinstance(at, str) and (m := _TIME.match(at)):
        said.at = _parse_time({name: value for name, value in m.groupdict().items() if value})
    node = next((tree[k] for k in ("host", "hostname", "node", "pod") if isinstance(tree.get(k), str)), "")
    said.node = node
    level = next((tree[k] for k in ("level", "levelname", "severity") if isinstance(tree.get(k), str)), "")
    said.level = _LEVELS.get(level[:1].lower(), "")


def _failure_text(key: str, value: object) -> list[str]:
    """Return the failure texts in a JSON field and the fields inside it, known by a field's name or a traceback."""
    if isinstance(value, dict):
        return [told for name, inner in value.items() for told in _failure_text(str(name), inner)][:_ROUNDS]
    if isinstance(value, str) and (_FAILURE.search(key) or "Traceback (most recent" in value):
        return [value]
    return []


def fill_times(lines: Sequence[LogLine]) -> None:
    """Give a time to each line that has none: the time of the last line from the same rank in this log. If the rank has
    none, take the time of the last line in this log."""
    if all(said.at is None for said in lines):
        for said in lines:
            said.at = said.day_s  # nobody tells the day: then it is the same one
    last: dict[tuple[int, int | None], float] = {}
    newest: dict[int, float] = {}
    for said in lines:
        if said.at is not None:
            last[said.source, said.rank] = newest[said.source] = said.at
        else:
            said.at = last.get((said.source, said.rank), newest.get(said.source))
            said.own_clock = False


def parse_lines(lines: list[tuple[int, str]], source: int, rank: int | None = None, node: str = "") -> list[LogLine]:
    """Parse the lines of one log. `rank` overrides the rank in the lines; `node` applies to lines that name none."""
    lines = restore_pasted(lines)
    habits = find_habits(text for _, text in lines)
    found = []
    for index, text in lines:
        said = strip_prefixes(text, habits)
        said.source, said.index = source, index
        said.rank = rank if rank is not None else said.rank
        said.node = said.node or node
        if "\n" in said.text:  # several lines in one of JSON
            found += [msgspec.structs.replace(said, text=one, raw=one) for one in said.text.split("\n")]
        else:
            found.append(said)
    return found
