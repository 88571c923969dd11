"""Loads the digests that healthy devices give in probes. The comparison is in core/diagnose/probe_assessment.py, which
may not read files."""

import tomllib
from importlib import resources

import msgspec

from holdfast.core.diagnose.probe_assessment import GoldenRow, Key


class _File(msgspec.Struct, forbid_unknown_fields=True):
    row: list[GoldenRow] = []


def load_golden(text: str | None = None) -> dict[Key, str]:
    """Return the expected digests from golden.toml, or from `text`. Raise ValueError if two rows have the same key."""
    if text is None:
        text = resources.files("holdfast.core").joinpath("catalog/golden.toml").read_text(encoding="utf-8")
    rows = msgspec.convert(tomllib.loads(text), _File).row
    found = {row.key: row.digest for row in rows}
    if len(found) < len(rows):
        raise ValueError("golden.toml has two rows for the same probe, device, torch and form")
    return found
