"""Asking a controller at its door on this host, where the kernel says who is who."""

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from holdfast.linux.peer_credentials import peer_of
from holdfast.wire import unixpath

NAME = "controller.sock"  # in the run directory
WAIT_S = 5.0
_MOST_BYTES = 1 << 28


class NotRunning(Exception):
    """The run has no controller that answers."""


class Refused(NotRunning):
    """A controller answered, and would not take the request; `why` is its own sentence."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(f"the controller refused: {why}")
        self.why = why
        self.status = status


class Stranger(NotRunning):
    """Something answered that is no controller."""


def fetch(run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = WAIT_S) -> bytes:
    """A GET, or a POST where there is a body; the answer as it comes."""
    try:
        link = _call(run_dir, wait_s)
    except OSError as e:
        raise NotRunning(f"the controller of {run_dir} does not answer: {e}") from None
    asking = http.client.HTTPConnection("localhost")
    asking.sock = link
    try:
        sent = json.dumps(body).encode() if body is not None else None
        asking.request("GET" if sent is None else "POST", path, sent)
        answer = asking.getresponse()
        content = answer.read(_MOST_BYTES)
    except OSError as e:  # this includes an answer that broke off, as when a controller dies
        raise NotRunning(f"the controller of {run_dir} does not answer: {e}") from None
    except http.client.HTTPException:
        raise Stranger(f"what answers in {run_dir} is not holdfast") from None
    finally:
        asking.close()
    if answer.status != http.HTTPStatus.OK:
        raise Refused(_why(content, answer.status), answer.status)
    return content


def _call(run_dir: Path, wait_s: float) -> socket.socket:
    link = unixpath.connect(run_dir / NAME)
    link.settimeout(wait_s)
    if peer_of(link).user not in (os.getuid(), run_dir.stat().st_uid):
        link.close()
        raise PermissionError("what listens there is neither yours nor the run's")
    return link


def _why(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
