"""Decides which nodes of other hosts may have this node's state, by the certificates of those nodes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.mutual_tls import KeyFiles


def _never_leaving(node: str, serial: str) -> bool:
    return False


class PeerAdmission(NamedTuple):
    """Decides which nodes may have our state: those of this job whose certificates are listed as valid."""

    keys: KeyFiles
    is_peer: Callable[[str, str], bool]  # by the name of a node and the serial of its certificate
    run_id: str = ""  # of this run; "": whichever it is
    is_leaving: Callable[[str, str], bool] = _never_leaving  # whether it may only be asked for the copies that it holds

    def accepts_certificate(self, shown: dict[str, Any] | None) -> bool:
        """Return whether this certificate belongs to a node of this run; the user's CA may certify others as well."""
        ours = not self.run_id or mutual_tls.certificate_run(shown) in ("", self.run_id)
        node = mutual_tls.certificate_node(shown)
        return ours and bool(node) and self.is_peer(node, mutual_tls.certificate_serial(shown))

    def accepts_caller(self, shown: dict[str, Any] | None) -> bool:
        """Return whether a node with this certificate may send requests. A node that is leaving the job may not."""
        name, serial = mutual_tls.certificate_node(shown), mutual_tls.certificate_serial(shown)
        return self.accepts_certificate(shown) and not self.is_leaving(name, serial)
