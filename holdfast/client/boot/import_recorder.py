"""Records which modules a script imports before its first step, so that the next zygote can preload them."""

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

IMPORTS = "HOLDFAST_IMPORTS"  # in one rank's environment per node: the file to write
# The folder of the package; installed, too, where pip was told -e.
_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))


def watch_imports(environ: "os._Environ[str]") -> Callable[[], None] | None:
    """Start recording in a fresh rank; return the function to call at the first step, None if recording is off."""
    path = environ.get(IMPORTS)
    if not path:
        return None
    before, changes = frozenset(sys.modules), EnvironmentWatch()
    sys.addaudithook(changes.on_audit)
    return lambda: _write_names(path, installed_modules(before, changes.close()))


class EnvironmentWatch:
    """Records which modules are loaded when the script first changes an environment variable.

    Modules imported later may depend on this change. The zygote would import them without the change, so it must not
    preload them. Changes by an installed library do not count: it would make the same changes in the zygote.
    """

    def __init__(self) -> None:
        self._imported: frozenset[str] | None = None
        self._is_over = False

    def on_audit(self, event: str, _args: tuple[Any, ...]) -> None:
        """Audit hook that notes the first change of the environment by the user's code. It never raises an exception,
        because the script's own call would fail."""
        if self._is_over or event not in ("os.putenv", "os.unsetenv"):
            return
        if _is_users_frame(sys._getframe(1)):
            self._imported, self._is_over = frozenset(sys.modules), True

    def close(self) -> frozenset[str]:
        """Stop watching. Return the modules that were loaded when the script first changed the environment; if it never
        did, return all loaded modules."""
        self._is_over = True
        return frozenset(sys.modules) if self._imported is None else self._imported


def _is_users_frame(frame: FrameType | None) -> bool:
    """Return whether this frame runs the user's code, or python-dotenv, which loads the user's .env file."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen"):  # os.environ itself
        frame = frame.f_back
    path = os.path.realpath(frame.f_code.co_filename) if frame is not None else _OURS + os.sep
    return f"{os.sep}dotenv{os.sep}" in path or not path.startswith(_installed_roots())


def installed_modules(before: frozenset[str], known: frozenset[str]) -> list[str]:
    """Return the installed modules that are in `known` but not in `before`, in the order of import."""
    roots, found = _installed_roots(), []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name in before or name not in known or spec is None or spec.name != name or not isinstance(origin, str):
            continue
        if os.path.realpath(origin).startswith(roots):
            found.append(name)
    return found


def _installed_roots() -> tuple[str, ...]:
    return tuple(root + os.sep for root in {*library_roots(), _OURS})


def library_roots() -> set[str]:
    """Return the folders of the standard library and of installed packages, with links resolved."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return {os.path.realpath(folder) for folder in folders}


def _write_names(path: str, names: list[str]) -> None:
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w") as file:
        json.dump(names, file)
    os.replace(beside, path)
