"""Certificates of nodes that call from other hosts: their serials, and which of them are valid."""

from collections.abc import Callable, Mapping

from holdfast.core.decide.job_view import JobView
from holdfast.wire.credentials.mutual_tls import NODE


class NodeCertificates:
    """Owns the serial of each node's certificate, by the node's name."""

    def __init__(self, view: JobView, holds_copies: Callable[[str], bool]) -> None:
        self._view, self._holds_copies = view, holds_copies
        self._serials: dict[str, str] = {}

    def add_serials(self, serials: Mapping[str, str]) -> None:
        self._serials |= serials

    def serial_of(self, node: str) -> str | None:
        return self._serials.get(node)

    def is_valid(self, node: str, serial: str) -> bool:
        """Whether this is the serial of the node's certificate, and the node is in the job or may return to it."""
        return self._serials.get(node) == serial and self._view.may_return(node)

    def revoked_ids(self) -> tuple[str, ...]:
        """Return serials, and also names, of nodes that left: a user may sign new certificates for the same names. A
        node that holds copies is not among them yet: the next generation may restore from it before it leaves."""
        gone = [node for node in self._view.gone if node in self._serials and not self._holds_copies(node)]
        return tuple(sorted((*(self._serials[node] for node in gone), *(NODE + node for node in gone))))
