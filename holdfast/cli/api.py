"""Asking a run's controller, from the command line."""

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from holdfast.cli import rundir
from holdfast.wire.messages import TOKEN_HEADER

_WAIT_S = 5.0
_REFUSAL_BYTES = 1 << 16


class NotRunning(Exception):
    """The run has no controller that answers."""


class Refused(NotRunning):
    """A controller answered, and would not take the request; `why` is its own sentence."""

    def __init__(self, url: str, why: str, status: int) -> None:
        super().__init__(f"the controller at {url} refused: {why}")
        self.why = why
        self.status = status


class Stranger(NotRunning):
    """Something answered that is no controller of ours."""


def ask(run_dir: Path, path: str, body: dict[str, Any] | None = None, wait_s: float = _WAIT_S) -> Any:
    listening = rundir.listening(run_dir)
    if listening is None:
        raise NotRunning(f"the run in {run_dir} {rundir.ending(run_dir)}")
    return ask_url(listening.url, rundir.token(run_dir), path, body, wait_s)


def ask_url(url: str, token: str, path: str, body: dict[str, Any] | None = None, wait_s: float = _WAIT_S) -> Any:
    sent = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data=sent, headers={TOKEN_HEADER: token})
    # Never through a proxy: the controller is on our own network, and the token is nobody else's business.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=wait_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise _refusal(url, e) from None
    except OSError as e:  # this includes an answer that broke off, as when a controller dies
        why = e.reason if isinstance(e, urllib.error.URLError) else e
        raise NotRunning(f"the controller at {url} does not answer: {why}") from None
    except (ValueError, http.client.HTTPException):
        raise Stranger(f"what answers at {url} is not holdfast") from None


def _refusal(url: str, error: urllib.error.HTTPError) -> NotRunning:
    try:
        return Refused(url, json.loads(error.read(_REFUSAL_BYTES))["error"], error.code)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return Stranger(f"what answers at {url} is not holdfast (HTTP {error.code})")
