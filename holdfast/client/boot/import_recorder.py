"""Records which modules a script imports before its first step, so that the next zygote can preload them."""

import json
import os
import sys
import sysconfig
from collections.abc import Callable

IMPORTS = "HOLDFAST_IMPORTS"  # in one rank's environment per node: the file to write
# The folder of the package; installed, too, where pip was told -e.
_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))


def watch_imports(environ: "os._Environ[str]") -> Callable[[], None] | None:
    """Start recording in a fresh rank; return a function to call at the first step, or None if nobody asked."""
    path = environ.get(IMPORTS)
    if not path:
        return None
    before = frozenset(sys.modules)
    return lambda: _write_names(path, installed_modules(before))


def installed_modules(before: frozenset[str]) -> list[str]:
    """Return the modules of installed packages that were imported since `before`, in order; none of the user's."""
    roots = tuple(root + os.sep for root in {*library_roots(), _OURS})
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name in before or spec is None or spec.name != name or not isinstance(origin, str):
            continue
        if os.path.realpath(origin).startswith(roots):
            found.append(name)
    return found


def library_roots() -> set[str]:
    """Return the folders of installed packages, including those of the user site and of a base environment."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return {os.path.realpath(folder) for folder in folders}


def _write_names(path: str, names: list[str]) -> None:
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w") as file:
        json.dump(names, file)
    os.replace(beside, path)
