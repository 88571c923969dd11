"""Tokens that enrol one node, once. A token has a public id, which names it to both sides, and a secret."""

import os
import re
import urllib.parse
from typing import NamedTuple

from holdfast.wire.credentials import enrolment

_BEGINS = "hf-node."
_WHOLE = re.compile(r"hf-node\.([0-9a-f]{16})\.([0-9a-f]{32})(?:\.([A-Za-z0-9_.%-]+))?")


class NodeToken(NamedTuple):
    id: str  # by which the controller knows which one is meant
    secret: str
    name: str = ""  # of the node that it is for; "": any that has none yet

    def __str__(self) -> str:
        """Return the token as a host gets it, in a file or an environment variable."""
        named = f".{urllib.parse.quote(self.name, safe='')}" if self.name else ""
        return f"{_BEGINS}{self.id}.{self.secret}{named}"


def make_token(name: str) -> NodeToken:
    return NodeToken(os.urandom(8).hex(), os.urandom(16).hex(), name)


def parse_token(token: str) -> NodeToken | None:
    """Parse a node's token. Returns None for a job's own secret; raises ValueError for a damaged node token."""
    if not token.startswith(_BEGINS):
        return None
    found = _WHOLE.fullmatch(token)
    name = urllib.parse.unquote(found[3] or "") if found else ""
    if found is None or (name and not enrolment.NAME.fullmatch(name)):
        raise ValueError("is a damaged node token; copy it again, as holdfast token printed it")
    return NodeToken(found[1], found[2], name)
