"""The API route that gives out tokens, to a person or a fleet. With a token, a node of another host can enrol."""

import msgspec
from aiohttp import web

from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import CALLER, Right
from holdfast.controller.access.enrolment_tokens import MOST_S, NodeTokens
from holdfast.decoding import from_json
from holdfast.wire.credentials import enrolment

ON_ONE_HOST = "all nodes of this job run on its own host and need no token"


class MintBody(msgspec.Struct, frozen=True, kw_only=True):
    node: str = ""  # its name; "": any
    within_s: float = 3600.0  # it is to enrol within so long


class MintedToken(msgspec.Struct, frozen=True, kw_only=True):
    token: str


class TokenMinting:
    def __init__(self, audit: AuditLog, tokens: NodeTokens | None, needless: str = "") -> None:
        """`needless` is the reason why this job's nodes need no tokens; "" if they need tokens."""
        self._audit, self._tokens, self._needless = audit, tokens, needless

    async def mint_route(self, request: web.Request) -> web.Response:
        try:
            body = from_json(await request.read() or b"{}", MintBody)
        except msgspec.DecodeError as e:
            return _json_response({"error": f'send a request such as {{"node": "n7", "within_s": 3600}}: {e}'}, 400)
        caller = CALLER.get()
        beyond = "" if caller.right is Right.ADMIN else f"{caller.name} may not add nodes: that needs the right admin"
        why = beyond or self._needless or _find_fault(body)
        self._audit.record_order(caller.name, caller.origin, {"token_for": body.node, "within_s": body.within_s}, why)
        if why or self._tokens is None:
            return _json_response({"error": why}, 403 if beyond else 400)
        try:
            return _json_response(MintedToken(token=str(self._tokens.mint_token(body.node, body.within_s))))
        except OSError as e:
            return _json_response({"error": f"the controller cannot store the token: {e.strerror}"}, 503)


def _find_fault(body: MintBody) -> str:
    if body.node and not enrolment.NAME.fullmatch(body.node):
        return enrolment.NAMES
    return "" if 0 < body.within_s <= MOST_S else f"within_s must be above 0 and at most {MOST_S:g}"


def _json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
