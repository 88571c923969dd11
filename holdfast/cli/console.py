"""The ranks' output on the console: follows their log files, prefixes each line, and never drowns the reader."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import BinaryIO

import msgspec

from holdfast.cli.flags import RunArgs
from holdfast.wire.spec import RunSpec

_CHUNK = 1 << 18
_KEEP = 1 << 14  # of a skipped flood, this much of its end is shown
_LOOK_S = 0.2  # how often new files are looked for


class Style(msgspec.Struct, frozen=True, kw_only=True):
    nproc: int
    shown: Callable[[int], int]  # local rank -> bit 1 stdout, bit 2 stderr
    prefix: str = "[rank ${rank}] "
    role: str = "default"
    bytes_s: int = 1 << 20


class _File:
    def __init__(self, path: Path, prefix: bytes, out: BinaryIO) -> None:
        self.path = path
        self.prefix = prefix
        self.out = out
        self.offset = 0
        self.rest = b""


class Console:
    def __init__(self, log_dir: Path, style: Style) -> None:
        self._log_dir = log_dir
        self._style = style
        self._files: dict[Path, _File] = {}
        self._look_at = 0.0
        self._budget = float(style.bytes_s)
        self._pumped_at = time.monotonic()

    def skip_to_end(self) -> None:
        """What earlier generations wrote has been seen before."""
        self._look()
        for file in self._files.values():
            file.offset = file.path.stat().st_size

    def pump(self) -> None:
        """Show what was written since the last time."""
        now = time.monotonic()
        self._budget = min(self._style.bytes_s, self._budget + (now - self._pumped_at) * self._style.bytes_s)
        self._pumped_at = now
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        for file in self._files.values():
            self._follow(file)
        sys.stdout.flush()
        sys.stderr.flush()

    def drain(self) -> None:
        """The last words of everybody, when all are gone."""
        self._look()
        for file in self._files.values():
            self._follow(file)
            if file.rest:
                file.out.write(file.prefix + file.rest + b"\n")
                file.rest = b""
        sys.stdout.buffer.flush()
        sys.stderr.buffer.flush()

    def _look(self) -> None:
        for path in sorted(self._log_dir.glob("gen-*/rank-*/std*.log")):
            if path in self._files:
                continue
            rank = int(path.parent.name.removeprefix("rank-"))
            local = rank % self._style.nproc
            bit, out = (1, sys.stdout.buffer) if path.name == "stdout.log" else (2, sys.stderr.buffer)
            if self._style.shown(local) & bit:
                values = {"rank": rank, "local_rank": local, "role_name": self._style.role}
                prefix = Template(self._style.prefix).safe_substitute(values).encode()
                self._files[path] = _File(path, prefix, out)

    def _follow(self, file: _File) -> None:
        try:
            size = os.stat(file.path).st_size
        except OSError:
            return
        if size < file.offset:
            file.offset = 0  # it was rotated
        while file.offset < size:
            behind = size - file.offset
            if behind > max(self._budget, _KEEP):
                file.offset = size - _KEEP
                note = f"... {behind - _KEEP} bytes not shown here; all of it is in {file.path}\n"
                file.out.write(file.prefix + note.encode())
                file.rest = b""
            with file.path.open("rb") as source:
                source.seek(file.offset)
                chunk = source.read(min(_CHUNK, size - file.offset))
            if not chunk:
                return
            file.offset += len(chunk)
            self._budget = max(0.0, self._budget - len(chunk))
            self._write(file, chunk)

    def _write(self, file: _File, chunk: bytes) -> None:
        *lines, file.rest = (file.rest + chunk).split(b"\n")
        # A progress bar overwrites its line; on a shared console only its newest state is worth a line.
        shown = [file.prefix + line.rstrip(b"\r").rpartition(b"\r")[2] + b"\n" for line in lines]
        file.out.write(b"".join(shown))
        if len(file.rest) > _CHUNK:
            file.out.write(file.prefix + file.rest + b"\n")
            file.rest = b""


def console_of(args: RunArgs, run: RunSpec) -> Console:
    prefix = args.log_line_prefix_template
    style = Style(
        nproc=run.nproc,
        shown=args.on_console,
        prefix=prefix if prefix is not None else "[rank ${rank}] ",
        role=run.entry.role,
        bytes_s=run.settings.logs.console_bytes_s,
    )
    return Console(Path(run.log_dir), style)
