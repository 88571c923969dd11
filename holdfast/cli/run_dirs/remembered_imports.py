"""Remembers which installed modules a script imports, so that its next run has them in the zygote from the start.

A file holds those of one script and interpreter. They count until the script changes. Only modules are remembered that
a zygote had and that ranks can be forked with.
"""

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_dirs.run_dir_trust import foreign_reason, make_private_folder
from holdfast.wire import run_and_node_specs
from holdfast.wire.agent_messages import ModuleNames
from holdfast.wire.run_and_node_specs import EntryPoint

FOLDER = "script-imports"
_LOOK_S = 2.0


class RememberedImports(msgspec.Struct, frozen=True, kw_only=True):
    script: str  # for people; the file's name is made of it
    digest: str  # of the script's source
    modules: ModuleNames


def recall_imports(entry: EntryPoint) -> tuple[str, ...]:
    """Return the modules that this script imported in an earlier run; () if it has changed since, or is new."""
    path = _file_of(entry)
    if not entry.zygote or foreign_reason(path.parent):
        return ()
    try:
        found = run_and_node_specs.read_json(path, RememberedImports)
    except (OSError, ValueError):
        return ()
    return found.modules if found.digest == _digest(entry) else ()


def remember_imports(entry: EntryPoint, modules: tuple[str, ...]) -> None:
    """Write down what ranks of this script were forked with; () makes it forget. Errors are ignored: the next run only
    takes longer to learn them again."""
    path = _file_of(entry)
    with contextlib.suppress(OSError):
        if not modules:
            path.unlink(missing_ok=True)
            return
        make_private_folder(path.parent)
        found = RememberedImports(script=_script(entry), digest=_digest(entry), modules=modules)
        run_and_node_specs.write_json(path, found)


class ImportsMemory:
    """Writes down for the next run what the script imports, as soon as ranks can be forked with it."""

    def __init__(self, entry: EntryPoint, read: Callable[[], tuple[str, ...]]) -> None:
        self._entry, self._read, self._written = entry, read, read()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.write_news()

    def write_news(self) -> None:
        if (found := self._read()) != self._written:
            self._written = found
            remember_imports(self._entry, found)


def _script(entry: EntryPoint) -> str:
    return f"{entry.cwd}: -m {entry.argv[0]}" if entry.module else os.path.join(entry.cwd, entry.argv[0])


def _file_of(entry: EntryPoint) -> Path:
    words = "\0".join((_script(entry), sys.executable, sys.prefix))
    return run_directory.holdfast_home() / FOLDER / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def _digest(entry: EntryPoint) -> str:
    """Return the digest of the script's source; "" for a module, whose source is not looked for."""
    if entry.module:
        return ""
    try:
        return hashlib.sha256(Path(_script(entry)).read_bytes()).hexdigest()
    except OSError:
        return "not readable"
