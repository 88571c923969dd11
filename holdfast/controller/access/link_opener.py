"""Who has opened an agent's link, and whether another caller may take the node's name over from it."""

import contextlib
import select
import socket

from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import ANYBODY, UNSEEN_PROCESS, Caller
from holdfast.linux import own_process_settings

_ENDED = "ZX"  # states of processes that have ended, but whose parents have not looked yet


class LinkOpener:
    """The proved caller at the other end of an agent's link.

    An agent that redials replaces its own older link: it is the same process of this host, or the same certificate from
    the same address. Any other caller may have the name only once the older link's end is gone. If nobody can tell
    that, as when a network has swallowed it, the name is free when the older link's pings go unanswered.
    """

    def __init__(
        self, caller: Caller = ANYBODY, sock: socket.socket | None = None, audit: AuditLog | None = None
    ) -> None:
        """`sock` is our end of the link; None if there is no real one."""
        self.caller = caller
        self._sock, self._audit = sock, audit

    def may_replace(self, older: "LinkOpener") -> bool:
        """Return whether this caller may speak for the node for which `older` has a link."""
        if older is self or older.has_gone():
            return True
        identity = (self.caller.node, self.caller.origin)
        return identity == (older.caller.node, older.caller.origin) and self.caller.origin != UNSEEN_PROCESS

    def has_gone(self) -> bool:
        """Return whether the other end has closed the link, or the process that opened it has ended."""
        if self.caller.pid and own_process_settings.process_state(self.caller.pid) in ("", *_ENDED):
            return True  # children of it may still hold the link open
        if self._sock is None:
            return False
        with contextlib.suppress(ValueError, OSError):  # closed on our side
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLRDHUP)
            return bool(poll.poll(0))
        return True

    def record_refusal(self, node: str, why: str) -> None:
        """Write to the audit log that this caller said a node's hello and was refused."""
        if self._audit:
            self._audit.record_order(self.caller.name, self.caller.origin, {"hello": node[:200]}, why)
