"""Ends a test process that hangs inside C code, where neither a signal nor a thread of Python's can end it."""

import faulthandler
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

GRACE_S = 120.0  # beyond the test's own limit, for its fixtures to end what it began


@contextmanager
def hang_watchdog(limit_s: float, told: int) -> Iterator[None]:
    """Write all stacks to the file `told` and exit with 1, unless this block ends in time."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=told)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def watch_test(item: pytest.Item) -> AbstractContextManager[None]:
    """Return a watchdog for a whole test. The other workers go on with what is left."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    return hang_watchdog(limit_s + GRACE_S, item.config.stash[fault_handler_stderr_fd_key])
