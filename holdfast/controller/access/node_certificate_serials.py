"""Certificates of nodes that call from other hosts: their serials, and which of them are valid."""

from collections.abc import Callable, Iterable, Mapping

from holdfast.core.decide.job_view import JobView
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, join_ids
from holdfast.wire.credentials.node_serials import RecordedSerials


class NodeCertificates:
    """Owns the serial of each node's certificate, by the node's name."""

    def __init__(self, view: JobView, holds_copies: Callable[[str], bool], say: Callable[[str], None]) -> None:
        self._view, self._holds_copies, self._say = view, holds_copies, say
        self._serials: dict[str, str] = {}
        self.recorded: frozenset[str] = frozenset()  # nodes that an earlier controller has let in
        self._unknown = 0  # certificates of which only this is known, that there were some
        self._refused: set[str] = set()  # nodes of which people were told so
        self._changes = 0  # of what is known of serials
        self._told: tuple[object, AdmittedPeers] = (None, AdmittedPeers())  # newest list, and what it follows from

    def take_recorded(self, recorded: RecordedSerials) -> None:
        """Take over the serials that an earlier controller recorded; say so if lines of the record are damaged."""
        self.add_serials(recorded.serials)
        self.recorded |= recorded.serials.keys()
        self._unknown = recorded.damaged
        if recorded.damaged:
            lines = "a line is" if recorded.damaged == 1 else f"{recorded.damaged} lines are"
            told = (
                "the next node without a line that shows a certificate of this job is taken for the one that it named"
            )
            self._say(f"{recorded.path}: {lines} not as written; {told}")

    @property
    def knows_all(self) -> bool:
        """Return whether the names of all nodes that an earlier controller let in are known."""
        return self._unknown == 0

    def may_recognize(self, node: str) -> bool:
        """Return whether a damaged line of the record may have named this node. The node is then recognized by any
        certificate that we signed for it."""
        return self._unknown > 0 and node not in self._serials and self._view.may_return(node)

    def recognize_node(self, node: str, serial: str) -> None:
        self._unknown -= 1
        self.add_serials({node: serial})
        self.recorded |= {node}
        self._say(f"{node} is known again by its certificate")

    def tell_refusal(self, node: str, why: str) -> None:
        """Say once that a node of the running job is refused at the port. Nothing is said about other nodes."""
        if node in self._view.active and node not in self._refused:
            self._refused.add(node)
            self._say(f"{node} is refused at the port: {why}")

    def add_serials(self, serials: Mapping[str, str]) -> None:
        self._serials |= serials
        self._changes += 1

    def serial_of(self, node: str) -> str | None:
        return self._serials.get(node)

    def is_valid(self, node: str, serial: str) -> bool:
        """Return whether this is the serial of the node's certificate, and the node is in the job or may return."""
        return self._serials.get(node) == serial and self._view.may_return(node)

    def admitted_peers(self) -> AdmittedPeers | None:
        """Return whose certificates keepers are to accept; None if no node has one. Nodes that have left and hold
        copies are listed apart: the next generation may restore from them, so they may answer, but ask for nothing.
        A node whose record was damaged is listed as soon as it has shown its certificate."""
        if not self._serials:
            return None
        gone = [node for node in self._view.gone if node in self._serials]
        leaving = {node for node in gone if self._holds_copies(node)}
        follows = (self._changes, tuple(gone), frozenset(leaving))
        if follows != self._told[0]:  # or 2,000 nodes that come back at once would each cost a list of 2,000
            members = (node for node in self._serials if node not in self._view.gone)
            self._told = follows, AdmittedPeers(members=self._join_ids(members), leaving=self._join_ids(leaving))
        return self._told[1]

    def _join_ids(self, nodes: Iterable[str]) -> bytes:
        return join_ids(certificate_id(node, self._serials[node]) for node in nodes)
