"""The undo guard: a process that undoes faults on request. When the injector is gone, it undoes all remaining faults.

    python -m holdfast.chaos.undo_guard

Requests and answers are lines of JSON. The guard's standard input closes when the injector dies, whatever the cause.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from holdfast.chaos import linux_namespaces
from holdfast.chaos.injection_records import (
    CannotInject,
    ContinueProcess,
    DutyCycle,
    ForgetEntry,
    FreeDisk,
    LeaveCgroup,
    PatchByte,
    RemountWritable,
    RemoveFile,
    RewriteFile,
    Undo,
)
from holdfast.chaos.process_handles import ProcessHandle
from holdfast.decoding import from_json, make_decoder

_PERIOD_S = 0.1  # of a process that is stopped for a part of the time
_EMPTY_S = 5.0  # a cgroup may take so long to lose its last process


class KeepUndo(msgspec.Struct, frozen=True, tag="keep"):
    """Request to keep these undos under a number; they run on request, or when the injector is gone."""

    id: int
    undo: tuple[Undo, ...]


class RunUndo(msgspec.Struct, frozen=True, tag="drop"):
    """Request to run the undos kept under this number now."""

    id: int


_asked = make_decoder(msgspec.json.Decoder(KeepUndo | RunUndo))


def undo_one(undo: Undo) -> str:
    """Run one undo; return what went wrong. Empty if nothing did, or if the target no longer exists."""
    try:
        match undo:
            case ContinueProcess(pid=pid, started=born) | DutyCycle(pid=pid, started=born):
                with ProcessHandle(pid, born) as held:
                    held.send_signal(signal.SIGCONT)
            case RemoveFile(path=path):
                Path(path).unlink(missing_ok=True)
            case RewriteFile(path=path, text=text):
                _rewrite_file(Path(path), text)
            case ForgetEntry(path=path, key=key):
                _forget_entry(Path(path), key)
            case PatchByte():
                _patch_byte(undo)
            case LeaveCgroup(group=group, back=back):
                return _leave_cgroup(Path(group), Path(back))
            case RemountWritable(pid=pid, started=born, path=path):
                with ProcessHandle(pid, born):
                    linux_namespaces.remount(pid, path, read_only=False)
            case FreeDisk(pid=pid, started=born, path=path):
                with ProcessHandle(pid, born):
                    linux_namespaces.run_inside(pid, lambda: Path(path).unlink(missing_ok=True))
    except CannotInject:
        return ""
    except (OSError, msgspec.DecodeError) as e:
        return f"{type(undo).__name__}: {e}"
    return ""


def _rewrite_file(path: Path, text: str) -> None:
    if path.exists():
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text)
        part.replace(path)


def _forget_entry(path: Path, key: str) -> None:
    if path.exists():
        entries = from_json(path.read_bytes(), dict[str, msgspec.Raw])
        if entries.pop(key, None) is not None:
            _rewrite_file(path, msgspec.json.encode(entries).decode())


def _patch_byte(patch: PatchByte) -> None:
    try:
        fd = os.open(patch.path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if os.fstat(fd).st_ino == patch.inode and os.pread(fd, 1, patch.at) == bytes([patch.now]):
            os.pwrite(fd, bytes([patch.then]), patch.at)
    finally:
        os.close(fd)


def _leave_cgroup(group: Path, back: Path) -> str:
    until = time.monotonic() + _EMPTY_S
    while group.is_dir():
        for pid in (group / "cgroup.procs").read_text().split():
            try:
                (back / "cgroup.procs").write_text(pid)
            except OSError:
                continue  # it has just ended
        try:
            group.rmdir()
        except OSError as e:
            if time.monotonic() > until:
                return f"{group} stays: {e.strerror}"
            time.sleep(0.02)
    return ""


class DutyTurns:
    """Stops and continues processes so that each runs only for its share of the time."""

    def __init__(self) -> None:
        self._stopped: set[int] = set()

    def take_turns(self, duties: list[DutyCycle], now: float) -> None:
        self._stopped &= {duty.pid for duty in duties}  # others were let go when their fault was undone
        for duty in duties:
            runs = now % _PERIOD_S < duty.share * _PERIOD_S
            if runs == (duty.pid in self._stopped):
                self._set_running(duty, runs)

    def _set_running(self, duty: DutyCycle, runs: bool) -> None:
        try:
            with ProcessHandle(duty.pid, duty.started) as held:
                held.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
        except CannotInject:
            return
        (self._stopped.discard if runs else self._stopped.add)(duty.pid)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what is undone at the end must be undone at any end
    kept: dict[int, tuple[Undo, ...]] = {}
    try:
        _serve_injector(kept)
    finally:  # whatever became of our pipes
        for undos in reversed(kept.values()):
            for undo in reversed(undos):
                undo_one(undo)


def _serve_injector(kept: dict[int, tuple[Undo, ...]]) -> None:
    """Obey requests until the injector is gone: it closes our input or no longer reads our answers."""
    turns = DutyTurns()
    fd = sys.stdin.fileno()
    rest = b""
    while True:
        if select.select([fd], [], [], 0.005 if _duty_cycles(kept) else None)[0]:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            if not all(_send_answer(_obey_line(line, kept)) for line in lines):
                return
        turns.take_turns(_duty_cycles(kept), time.monotonic())  # as they are now: one that was just undone has no turn


def _duty_cycles(kept: dict[int, tuple[Undo, ...]]) -> list[DutyCycle]:
    return [undo for undos in kept.values() for undo in undos if isinstance(undo, DutyCycle)]


def _send_answer(said: list[str]) -> bool:
    try:
        os.write(sys.stdout.fileno(), msgspec.json.encode(said) + b"\n")
    except BrokenPipeError:
        return False
    return True


def _obey_line(line: bytes, kept: dict[int, tuple[Undo, ...]]) -> list[str]:
    asked = _asked(line)
    if isinstance(asked, KeepUndo):
        kept[asked.id] = (*kept.get(asked.id, ()), *asked.undo)
        return []
    return [trouble for undo in reversed(kept.pop(asked.id, ())) if (trouble := undo_one(undo))]


class UndoGuard:
    """The injector's connection to the guard process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.chaos.undo_guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # or Ctrl-C would reach it, too
        )
        self._open: set[int] = set()

    def __enter__(self) -> "UndoGuard":
        return self

    def __exit__(self, *error: object) -> None:
        """End the guard, which first undoes everything that is left."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def keep_undo(self, id: int, *undo: Undo) -> None:
        """Register how to undo a fault; call it before injecting, so that the fault can always be undone."""
        self._open.add(id)
        self._send_message(KeepUndo(id, undo))

    def run_undo(self, id: int) -> str:
        """Undo a fault; return what went wrong, empty if nothing did."""
        if id not in self._open:
            return ""
        self._open.discard(id)
        return "; ".join(self._send_message(RunUndo(id)))

    def has_undo(self, id: int) -> bool:
        return id in self._open

    def _send_message(self, message: KeepUndo | RunUndo) -> list[str]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()
        return from_json(self._process.stdout.readline(), list[str])


if __name__ == "__main__":
    main()
