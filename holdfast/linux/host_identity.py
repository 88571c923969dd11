"""Reads an id that tells this host from others, and that stays the same when the host is renamed or booted again."""

import hashlib
import os
import re
import socket
from pathlib import Path

HOST_ID = "HOLDFAST_HOST_ID"  # in the environment: used as it is, where machines share an id, or one plays several
_PLACES = ("sys/class/dmi/id/product_uuid", "etc/machine-id")  # the board's own is only for root to read
_GIVEN = re.compile(r"[\w.:-]{1,100}", re.ASCII)
_UNIQUE = re.compile(r"[0-9a-f-]{32,36}")


def read_host_id(root: Path = Path("/")) -> str:
    """Return this host's id: HOLDFAST_HOST_ID, or a digest of the machine's own id, or the host name. The machine's id
    stays private, so only its digest is used. A machine's id of very few distinct digits is a placeholder and is
    ignored. Raise ValueError if HOLDFAST_HOST_ID is malformed."""
    if given := os.environ.get(HOST_ID):
        if not _GIVEN.fullmatch(given):
            raise ValueError(f"{HOST_ID} must have 1 to 100 ASCII letters, digits, dots, colons, dashes or underscores")
        return given
    for place in _PLACES:
        try:
            found = (root / place).read_text(encoding="ascii").strip().lower()
        except (OSError, UnicodeDecodeError):
            continue
        if _UNIQUE.fullmatch(found) and len(set(found)) > 4:
            return hashlib.sha256(f"holdfast {found}".encode()).hexdigest()[:16]
    return socket.gethostname()
