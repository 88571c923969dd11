"""The console of a run: follows the ranks' log files, shows our own messages, and limits floods of output."""

import contextlib
import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

import msgspec

from holdfast.cli.run_flags.flag_values import StreamChoice
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.live_footer import make_room
from holdfast.cli.terminal.overwritten_rows import show_newest, split_rows
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.cli.terminal.traceback_folding import TracebackFolding
from holdfast.core.terminal_sanitizer import sanitize_line, sentence_of_ours
from holdfast.linux.regular_files import open_file
from holdfast.wire.run_and_node_specs import RunSpec

_PUMP_S = 0.1
_EAGER_PUMP_S = 0.03  # until a rank has printed something: that is what a person waits for
_EAGER_S = 60.0  # but not for ever: many scripts print nothing
_CHUNK = 1 << 18
_KEEP = 1 << 14  # of a skipped flood, this much of its end is shown
_LINE_BYTES = 1 << 16  # of one line, this much of its beginning is shown
_BAR_S = 5.0  # how often the state of a progress bar is shown
_LOOK_S = 0.2  # how often new files are looked for
_HELD_S = 3.0  # what ranks print before the sentence about their restart waits for it so long at most
_OPENING = re.compile(rb"holdfast: (?:incident \d|pausing: |ending: |ended with code |done: |so far: )")
_LAST = re.compile(rb"holdfast: (?:ended with code |done: |so far: )")
_CLOSING = re.compile(rb"holdfast: .*(?:; (?:restarted in place|evicted |release \d+ was rolled back)|: restarted\b)")
_GENERATION = re.compile(r"gen-(\d+)")
_RANK = re.compile(r"rank-(?:0|[1-9]\d{0,8})")  # a rank may put anything beside these folders
_STDOUT, _STDERR = 1, 2
_PREFIX = "[rank ${rank}] "
_TORCHRUN_PREFIX = "[${role_name}${local_rank}]:"
_closed: set[int] = set()  # nobody reads these any more


def say(text: str) -> None:
    """Print one sentence of holdfast's own on the console."""
    write_all(_STDERR, f"holdfast: {sentence_of_ours(text)}\n".encode())


def write_all(fd: int, content: bytes) -> None:
    """Write all bytes to a console; if it is gone, as after `| head`, drop them, so that the job goes on."""
    with make_room():
        while content and fd not in _closed:
            try:
                content = content[os.write(fd, content) :]
            except BlockingIOError:  # whoever started us has left it so
                select.select([], [fd], [])
            except OSError:
                _closed.add(fd)


def find_console_files() -> tuple[str, ...]:
    """Return the files to which our stdout and stderr are redirected; none for a terminal or a pipe."""
    found = []
    for fd in (_STDOUT, _STDERR):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if stat.S_ISREG(os.fstat(fd).st_mode) and os.path.samestat(os.fstat(fd), os.stat(path)):
                found.append(path)
    return tuple(dict.fromkeys(found))


class ConsoleStyle(msgspec.Struct, frozen=True, kw_only=True):
    nproc: int
    shown: Callable[[int], int]  # local rank -> bit 1 stdout, bit 2 stderr
    prefix: str = _PREFIX
    role: str = "default"
    bytes_s: int = 1 << 20
    ranks: frozenset[int] = frozenset()  # these alone; none: all


class _FollowedFile:
    def __init__(self, path: Path, prefix: bytes, fd: int) -> None:
        self.path = path
        self.prefix = prefix
        self.fd = fd
        self.offset = 0
        self.open_rows = [b""]  # the line without its end, and the rows of progress bars below it
        self.bars: list[bytes] = []  # what was last shown of them, if they are progress bars
        self.shown_at = 0.0  # when something was


class Console:
    def __init__(self, log_dir: Path, style: ConsoleStyle, said: Path) -> None:
        self._log_dir = log_dir
        self._style = style
        self._said = _FollowedFile(said, b"", _STDERR)  # what the controller has to say
        self._files: dict[Path, _FollowedFile] = {}
        self._newest = 0  # generation
        self._told_of = 1  # the newest generation of whose restart all is told: what its ranks print follows that
        self._is_open = False  # an incident or a planned restart, by the sentences that were shown
        self._waits_since = 0.0  # what ranks have printed and is held back for such a sentence; 0: nothing
        self._look_at = 0.0
        self._budget = float(style.bytes_s)
        self._pumped_at = time.monotonic()
        self._eager_until = self._pumped_at + _EAGER_S
        self._folding = TracebackFolding(_is_echo, _is_lost_peer)

    def skip_to_end(self) -> None:
        """Skip everything that was written so far."""
        self._find_files()
        for file in (*self._files.values(), self._said):
            if file.path.exists():
                file.offset = file.path.stat().st_size

    def show_new_output(self) -> None:
        """Show the output that was written since the last call."""
        now = time.monotonic()
        self._budget = min(self._style.bytes_s, self._budget + (now - self._pumped_at) * self._style.bytes_s)
        self._pumped_at = now
        if now >= self._look_at or now < self._eager_until or self._said.offset < _file_size(self._said.path):
            self._look_at = now + _LOOK_S
            self._find_files()
        self._follow_all(now)
        for path in self._folding.ended_paths():
            self._unfold_traceback(self._files[path])
        self._show_folded()

    def pause_s(self) -> float:
        """Return how many seconds to wait before the next call of `show_new_output`."""
        return _EAGER_PUMP_S if time.monotonic() < self._eager_until else _PUMP_S

    def drain_output(self) -> None:
        """Show everything that is left, after all ranks have ended."""
        self._find_files()
        self._follow_all(time.monotonic())
        self._end_generations(self._newest)
        self._follow_file(self._said)

    def _follow_all(self, now: float) -> None:
        """Show new output and holdfast's new sentences. What a rank prints last is shown before the sentence about its
        end. A new generation's output is shown after the sentence about the restart, if this sentence comes soon."""
        self._end_generations(self._newest - 1)
        if self._told_of >= self._newest:
            self._follow_ranks(self._newest)
            self._follow_file(self._said)
            return
        self._follow_file(self._said)
        if not self._is_open:  # a restart is told of before its ranks are there
            self._told_of = self._newest
        unshown = any(file.offset < _file_size(file.path) for file in self._files.values())
        self._waits_since = (self._waits_since or now) if unshown else 0.0
        if self._told_of >= self._newest or (unshown and now >= self._waits_since + _HELD_S):
            self._waits_since = 0.0
            self._follow_ranks(self._newest)

    def _follow_ranks(self, up_to: int) -> None:
        for path, file in self._files.items():
            if self._file_generation(path) <= up_to:
                self._follow_file(file)

    def _end_generations(self, up_to: int) -> None:
        """Show all remaining output of the generations up to this number, which have ended."""
        for path, file in self._files.items():
            if self._file_generation(path) <= up_to:
                self._finish_file(file)
        self._show_folded(up_to)

    def _show_sentence(self, line: bytes) -> None:
        """Show one of holdfast's sentences in its place among the output of ranks. A sentence about the end of ranks
        comes after their output. A sentence about a restart comes before the output of the new ranks."""
        opens, closes = _OPENING.match(line), _CLOSING.match(line)
        if _LAST.match(line):
            self._find_files()
            self._end_generations(self._newest)
        elif opens and self._is_open:  # their own end, and not that of the ranks before them
            self._follow_ranks(self._newest)
        self._put_lines(self._said, [line])
        self._is_open = bool(opens) or (self._is_open and not closes)
        if closes:
            self._told_of = self._newest
            self._follow_ranks(self._newest)

    def _finish_file(self, file: _FollowedFile) -> None:
        self._follow_file(file)
        rows = [row for row in file.open_rows if row]
        if rows and file.open_rows != file.bars:
            self._show_lines(file, rows)
        file.open_rows, file.bars = [b""], []
        self._unfold_traceback(file)

    def _find_files(self) -> None:
        """Find the log files of new generations, and drop those of generations that are long over. When a new
        generation appears, show the remaining output of the previous generation first, because its ranks have ended."""
        there = list_generations(self._log_dir)
        self._newest = there[-1] if there else 0
        self._end_generations(self._newest - 1)
        for path in list(self._files):
            if self._file_generation(path) < self._newest - 1:
                del self._files[path]
        for generation in there[-2:]:
            folder = self._log_dir / f"gen-{generation}"
            # Beside nodes of other sizes a node's first rank may have any number; its folder is made before the others.
            first = min(list_ranks(folder), default=0)
            for path in sorted(folder.glob("rank-*/std???.log")):
                if path not in self._files and _RANK.fullmatch(path.parent.name):
                    self._add_file(path, (_folder_rank(path.parent) - first) % self._style.nproc)

    def _file_generation(self, path: Path) -> int:
        return int(path.parent.parent.name.removeprefix("gen-"))

    def _add_file(self, path: Path, local: int) -> None:
        fd = _STDOUT if path.name == "stdout.log" else _STDERR
        if self._style.ranks and _folder_rank(path.parent) not in self._style.ranks:
            return
        if self._style.shown(local) & fd:  # the bits happen to be the numbers of the streams
            values = {"rank": _folder_rank(path.parent), "local_rank": local, "role_name": self._style.role}
            prefix = Template(self._style.prefix).safe_substitute(values).encode()
            self._files[path] = _FollowedFile(path, prefix, fd)

    def _follow_file(self, file: _FollowedFile) -> None:
        try:
            size = os.stat(file.path).st_size
            if size < file.offset:
                file.offset, file.open_rows = 0, [b""]  # it was rotated
            while file.offset < size and (chunk := self._read_chunk(file, size)):
                self._show_chunk(file, chunk)
        except OSError:  # it is gone, or no regular file
            return

    def _read_chunk(self, file: _FollowedFile, size: int) -> bytes:
        behind = size - file.offset
        if behind > max(self._budget, _KEEP):
            file.offset = size - _KEEP
            note = f"... {behind - _KEEP} bytes not shown here; see {file.path}\n"
            write_all(file.fd, file.prefix + note.encode())
            file.open_rows = [b""]
        with open_file(file.path) as source:
            source.seek(file.offset)
            chunk = source.read(min(_CHUNK, size - file.offset))
        file.offset += len(chunk)
        self._budget = max(0.0, self._budget - len(chunk))
        return chunk

    def _show_chunk(self, file: _FollowedFile, chunk: bytes) -> None:
        lines, file.open_rows = split_rows(file.open_rows, chunk)
        if lines:
            self._show_lines(file, lines)
        rest, *below = file.open_rows
        if (b"\r" in rest or below) and time.monotonic() >= file.shown_at + _BAR_S:
            file.bars = file.open_rows
            self._show_lines(file, [row for row in file.bars if row])
        if len(rest) > _CHUNK:
            self._show_lines(file, [rest])
            file.open_rows = [b"", *below]

    def _show_lines(self, file: _FollowedFile, lines: list[bytes]) -> None:
        # A progress bar overwrites its line; on a shared console only its newest state is worth one.
        newest = [part for line in lines for part in show_newest(line)]
        if file is self._said:
            for line in newest:
                self._show_sentence(line)
            return
        self._put_lines(file, self._folding.fold_lines(file.path, newest) if file.fd == _STDERR else newest)
        file.shown_at = time.monotonic()
        self._eager_until = 0.0

    def _unfold_traceback(self, file: _FollowedFile) -> None:
        self._put_lines(file, self._folding.end_traceback(file.path))

    def _show_folded(self, over: int = 0) -> None:
        for path, line in self._folding.take_same(over):
            file = self._files.get(path) if path else None
            if file:
                self._put_lines(file, [line])
            else:
                say(line.decode("utf-8", "replace"))

    def _put_lines(self, file: _FollowedFile, lines: list[bytes]) -> None:
        write_all(file.fd, b"".join(file.prefix + shown_line(line, file.path) + b"\n" for line in lines))


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def shown_line(line: bytes, path: Path) -> bytes:
    """Return a log line as the console shows it: sanitized, and cut if it is very long."""
    cut = len(line) - _LINE_BYTES
    note = f" ... {cut} bytes of this line not shown here; see {path}" if cut > 0 else ""
    return sanitize_line(line[:_LINE_BYTES]) + note.encode()


def _is_echo(exception: bytes) -> bool:
    from holdfast.logs import catalog_files, log_diagnosis  # only when something has failed

    return log_diagnosis.is_echo(exception.decode("utf-8", "replace"), catalog_files.load_built_in())


def _is_lost_peer(report: Sequence[bytes]) -> bool:
    from holdfast.logs import catalog_files, log_diagnosis  # only when something has failed

    lines = [line.decode("utf-8", "replace") for line in report]
    return log_diagnosis.is_lost_peer(lines, catalog_files.load_built_in())


def list_generations(log_dir: Path) -> list[int]:
    """Return the generations whose ranks have logs, oldest first."""
    with os.scandir(log_dir) if log_dir.is_dir() else contextlib.nullcontext(()) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(int(m[1]) for name in names if (m := _GENERATION.fullmatch(name)))


def list_ranks(folder: Path) -> list[int]:
    """Return the ranks that have logs in a generation's folder."""
    return sorted(_folder_rank(path) for path in folder.glob("rank-*") if _RANK.fullmatch(path.name))


def _folder_rank(folder: Path) -> int:
    return int(folder.name.removeprefix("rank-"))


class ConsolePump:
    """Shows console output in its own thread, so that a reader who stops reading does not block us."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pump_output, daemon=True)
        self._thread.start()

    def _pump_output(self) -> None:
        while not self._over.wait(self._console.pause_s()):
            self._console.show_new_output()
        self._console.drain_output()

    def await_shown(self, enough: Callable[[], bool]) -> None:
        """Wait until all output has been shown, or until `enough` returns true."""
        self._over.set()
        while self._thread.is_alive() and not enough():
            self._thread.join(_PUMP_S)


def make_console(args: RunArgs, run: RunSpec, run_dir: Path) -> Console:
    # torchrun's own where a role or --tee is given, for those who search for that.
    usual = _TORCHRUN_PREFIX if args.role != "default" or args.tee != StreamChoice() else _PREFIX
    prefix = args.log_line_prefix_template
    style = ConsoleStyle(
        nproc=run.nproc,
        shown=args.console_streams,
        prefix=prefix if prefix is not None else usual,
        role=run.entry.role,
        bytes_s=run.settings.logs.console_bytes_s,
    )
    return Console(Path(run.log_dir), style, run_dir / "said.log")


def describe_shape(args: RunArgs, nproc: int) -> str:
    """Describe the nodes and ranks that were asked for, for the first line on the console."""
    least = f" (at least {args.min_nodes})" if args.min_nodes < args.max_nodes else ""
    more = f" and {counted_noun(args.standbys, 'standby')}" if args.standbys else ""
    more = more if args.refill_h is None else " and standbys as the controller's host finds"
    return f"{counted_noun(args.max_nodes, 'node')} x {counted_noun(nproc, 'rank')}{least}{more}"
