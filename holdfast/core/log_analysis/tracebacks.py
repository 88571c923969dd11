"""Parses tracebacks: which exception was raised where, in whose code, and what led to it."""

import re
from collections.abc import Iterable, Iterator

import msgspec

from holdfast.core.log_analysis.line_prefixes import LogLine

_HEAD = re.compile(
    r"^(?P<indent>\s*)(?:(?P<words>[^\s│|][^\n]{0,200}[:.!]) )?(?P<kind>Original |Exception Group |Remote )?"
    r"Traceback \(most recent call last\)"
)
_FRAME = re.compile(r'^(?P<indent>\s*)File "(?P<file>[^"]{1,500})", line (?P<line>\d+)(?:, in (?P<function>.{1,200}))?')
_RAISED = re.compile(
    r"^(?P<type>[A-Za-z_][\w]*(?:\.[A-Za-z_<][\w>]*)*)(?:\((?P<inner>[\w.]+)\))?(?: ?\[[^\]]{1,40}\])?"
    r"(?::(?: (?P<text>.*)|$)|$)"
)
_BARE = re.compile(r"(?:Error|Exception|Interrupt|Exit|Timeout|Iteration|Empty|Full|Failure|Expired|error)$")
_SHOUTS = ("error", "Error", "Exception", "Failure")  # how shells and tools begin a line, too
_SPECIAL = re.compile(r"^\s*+(?:[~^ ]+|\.\.\.<?.*|\[Previous line repeated .*\])$")
_GROUPED = re.compile(r"^\s*(?:\||\+(?=[-+ ]))[-+ ]?(?:-{0,80}\+?-{1,80} (?:\d+|\.\.\.) -+$)?")
_BOXED = re.compile(r"^\s*[│╭╰|][─ ]*(?:❱ *)?")
_BOX_FRAME = re.compile(r"^(?P<file>[/<][^:]{1,400}):(?P<line>\d+) in (?P<function>\S{1,200})")
_STACK_FRAMES, _FILE_CHARS, _FUNCTION_CHARS = 200, 240, 60  # that rows with `frames` are searched for in
_STATEMENT_CHARS = 200
_DURING = "During handling of the above exception, another exception occurred"
_DIRECT = "The above exception was the direct cause of the following exception"
_WRAPS = re.compile(
    r"^Caught \w+ in |^-- Process \d+ terminated|_?RemoteTraceback$|ExceptionGroup$|RayTaskError|ProcessRaised"
)
_REPORTS = re.compile(r"^Caught RuntimeError in (?:replica|DataLoader worker|pin memory)\b")
_PROCESS = re.compile(r"-- Process (\d+) terminated with the following error")
_SUMMARY = "ChildFailedError"  # what follows is torchrun's list, not its message
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/usr/(?:local/)?lib/|/lib/python\d|^<|/torch/(?:nn|utils|distributed|_\w+|autograd|optim)/"
)
_OTHERS = re.compile(
    r"^(?:#{3,}|={5,} \w|usage: |\+ \w|srun: |slurmstepd: |mpirun\b|pdsh@)"
)  # begins no line of a message
_RAISES = re.compile(
    r"""^raise (?P<type>[A-Za-z_][\w.]*)"""
    r"""(?:\(\s*[frb]{0,2}(?P<quote>["'])(?P<text>(?:(?!(?P=quote)).){1,400})|[(\s]|$)"""
)
_JOINED = re.compile(r"""(?P<end>["'])\s+[frb]{0,2}(?P=end)""")  # strings that stand side by side are one
_WRAPPED = re.compile(
    r"^\d{0,5}(?:, )?(?:i?n )?(?P<function>[A-Za-z_<][\w<>.]{1,100})\s*$"
)  # a frame that a terminal broke in two
_QUOTED = re.compile(r"""^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception))\(["']?(?P<text>.*?)["']?\)?$""")
CUT = "CutTraceback"  # the type of an exception that nothing tells
_OPEN = 12  # lines of others that may stand between a frame and what follows it
_MESSAGE = 40  # lines that a message may have
_JOINED_LINES, _JOINED_CHARS = 8, 600  # of a message that begins below the exception's name


class TracebackFrame(msgspec.Struct, frozen=True):
    file: str
    line: int
    function: str

    @property
    def is_user_code(self) -> bool:
        """Return whether the frame's path looks like the user's code, not like a library."""
        return not _LIBRARY.search(self.file)


class RaisedException(msgspec.Struct, kw_only=True):
    """One exception with its frames, as read from a log."""

    type: str
    message: str
    said: LogLine  # its line
    frames: list[TracebackFrame] = []  # outermost first
    more: list[LogLine] = []  # further lines of its message
    link: str = ""  # how it came of the one before it: "during", "direct"
    inner: bool = False  # was printed after what it led to
    before: str = ""  # what was said before its traceback: why it is shown
    cut: bool = False  # the log ends before it is told; known from the code that raised it
    headless: bool = False  # no "Traceback" stands above its frames
    ignored: bool = False  # in a destructor or the like, where nobody can catch it
    raising: str = ""  # the statement below its last frame, if that raises a new exception
    statement: str = ""  # the statement below its last frame
    torn: bool = False  # frames below the last one were left out: it shows no statement, as others do

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def is_wrapper(self) -> bool:
        """Return whether the message only announces the traceback of another process or thread below it."""
        return self.message.startswith("Caught ") and _WRAPS.search(self.message) is not None

    def joined_message(self) -> LogLine | None:
        """Return the message as one line, if it begins below the exception's name; else None."""
        words = [said for said in self.more[:_JOINED_LINES] if said.text.strip()]
        if self.message or len(words) < 2:
            return None
        text = f"{self.type}: {' '.join(said.text.strip() for said in words)}"
        return msgspec.structs.replace(words[0], text=text[:_JOINED_CHARS])

    @property
    def is_mere_report(self) -> bool:
        """Return whether this says only that a thread or a loader's process raised something, and not what."""
        return _REPORTS.search(self.message) is not None

    @property
    def stack(self) -> str:
        """The words before the traceback, the statement of the innermost frame after "> ", and then the frames, one per
        line; the innermost is last, so that a row's pattern can anchor to it, or "..." if it was left out. Of very many
        or very long frames only some is told: rows search it."""
        half = _STACK_FRAMES // 2
        frames = self.frames if len(self.frames) <= 2 * half else [*self.frames[:half], *self.frames[-half:]]
        told = (f"{frame.file[-_FILE_CHARS:]} {frame.function[:_FUNCTION_CHARS]}" for frame in frames)
        statement = (f"> {self.statement[:_STATEMENT_CHARS]}",) if self.statement else ()
        return "\n".join((self.before, *statement, *told, *(("...",) if self.torn else ())))

    @property
    def origin(self) -> str:
        frame = next((f for f in reversed(self.frames) if f.is_user_code), self.frames[-1] if self.frames else None)
        return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}" if frame else ""


class ExceptionChain(msgspec.Struct, kw_only=True):
    """Exceptions that led to one another, the first cause first."""

    chain: list[RaisedException]

    @property
    def last(self) -> RaisedException:
        return self.chain[-1]


class _TracebackParser:
    """Parses the lines of one stream, that is of one rank or process, into exception chains."""

    def __init__(self) -> None:
        self.traces: list[ExceptionChain] = []
        self._frames: list[TracebackFrame] | None = None  # of a traceback whose exception is still to come
        self._code: LogLine | None = None  # the last line of code shown
        self._raising = ""  # the statement that raises, shown below the last frame
        self._statement = ""  # what is shown below the last frame
        self._shown = False  # whether a statement is shown below any frame
        self._headless = False
        self._indent = 0
        self._waited = 0
        self._link = ""
        self._inner = False
        self._grouped = False  # whether this line belongs to a group of exceptions
        self._ignored = False
        self._process: int | None = None  # of torch.multiprocessing's, whose traceback is to come
        self._newest: RaisedException | None = None
        self._last = ""  # words outside of any traceback
        self._before = ""  # those that stood before this one
        self._message = 0  # lines that may still belong to it

    def add_line(self, said: LogLine) -> None:
        self._grouped = said.text.lstrip()[:1] in ("|", "+")
        text = _GROUPED.sub("", said.text) if self._grouped else said.text
        if text.lstrip()[:1] in ("│", "╭", "╰"):  # as the library rich shows them
            self._add_boxed_line(_BOXED.sub("", text))
        elif found := _HEAD.match(text):
            self._last = found["words"] or self._last
            self._begin_traceback(len(found["indent"]), found["kind"] or "")
        elif found := _FRAME.match(text):
            if self._frames is None:  # its head was cut off, or it belongs to an exception told before
                self._begin_traceback(max(0, len(found["indent"]) - 2), "")
                self._headless = True
            assert self._frames is not None
            self._frames.append(TracebackFrame(found["file"], int(found["line"]), (found["function"] or "").strip()))
            self._waited, self._raising, self._statement = 0, "", ""
            said.code = True  # names of files and functions sound like anything
        elif text.startswith((_DURING, _DIRECT)):
            self._link = "during" if text.startswith(_DURING) else "direct"
            self._frames, self._message = None, 0
        elif text.startswith("Exception ignored in"):
            self._ignored, self._frames = True, None
        elif text.strip():
            self._add_words(text, said)

    def _add_boxed_line(self, text: str) -> None:
        if text.startswith("Traceback (most recent call last)"):
            self._begin_traceback(0, "")
        elif self._frames is not None and (found := _BOX_FRAME.match(text)):
            self._frames.append(TracebackFrame(found["file"], int(found["line"]), found["function"]))

    def _begin_traceback(self, indent: int, kind: str) -> None:
        self._inner = kind == "Original " or (not self._link and self._is_wrapped())
        self._frames, self._indent, self._waited = [], indent, 0
        self._headless, self._statement, self._shown = False, "", False
        self._before, self._last = self._last, ""

    def _is_wrapped(self) -> bool:
        """Return whether the traceback that begins now is the cause of the exception reported just before it."""
        if self._newest is None or not self._message:
            return False
        last = self.traces[-1].last
        return bool(_WRAPS.search(self._newest.message) or _WRAPS.search(self._newest.type)) or (
            self._grouped and last.name.endswith("ExceptionGroup")
        )

    def _add_words(self, text: str, said: LogLine) -> None:
        if _SPECIAL.match(text):
            return
        if self._frames is None:
            self._last = text
        if quoted := self._read_quoted(text):
            said.text = text = quoted
            self._inner = True
        indent = len(text) - len(text.lstrip())
        found = _RAISED.match(text.strip())
        if self._frames and indent > self._indent + 2:
            said.code, self._code = True, said
            words, self._shown = text.strip(), True
            self._statement = f"{self._statement} {words}".lstrip()[:_STATEMENT_CHARS]
            self._raising = f"{self._raising} {words}" if self._raising else words if words.startswith("raise ") else ""
        elif self._frames is not None:
            if found and indent <= self._indent and _is_type(found["type"], strict=self._waited > 0):
                self._end_traceback(found, said, self._frames)
            elif self._frames and not self._frames[-1].function and (rest := _WRAPPED.match(text)):
                self._frames[-1] = msgspec.structs.replace(self._frames[-1], function=rest["function"])
            elif indent <= self._indent:
                self._waited += 1
                self._frames = None if self._waited > _OPEN else self._frames
        elif found and not indent and _BARE.search(found["type"]) and _is_type(found["type"], strict=True):
            self._end_traceback(found, said, [])
        elif _OTHERS.match(text):
            self._message = 0
        elif self._message and self._newest is not None:
            self._message -= 1
            if process := _PROCESS.match(text):
                self._newest.message += f" {text}"
                self._process = int(process[1])
            if self._newest.name != _SUMMARY:
                self._newest.more.append(said)

    def _read_quoted(self, text: str) -> str:
        """Return a cause that Hydra quotes below its own message, in the form "Type: text"; "" if the line has none."""
        if self._frames is not None or not self._message or self._newest is None:
            return ""
        found = _QUOTED.match(text) if self._newest.name == "InstantiationException" else None
        return f"{found['type']}: {found['text']}" if found and _is_type(found["type"], strict=True) else ""

    def _end_traceback(self, found: re.Match[str], said: LogLine, frames: list[TracebackFrame]) -> None:
        if self._inner and said.rank is None:
            said.rank = self._process
        raised = RaisedException(
            type=found["inner"] or found["type"],
            message=found["text"] or "",
            said=said,
            frames=frames,
            link=self._link,
            inner=self._inner,
            before=self._before,
            ignored=self._ignored,
            raising=self._raising if frames else "",
            statement=self._statement if frames else "",
            torn=bool(frames) and self._shown and not self._statement and frames[-1].file.endswith(".py"),
        )
        self._before = self._last = ""
        self._ignored = False
        if found["inner"]:
            raised.message = f"RayTaskError {raised.message}"
        if self.traces and self._inner:
            self.traces[-1].chain.insert(0, raised)
        elif self.traces and self._link:
            self.traces[-1].chain.append(raised)
        else:
            self.traces.append(ExceptionChain(chain=[raised]))
        self._frames, self._link, self._inner = None, "", False
        self._newest, self._message = raised, _MESSAGE

    def end_stream(self) -> None:
        """End a traceback that the log cuts off; infer the exception if the last code is a `raise` or `assert`."""
        frames, code = self._frames, self._code
        if not any(frame.function for frame in frames or ()) or code is None or self._ignored:
            return
        shown = _JOINED.sub("", self._raising) or code.text.strip()
        found = _RAISES.match(shown)
        name = found["type"] if found else "AssertionError" if shown.startswith("assert ") else CUT
        words = f"{name}: {found['text']}" if found and found["text"] else name
        said = msgspec.structs.replace(code, text=words, raw=words, code=False)
        one = RaisedException(type=name, message=words, said=said, frames=frames or [], before=self._before, cut=True)
        one.headless, one.statement = self._headless, self._statement
        self.traces.append(ExceptionChain(chain=[one]))


def _is_type(name: str, *, strict: bool) -> bool:
    """Return whether this may be the name of an exception. Be `strict` where a line such as "Loss: 2.3" may occur."""
    last = name.rsplit(".", 1)[-1]
    if strict and name in _SHOUTS:
        return False
    return bool(_BARE.search(last)) or "." in name or (not strict and (last[:1].isupper() or last.startswith("_")))


def parse_tracebacks(lines: Iterable[LogLine]) -> Iterator[ExceptionChain]:
    """Yield the exception chains of all streams. The lines must come in the order of their sources."""
    mouths: dict[tuple[int, int | None, str, int | None], _TracebackParser] = {}
    for said in lines:
        mouths.setdefault((said.source, said.rank, said.node, said.pid), _TracebackParser()).add_line(said)
    for mouth in mouths.values():
        mouth.end_stream()
        yield from mouth.traces
