"""RUN_DIR/audit.log, append-only: who ordered what, from where, with what outcome, and who was refused."""

import os
import time
from pathlib import Path

import msgspec

from holdfast.logs.secret_masking import HIDDEN, make_secret_masker

_MOST_BYTES = 64 << 20  # then refusals are no longer written; orders are
_MOST_SHOWN = 4096  # characters of what was refused
_REFUSALS_S = 1.0  # at most one in so long


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at: float
    who: str
    origin: str
    what: str
    refused: str = ""


class AuditLog:
    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "audit.log"
        self._refused_at = 0.0
        self._unwritten = 0

    def record_order(self, who: str, origin: str, body: object, refused: str = "") -> None:
        """Record an order, with secrets hidden. A refused order is shortened, and a full log leaves it out, so that a
        caller with few rights cannot fill the disk."""
        what = _redact_body(body)
        if refused and self._log_bytes() > _MOST_BYTES:
            self._unwritten += 1
            return
        what = what if len(what) <= _MOST_SHOWN or not refused else f"{what[:_MOST_SHOWN]}..."
        self._append_entry(AuditEntry(at=time.time(), who=who, origin=origin, what=what, refused=refused))

    def record_refusal(self, origin: str, path: str, why: str) -> None:
        """Record a caller without valid credentials. Limited to one line a second, and to a total size."""
        now = time.monotonic()
        if now < self._refused_at + _REFUSALS_S or self._log_bytes() > _MOST_BYTES:
            self._unwritten += 1
            return
        self._refused_at = now
        more = f" ({self._unwritten} more were not written)" if self._unwritten else ""
        self._unwritten = 0
        what, refused = _valid_utf8(path[:200]), _valid_utf8(why + more)
        self._append_entry(AuditEntry(at=time.time(), who="?", origin=origin, what=what, refused=refused))

    def _log_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _append_entry(self, deed: AuditEntry) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o600)
            try:
                os.write(fd, msgspec.json.encode(deed) + b"\n")
            finally:
                os.close(fd)
        except OSError:
            pass  # a full disk is told of elsewhere, and must not keep a person from stopping the job


def _valid_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode; the text may quote a request with arbitrary bytes."""
    return text.encode("utf-8", "replace").decode()


def _redact_body(body: object) -> str:
    tree = msgspec.to_builtins(body)
    release = tree.get("release") if isinstance(tree, dict) else None
    if release and release.get("env"):
        release["env"] = dict.fromkeys(release["env"], HIDDEN)
    if release and release.get("argv"):
        release["argv"] = make_secret_masker().mask_argv(release["argv"])
    return msgspec.json.encode(tree).decode()
