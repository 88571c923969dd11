"""A terminal: a program in a pseudo-terminal that controls it, and the screen that a person would see."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte

PATIENCE_S = 90.0


def take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C reaches this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    def __init__(self, argv: list[str], *, env: dict[str, str], cwd: Path, columns: int = 80) -> None:
        self.screen = pyte.HistoryScreen(columns, 24, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self.patience_s = PATIENCE_S
        self._main, other = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            argv,
            stdin=other,
            stdout=other,
            stderr=other,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509 - it only calls the kernel
        )
        os.close(other)

    def hang_up(self) -> None:
        """Close the terminal, as a person closes a window: the kernel tells its programs by SIGHUP."""
        os.close(self._main)
        self._main = -1

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self._main >= 0:
            os.close(self._main)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen.resize(24, columns)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def read(self) -> None:
        """Take in what was written."""
        while select.select([self._main], [], [], 0.05)[0]:
            try:
                chunk = os.read(self._main, 1 << 16)
            except OSError:  # nobody has the other end any more
                return
            self.written += chunk
            self._stream.feed(chunk)

    def until(self, look: Callable[[], object], what: str) -> None:
        until = time.monotonic() + self.patience_s
        while not look():
            assert time.monotonic() < until, f"waited in vain: {what}\n" + "\n".join(self.lines())
            self.read()

    def shows(self, words: str) -> None:
        self.until(lambda: any(words in line for line in self.lines()), words)

    def lines(self) -> list[str]:
        """What is on the screen, without empty lines at its end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def whole_text(self) -> list[str]:
        """The lines that have left the screen, and those on it."""
        gone = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return gone + self.lines()
