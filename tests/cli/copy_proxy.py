"""Stands between the keepers of a job on one host, and notes when which bytes of copies pass."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from holdfast.wire import unix_sockets

_READ_BYTES = 1 << 20


class PassedCopy:
    """What one connection between keepers has carried."""

    def __init__(self) -> None:
        self.ask: dict[str, Any] = {}  # the request; {} until it has passed
        self.pieces: list[tuple[float, int]] = []  # when so many bytes came from the sender
        self.replied_at = 0.0  # the newest word of the receiver


class CopyProxy:
    """Takes the place of a keeper's socket for other keepers, and passes everything on to the keeper."""

    def __init__(self, path: Path) -> None:
        self._real = path.with_name(f"real-{path.name}")
        self.copies: list[PassedCopy] = []
        self._links: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        path.rename(self._real)
        self._listener = unix_sockets.listen(path)
        self._start(self._accept)

    def _start(self, work: Any, *words: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=words, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = unix_sockets.connect(self._real)
                self._links += (near, far)
                self.copies.append(PassedCopy())
                self._start(self._pass_on, near, far, self.copies[-1])
                self._start(self._pass_back, far, near, self.copies[-1])

    def _pass_on(self, near: socket.socket, far: socket.socket, copy: PassedCopy) -> None:
        with contextlib.suppress(OSError):
            while content := near.recv(_READ_BYTES):
                now = time.monotonic()
                if not copy.ask and content.endswith(b"\n"):
                    copy.ask = json.loads(content)
                else:
                    copy.pieces.append((now, len(content)))
                far.sendall(content)
        _hang_up(far)

    def _pass_back(self, far: socket.socket, near: socket.socket, copy: PassedCopy) -> None:
        with contextlib.suppress(OSError):
            while content := far.recv(_READ_BYTES):
                copy.replied_at = time.monotonic()
                near.sendall(content)
        _hang_up(near)

    def end(self) -> None:
        for link in (self._listener, *self._links):
            _hang_up(link)
        for thread in self._threads:
            thread.join(10)
        for link in (self._listener, *self._links):
            link.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._real)


def _hang_up(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
