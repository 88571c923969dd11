"""Decides which releases this node runs: with `release.signers`, those that a signer has signed, and the first one.

The node asks for itself, before it stages or starts anything: neither the journal nor its controller is believed. The
release that the job began with needs no signature. A node goes by the one that it was started for, or, if it was not
told then, by the first that it hears of.
"""

import os
from pathlib import Path

from holdfast.model.code_release import Release
from holdfast.wire import run_and_node_specs
from holdfast.wire.releases import release_signature

_NOTE = "first-release"
_BARE = release_signature.signed_message(Release(number=0))  # the host's own tree and command, and nothing besides


class ReleaseTrust:
    def __init__(self, signers: str, first: str, node_dir: Path) -> None:
        """`first` is the digest of what a signature of the first release would cover; "" if that is not known."""
        self._signers, self._first = signers, first
        self._note = node_dir / _NOTE
        self._checked: set[tuple[object, ...]] = set()  # signatures that were found to be good

    def fault(self, release: Release) -> str:
        """Return why this node must not run a release; "" if it may. Takes some milliseconds: call it in a thread."""
        if not self._signers or release_signature.signed_message(release) == _BARE:
            return ""
        if release.number == 1 and not release.signature:
            return self._first_fault(release)
        found = _state_of(self._signers)
        key = (release_signature.signed_message(release), release.signature, found)
        if key not in self._checked:
            if why := release_signature.signature_fault(release, self._signers):
                return f"release {release.number} is not run here: {why}"
            self._checked.add(key)
        return ""

    def _first_fault(self, release: Release) -> str:
        told = release_signature.signed_digest(release)
        try:
            known = self._first or self._read_note()
            if not known:
                run_and_node_specs.publish_file(self._note, told.encode())
        except OSError as e:
            return f"release 1 is not run here: {self._note} cannot be used, and it is not signed: {e.strerror}"
        if known in ("", told):
            return ""
        return "release 1 is not run here: it is not the one that the job began with, and it is not signed"

    def _read_note(self) -> str:
        try:
            return self._note.read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return ""


def _state_of(path: str) -> tuple[int, ...]:
    """Return what changes when a file does; () if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
