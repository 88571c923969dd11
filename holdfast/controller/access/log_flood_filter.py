"""A log filter that keeps bad requests from flooding a log or a terminal."""

import logging
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from holdfast.core.terminal_sanitizer import cut_words

_LIMITED = ("aiohttp.server", "holdfast.porch")
_ONE_IN_S = 1.0
_SHOWN = 200  # characters of a complaint
_ASKED_BADLY = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class ServerLogFilter(logging.Filter):
    """Passes at most one warning a second from a port's server. Errors caused by bad requests lose their traceback."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._next_at = 0.0
        self._unwritten = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in _LIMITED or record.levelno < logging.WARNING:
            return True
        now = self._now()
        if now < self._next_at:
            self._unwritten += 1
            return False
        self._next_at = now + _ONE_IN_S
        text = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _ASKED_BADLY):
            text = cut_words(f"{text}: {type(error).__name__}: {' '.join(str(error).split())}", _SHOWN)
            record.exc_info = record.exc_text = None
        more = f" ({self._unwritten} more were not written)" if self._unwritten else ""
        record.msg, record.args, self._unwritten = text.replace("\n", " ") + more, (), 0
        return True
