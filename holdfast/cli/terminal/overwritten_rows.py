"""Rows of output that their writer draws again: a progress bar overwrites its row, and bars below it go down and up."""

import re

from holdfast.cli.terminal.traceback_folding import split_before_report

_MOVE = re.compile(rb"(\n|\x1b\[\d{0,3}A)")
_UP = re.compile(rb"\x1b\[\d{0,3}A")
_MOST_ROWS = 32  # below the cursor


def split_rows(open_rows: list[bytes], chunk: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the rows that are complete, and those that are still open: the one with the cursor, then those below it,
    which may be drawn again. `open_rows` are those before this chunk; the cursor is in the first of them."""
    if len(open_rows) == 1 and not _UP.search(chunk):
        *lines, rest = (open_rows[0] + chunk).split(b"\n")
        return lines, [rest]
    rows, at = [*open_rows], 0
    for part in _MOVE.split(chunk):
        if part == b"\n":
            at += 1
        elif _UP.fullmatch(part):
            at = max(0, at - int(part[2:-1] or b"1"))
        else:
            rows[at] += part
            continue
        if at == len(rows):
            rows.append(b"")
        elif rows[at]:
            rows[at] += b"\r"  # what follows is drawn over it
    below = [_keep_newest(row) for row in rows[at + 1 : at + _MOST_ROWS]]
    while below and not below[-1]:
        below.pop()
    return rows[:at], [rows[at], *below]


def _keep_newest(row: bytes) -> bytes:
    newest = row.rstrip(b"\r").rpartition(b"\r")[2]
    return b"\r" + newest if newest.strip() else b""


def show_newest(row: bytes) -> list[bytes]:
    """Return what a terminal shows of a row: the text after its last carriage return, or nothing if that is blank. If a
    traceback or a report begins within that text, split it there."""
    _, drawn, newest = row.rstrip(b"\r").rpartition(b"\r")
    if not drawn:
        return [newest]
    return split_before_report(newest) if newest.strip() else []
