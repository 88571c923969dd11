"""Reads the last line that a child process has written to a file in memory; what it quotes may hold secrets."""

import os

from holdfast.logs.secret_masking import last_bytes, make_secret_masker

_TAIL_BYTES = 1 << 16
_LINE_CHARS = 300


def read_last_line(fd: int) -> str:
    """Return the last line that is not blank, masked, then cut; empty if there is none."""
    size = os.fstat(fd).st_size
    tail = last_bytes(os.pread(fd, _TAIL_BYTES + 1, max(0, size - _TAIL_BYTES - 1)), _TAIL_BYTES)
    return make_secret_masker().mask_last_line(tail.decode(errors="replace"), _LINE_CHARS)
