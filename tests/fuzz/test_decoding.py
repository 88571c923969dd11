"""Holds that nothing is decoded but by core/decoding.py, whose errors are known."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "holdfast"
BARE = re.compile(r"msgspec\.(json|msgpack)\.decode\(|(?<!decoder\()msgspec\.(json|msgpack)\.Decoder\((?!\[)")


def test_nobody_decodes_by_himself() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "core" / "decoding.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BARE.search(line)
    ]
    assert not found, "use from_json, from_msgpack or decoder of core/decoding.py"
