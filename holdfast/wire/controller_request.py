"""Requests to a controller through its unix socket on this host, where the kernel identifies the caller."""

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from holdfast.linux.peer_credentials import read_peer
from holdfast.wire import unix_sockets

NAME = "controller.sock"  # in the run directory
WAIT_S = 5.0
_MOST_BYTES = 1 << 28


class ControllerNotRunning(Exception):
    """The run has no controller that answers."""


class ControllerClosing(ControllerNotRunning):
    """The controller has closed the connection without an answer, because it ends or has died."""


class RequestRefused(ControllerNotRunning):
    """A controller answered but refused the request; `why` is the sentence it gave."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(f"the controller refused: {why}")
        self.why = why
        self.status = status


class NotAController(ControllerNotRunning):
    """The process that answered is not a controller."""


def fetch(run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = WAIT_S) -> bytes:
    """Send a GET, or a POST if there is a body, and return the raw answer; raises ControllerNotRunning on failure."""
    try:
        link = _connect_controller(run_dir, wait_s)
    except (FileNotFoundError, ConnectionRefusedError) as e:  # an ending one has removed its socket
        raise ControllerClosing(f"the controller of {run_dir} does not answer: {e}") from None
    except OSError as e:
        raise ControllerNotRunning(f"the controller of {run_dir} does not answer: {e}") from None
    asking = http.client.HTTPConnection("localhost")
    asking.sock = link
    try:
        sent = json.dumps(body).encode() if body is not None else None
        asking.request("GET" if sent is None else "POST", path, sent)
        answer = asking.getresponse()
        content = answer.read(_MOST_BYTES)
    except ConnectionError as e:
        raise ControllerClosing(f"the controller of {run_dir} has closed the connection: {e}") from None
    except OSError as e:
        raise ControllerNotRunning(f"the controller of {run_dir} does not answer: {e}") from None
    except http.client.HTTPException:
        raise NotAController(f"the server in {run_dir} is not holdfast") from None
    finally:
        asking.close()
    if answer.status != http.HTTPStatus.OK:
        raise RequestRefused(_refusal_text(content, answer.status), answer.status)
    return content


def _connect_controller(run_dir: Path, wait_s: float) -> socket.socket:
    link = unix_sockets.connect(run_dir / NAME)
    link.settimeout(wait_s)
    if read_peer(link).user != os.getuid():
        link.close()
        raise PermissionError("another user listens there")
    return link


def _refusal_text(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
