"""Finds the peer that ranks say they have lost: its address, its host or its rank, as written in the line."""

import re

_PEER = re.compile(
    r"(?:\bby (?:remote )?peer |\b(?:Read|Write|Connect) error |\bremote=|\b(?:recv|send) (?:from|to) |"
    r"\bwaiting for (?:send/recv from )?)"
    r"(?P<peer>\[[\w.:-]+\]:\d+|[\w.:-]+<\d+>|rank \d+)"
)


def find_peer(line: str) -> str:
    """Return the peer that a line says is gone; "" if the line names none."""
    found = _PEER.search(line)
    return found["peer"] if found else ""
