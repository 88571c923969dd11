"""Parts of a study that are done: what was cut short goes on from there. The short form keeps nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks._report import FULL

T = TypeVar("T", bound=msgspec.Struct)
OUT = Path(__file__).with_name("out")


class Kept:
    def __init__(self, study: str, folder: Path = OUT) -> None:
        self._study = study
        self._folder = folder

    def part(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        path = self._folder / f"{self._study}-{name}.json"
        if FULL and path.exists():
            return msgspec.json.decode(path.read_bytes(), type=kind)
        print(f"{name}:", flush=True)
        made = make()
        if FULL:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(made))
        return made

    def forget(self) -> None:
        for path in self._folder.glob(f"{self._study}-*.json"):
            path.unlink()
