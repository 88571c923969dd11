"""Hosts that know the job's secret become nodes of it: the controller's side of wire/enrolment.py."""

import os
import re
import ssl
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from holdfast.core.decoding import from_json
from holdfast.wire import enrolment, secret
from holdfast.wire.enrolment import Challenge, Enrol, Enrolled

if TYPE_CHECKING:
    from holdfast.wire.authority import Authority

_OPEN_S = 30.0  # from the challenge to the answer
_MOST_OPEN = 4096
_NAME = re.compile(r"\w[\w.-]{0,199}")


class Enrolling:
    def __init__(self, authority: "Authority", token: str, run_id: str) -> None:
        self._authority, self._token, self._run_id = authority, token, run_id
        self._certificate = ssl.PEM_cert_to_DER_cert(authority.keys.certificate.read_text())
        self._open: dict[object, tuple[tuple[str, str], float]] = {}  # by link: the challenge that waits for its answer
        self.serials = authority.serials()  # of the nodes, by name

    async def challenge(self, request: web.Request) -> web.Response:
        mine = request.query.get("nonce", "")
        if len(mine) != 2 * secret.NONCE_BYTES:
            return _error(400, f"send a nonce of {2 * secret.NONCE_BYTES} characters")
        now = time.monotonic()
        self._open = {link: found for link, found in self._open.items() if found[1] > now}
        if len(self._open) >= _MOST_OPEN:
            return _error(429, "too many hosts are enrolling at once; try again")
        nonces = (mine, os.urandom(secret.NONCE_BYTES).hex())
        self._open[request.transport] = (nonces, now + _OPEN_S)
        shown = enrolment.controller_proof(self._token, nonces, self._certificate)
        return _json(Challenge(nonce=nonces[1], proof=shown))

    async def enrol(self, request: web.Request) -> web.Response:
        try:
            asked = from_json(await request.read(), Enrol)
        except msgspec.DecodeError as e:
            return _error(400, f"this is no request of this version of holdfast: {e}")
        nonces, until = self._open.pop(request.transport, (("", ""), 0.0))
        if until < time.monotonic() or asked.nonces != nonces:
            return _error(403, "this challenge is not open; ask for another")
        parts = enrolment.node_parts(asked.name, asked.nonces, asked.request, self._certificate)
        if not secret.same(secret.proof(self._token, "node", *parts), asked.proof):
            return _error(403, "the token is not this job's")
        if not _NAME.fullmatch(asked.name):
            return _error(400, "a node's name has 1 to 200 letters, digits, dots, dashes and underscores")
        if asked.run_id and asked.run_id != self._run_id:
            return _error(409, f"it runs the job {self._run_id}, not {asked.run_id}")
        if asked.name in self.serials:
            return _error(409, f"there is a node {asked.name} in this job already; give this one another name")
        try:
            signed = self._authority.node(asked.name, asked.request.encode())
        except ValueError as e:
            return _error(400, f"the key cannot be signed: {e}")
        self.serials[asked.name] = self._authority.register(asked.name, signed)
        own = self._authority.keys.authority.read_text()
        return _json(Enrolled(certificate=signed.decode(), authority=own))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, sentence: str) -> web.Response:
    return _json({"error": sentence}, status)
