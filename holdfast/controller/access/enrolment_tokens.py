"""The node tokens of a job: each enrols one node, once, and survives a restart of the controller."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.decoding import from_json
from holdfast.wire.credentials import enrolment_token, mutual_tls
from holdfast.wire.credentials.enrolment_token import NodeToken

MOST_S = 30 * 86400.0
_KEPT_S = 86400.0  # after its time is over, so that a host that comes late is told why
_MORE = "make another with holdfast token node"


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node token as the controller keeps it."""

    secret: str  # in the clear: the controller proves with it that it is the one that made it
    until: float  # by the clock of the controller's host
    name: str = ""
    used_by: str = ""  # the node that was enrolled with it


class NodeTokens:
    """The node tokens in a file that only the controller writes."""

    def __init__(self, folder: Path, publish: Callable[[], None], clock: Callable[[], float] = time.time) -> None:
        """`folder` is the folder of the certificate authority, which only its owner can read. `publish` copies the
        folder to where a controller on another host would find it."""
        self._path, self.publish, self._clock = folder / "tokens.json", publish, clock
        try:
            self._minted = from_json(self._path.read_bytes(), dict[str, TokenRecord])
        except (FileNotFoundError, msgspec.DecodeError):
            self._minted = {}  # one that is damaged lets nobody in

    def mint_token(self, name: str, within_s: float) -> NodeToken:
        """Make a token and store it for later controllers. If `name` is given, only a node of this name can use it."""
        made, now = enrolment_token.make_token(name), self._clock()
        kept = {id: found for id, found in self._minted.items() if now < found.until + _KEPT_S}
        self._write_tokens(kept | {made.id: TokenRecord(secret=made.secret, until=now + within_s, name=name)})
        self.publish()
        return made

    def secret_of(self, id: str) -> str | None:
        return self._minted[id].secret if id in self._minted else None

    def why_unusable(self, id: str, name: str) -> str:
        """Return one sentence why a token cannot enrol a node of this name; "" if it can."""
        found = self._minted[id]
        if found.used_by:
            return f"this token has already enrolled {found.used_by}, and a token enrols one node; {_MORE}"
        if self._clock() >= found.until:
            over = datetime.fromtimestamp(found.until, UTC)
            return f"this token expired at {over:%Y-%m-%d %H:%M:%S} UTC; {_MORE}"
        if found.name and found.name != name:
            return f"this token is for node {found.name}, not for {name}"
        return ""

    def use_token(self, id: str, name: str) -> None:
        """Write to disk that the token is used; the node is answered only afterwards, so no crash frees the token."""
        self._write_tokens(self._minted | {id: msgspec.structs.replace(self._minted[id], used_by=name)})

    def _write_tokens(self, minted: dict[str, TokenRecord]) -> None:
        mutual_tls.write_secret(self._path, msgspec.json.encode(minted), durable=True)
        self._minted = minted
