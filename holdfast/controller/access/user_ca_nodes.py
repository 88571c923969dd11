"""Enrolment of nodes that have certificates from the user's own authority, and so need no token."""

from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.node_links import NodeLinks
from holdfast.wire.credentials import enrolment, mutual_tls, node_serials
from holdfast.wire.credentials.enrolment import CertifiedNode

NEEDLESS = "nodes of this job have certificates of its user's own authority and need no token"
_SHOW = "this job takes certificates of its user's own authority: set door.authority, door.certificate and door.key"


class CertificateEnrolment:
    """Accepts nodes that have certificates from the user's own authority, without any secret or token. Used instead of
    `NodeEnrolment`."""

    def __init__(
        self, folder: Path, run_id: str, audit: AuditLog, certificates: NodeCertificates, links: NodeLinks
    ) -> None:
        """`folder` has the controller's own keys, and a record of the names and serials of admitted nodes."""
        self._folder, self._run_id, self._audit = folder, run_id, audit
        self._certificates, self._links = certificates, links
        certificates.take_recorded(node_serials.read_serials(folder))

    def certificate_refusal(self, shown: dict[str, Any]) -> str:
        """Say why a node's certificate is refused; empty if it is accepted. A node's name stays bound to its first
        certificate."""
        node, run, serial = (
            mutual_tls.certificate_node(shown),
            mutual_tls.certificate_run(shown),
            mutual_tls.certificate_serial(shown),
        )
        if run not in ("", self._run_id):
            return f"the certificate of {node} is for run {run}, not for run {self._run_id}"
        if not enrolment.NAME.fullmatch(node):
            return enrolment.NAMES
        known = self._certificates.serial_of(node)
        if known not in (None, serial):
            why = f"this job already has a node {node}, with another certificate"
            self._certificates.tell_refusal(node, why)
            return why
        if known is None:
            try:
                node_serials.add_serial(self._folder, node, serial)
            except OSError as e:
                return f"the controller cannot record the node: {e.strerror}"
            self._certificates.add_serials({node: serial})
        return "" if self._certificates.is_valid(node, serial) else f"the certificate of {node} is no longer valid"

    async def challenge_route(self, request: web.Request) -> web.Response:
        """Tell a node whether it is accepted. A node asks this before it starts anything."""
        shown = request.transport.get_extra_info("peercert") if request.transport else None
        node = mutual_tls.certificate_node(shown)
        why = self.certificate_refusal(shown or {}) if node else _SHOW
        if not why and self._links.is_linked(node):
            why = f"this job already has a node {node}"
        if why:
            self._audit.record_refusal(request.remote or "", f"GET {enrolment.PATH}", why)
            return _json_response({"error": why}, 403)
        return _json_response(CertifiedNode(node=node, run_id=self._run_id))

    async def enrol_route(self, request: web.Request) -> web.Response:
        return _json_response({"error": _SHOW}, 403)


def _json_response(value: object, status: int = 200) -> web.Response:
    answer = web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
    if status >= 400:
        answer.force_close()  # or he asks a thousand times a second by a link that he has
    return answer
