"""The nodes of a job that have shown a certificate, by name, with its serial; kept beside the job's keys."""

import json
from pathlib import Path

from holdfast.wire.identity import put_secret


def read(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / "nodes.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def add(folder: Path, name: str, serial: str) -> None:
    put_secret(folder / "nodes.json", json.dumps(read(folder) | {name: serial}).encode(), durable=True)
