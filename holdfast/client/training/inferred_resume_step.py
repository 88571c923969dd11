"""Finds the step that a rank resumes from when the script does not report it.

Most optimizers keep a step count in their state, so a restored optimizer shows where it continues. A new optimizer
proves nothing, because a script may restore only the model's weights. So this module also watches whether the rank may
have read, before its first step, data that the job had written. If so, the step is unknown.
"""

import os
import stat
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

BEGAN = "HOLDFAST_BEGAN"  # when the job began, in seconds since the epoch
UNKNOWN = -1

_SLACK_S = 30.0  # by which the clocks of nodes and of storage may differ
_NATIVE = ("safetensors", "h5py", "tensorstore", "s3torchconnector")  # read files without Python's knowing
_CODE = (".py", ".pyc", ".so")
_BUILT = ("/torchinductor_", "/.triton/")  # what compilers keep
_KERNEL = ("/proc/", "/sys/")
_LOOKED_AT = 64  # parameters of an optimizer
_ODD = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)  # of what is not as expected


class ReadWatch:
    """Watches whether this process may have read something that the job wrote before the launch."""

    def __init__(self, began_at: float) -> None:
        self._since = began_at - _SLACK_S
        self._found = self._is_over = False

    def start(self) -> None:
        """Install an audit hook. It cannot be removed, so it does little after the first step."""
        sys.addaudithook(self._on_audit)
        os.register_at_fork(after_in_child=self.lose)

    def stop(self) -> None:
        self._is_over = True

    def lose(self) -> None:
        """Stop watching and assume that data was read; called in child processes, whose reads cannot be watched."""
        self._is_over = self._found = True

    @property
    def found(self) -> bool:
        return self._found or any(name in sys.modules for name in _NATIVE)

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_over:
            return
        try:
            if event == "open":
                self._found |= _opens_for_reading(args[1], args[2]) and self._is_new(args[0])
            elif event == "sqlite3.connect":
                self._found |= self._is_new(args[0])
            elif event == "socket.connect":
                self._found |= _is_remote(args[1])
        except _ODD:
            self._found = True  # what raises here would make the script's call fail

    def _is_new(self, path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a file that was open before
        name = os.fsdecode(path)
        if name.endswith(_CODE) or name.startswith(_KERNEL) or any(part in name for part in _BUILT):
            return False
        try:
            there = os.stat(name)
        except OSError:
            return False
        return stat.S_ISREG(there.st_mode) and max(there.st_mtime, there.st_ctime) >= self._since


def watch_reads(environ: "os._Environ[str]") -> ReadWatch:
    """Start a ReadWatch in a fresh rank. The first generation needs none, because the job has written nothing yet."""
    reads = ReadWatch(float(environ.get(BEGAN, "0")))
    reads.start()
    return reads


def stop_at_first_step(reads: ReadWatch, on_first: Callable[[], None] | None) -> Callable[[], None]:
    """Return the function to call at the first step: it stops the watch, then calls `on_first`."""

    def first() -> None:
        reads.stop()
        if on_first is not None:
            on_first()

    return first


def steps_before(optimizer: Any, reads: ReadWatch | None, made_up: int = 0) -> int:
    """Return how many steps were made before this optimizer's first step in this rank; UNKNOWN (-1) if nothing tells.
    `made_up` is the optimizer's count after a step that torch made only to create its state, 0 without such a step."""
    try:
        before = _optimizer_count(optimizer) - 1
    except _ODD:  # its state is whatever its author wants it to be
        return UNKNOWN
    if before > 0 and before != made_up:
        return before
    return UNKNOWN if reads is not None and reads.found else 0


def _optimizer_count(optimizer: Any) -> int:
    """Return the largest step count in the optimizer's state; 1 if it keeps none."""
    most = 1
    for state in islice(optimizer.state.values(), _LOOKED_AT):
        count = state.get("step", 0)
        count = count.to_local() if hasattr(count, "to_local") else count
        if getattr(count, "is_cuda", False) and sys.modules["torch"].cuda.is_current_stream_capturing():
            raise ValueError("the step cannot be read while a CUDA graph is captured")
        most = max(most, int(count))
    return most


def _opens_for_reading(mode: str | None, flags: int) -> bool:
    if mode is not None:
        return "r" in mode or "+" in mode
    return flags & os.O_ACCMODE != os.O_WRONLY


def _is_remote(address: object) -> bool:
    """Return whether a socket address is on another host; saved state may also come over the network."""
    host = str(address[0]) if isinstance(address, tuple) else ""
    return bool(host) and not host.startswith("127.") and host not in ("localhost", "::1")
