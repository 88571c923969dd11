"""Shows code that runs from the copy of a release under its path in the user's own tree. Tracebacks, stacks and
debuggers then name the user's own files, but show the source that runs. `__file__` stays in the copy, so a script finds
the files of its release beside itself."""

import importlib.util
import linecache
import os
import sys
import traceback
import types
from importlib import machinery

from holdfast.wire.releases.staged_release import StagedRelease, is_within

_copies: list[StagedRelease] = []  # the one that this process runs from, if it does


def install_finder(staged: StagedRelease) -> None:
    """Install, in a fresh rank, the importer that shows a copy's modules under the user's own paths."""
    _copies.append(staged)
    finder = machinery.FileFinder.path_hook(
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (_RenamingLoader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    )

    def hook(path: str) -> machinery.FileFinder:
        if not is_within(path, staged.at):
            raise ImportError("not of the copy", path=path)
        return finder(path)  # type: ignore[return-value]

    sys.path_hooks.insert(0, hook)
    for path in [path for path in sys.path_importer_cache if is_within(path, staged.at)]:
        del sys.path_importer_cache[path]
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = (
            _print_exception  # the interpreter's own reads the file of that name, which may have been edited
        )


def displayed_name(path: str, source: bytes) -> str:
    """Return the path under which tracebacks show a file, and let them show `source` as the text of that path."""
    copy = next((one for one in _copies if is_within(path, one.at)), None)
    if copy is None:
        return path
    name = os.path.join(copy.root, os.path.relpath(path, copy.at))
    try:
        text = importlib.util.decode_source(source)
    except (SyntaxError, UnicodeDecodeError):
        return path  # which compiling it will tell
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return name


class _RenamingLoader(machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        code = super().get_code(fullname)  # from bytecode, where there is some
        return _rename_code(code, displayed_name(self.path, self.get_data(self.path))) if code else code


def _rename_code(code: types.CodeType, name: str) -> types.CodeType:
    inner = tuple(_rename_code(one, name) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=name, co_consts=inner)


def _print_exception(kind: type[BaseException], failure: BaseException, tb: types.TracebackType | None) -> None:
    traceback.print_exception(kind, failure, tb)
