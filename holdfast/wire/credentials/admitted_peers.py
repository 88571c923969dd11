"""Which certificates count among the nodes of a job: the controller makes the list, nodes keep it on disk.

A list of those that count, not of those that do not: a keeper that has not heard of a node refuses it. It is short, as
2,000 nodes get it at once when the controller is back.
"""

import hashlib
from collections.abc import Iterable

import msgspec

ID_BYTES = 12  # nobody can choose a serial that an authority gives, so a shorter one could not be hit either
_PURPOSE = b"holdfast peer"


class AdmittedPeers(msgspec.Struct, frozen=True, kw_only=True):
    """The certificates of the job's nodes, by their ids, each list in order."""

    members: bytes = b""  # they may ask for state and be asked
    leaving: bytes = b""  # their nodes have left, and may only be asked for the copies that they hold


def certificate_id(node: str, serial: str) -> bytes:
    """Return the id of a certificate. It follows from the name too: a user may sign another for an old name."""
    told = f"{node}\0{serial}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(told, digest_size=ID_BYTES, person=_PURPOSE).digest()


def join_ids(ids: Iterable[bytes]) -> bytes:
    return b"".join(sorted(ids))


def split_ids(joined: bytes) -> frozenset[bytes]:
    return frozenset(joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES))
