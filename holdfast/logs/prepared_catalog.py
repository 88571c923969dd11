"""The built-in catalog rows as one prepared file: already parsed, and with the literals of their patterns.

People edit TOML files, but parsing their 2,400 patterns takes half a second, too long for `holdfast diagnose` and for a
failed rank. `python -m tests.prepared_rows` writes the prepared file, and a test fails if it is out of date. If a TOML
file has changed since, the prepared rows are ignored.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from holdfast.core.log_analysis.failure_catalog import Alternative, CatalogRow, find_alternatives
from holdfast.decoding import from_json

NAME = "prepared.json"


class PreparedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    row: CatalogRow
    alternatives: tuple[Alternative, ...] = ()


class PreparedFile(msgspec.Struct, frozen=True):
    made_from: dict[str, str]  # checksums of the TOML files, by name
    rows: list[PreparedRow]


def read_prepared(folder: Path, sources: Mapping[str, bytes]) -> list[PreparedRow] | None:
    """Return the prepared rows of a folder; None if they were not made from exactly these TOML files."""
    try:
        found = from_json((folder / NAME).read_bytes(), PreparedFile)
    except (OSError, msgspec.DecodeError):
        return None
    return found.rows if found.made_from == _checksums(sources) else None


def format_prepared(sources: Mapping[str, bytes], rows: Iterable[CatalogRow]) -> bytes:
    """Return the content of the file of prepared catalog rows, with one line for each row."""
    made_from = msgspec.json.encode(_checksums(sources))
    lines = b",\n".join(msgspec.json.encode(prepare_row(row)) for row in rows)
    return b'{"made_from":%s,\n"rows":[\n%s\n]}\n' % (made_from, lines)


def prepare_row(row: CatalogRow) -> PreparedRow:
    return PreparedRow(row, find_alternatives(row) if row.pattern else ())


def _checksums(sources: Mapping[str, bytes]) -> dict[str, str]:
    """Return a checksum of each file; it detects accidental edits, not deliberate ones."""
    return {name: f"{zlib.crc32(sources[name]):08x}" for name in sorted(sources)}
