"""Follows the kernel's log, beginning with new records. A read of /dev/kmsg returns one record and never waits."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.sources import Signal, SourceAbsent
from holdfast.model.observation import Line

_RECORD_BYTES = 8192  # the kernel's own bound; a shorter read fails
_RECORDS = 512  # of one reading; a kernel that writes more than this is flooding, and its newest words count
_HEAD = re.compile(rb"\d+,\d+,(\d+),[^;]*;")


class KernelLogSource:
    def __init__(self, clock: Callable[[], float], steady: AgentClock, root: Path = Path("/")) -> None:
        self._clock = clock
        self._steady = steady
        self._read_at = clock()
        self._torn = b""  # of a line, where a reading ended in its middle
        try:
            self._fd = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as e:
            raise SourceAbsent(f"/dev/kmsg: {e.strerror}") from None

    def read(self) -> list[Signal]:
        now, monotonic = self._clock(), self._steady.monotonic()
        found: list[Signal] = []
        for _ in range(_RECORDS):
            record = self._read_record()
            if not record:
                break
            *lines, self._torn = (self._torn + record).split(b"\n")
            self._torn = self._torn[-_RECORD_BYTES:]
            found += (
                self._parse_line(line, now, monotonic) for line in lines if line and line[0] != 0x20
            )  # dictionary
        else:
            os.lseek(self._fd, 0, os.SEEK_END)
            text = f"holdfast: more than {_RECORDS} lines at once; the rest was skipped"
            found.append(Line(text=text, at=now))
        self._read_at = now
        return found

    def _read_record(self) -> bytes:
        try:
            return os.read(self._fd, _RECORD_BYTES)
        except BlockingIOError:
            return b""
        except BrokenPipeError:
            return b"\n"  # records were overwritten before we came; the next read gives the oldest there is
        except OSError:
            return b""

    def _parse_line(self, line: bytes, now: float, monotonic: float) -> Line:
        """Parse one record. The kernel's timestamps drift, so the time is clamped between the last reading and now."""
        head = _HEAD.match(line)
        age_s = monotonic - int(head[1]) / 1e6 if head else 0.0
        text = line[head.end() :] if head else line
        return Line(text=text.decode("utf-8", "replace"), at=min(now, max(self._read_at, now - age_s)))

    def close(self) -> None:
        os.close(self._fd)
