"""What a script imports up to its first step, so that the next zygote can have it ready."""

import json
import os
import sys
import sysconfig
from collections.abc import Callable

IMPORTS = "HOLDFAST_IMPORTS"  # in one rank's environment per node: the file to write
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # installed, too, where pip was told -e


def watch(environ: "os._Environ[str]") -> Callable[[], None] | None:
    """To be called in a fresh rank; what it returns is to be called at the first step. None: nobody asked."""
    path = environ.get(IMPORTS)
    if not path:
        return None
    before = frozenset(sys.modules)
    return lambda: _write(path, installed(before))


def installed(before: frozenset[str]) -> list[str]:
    """Modules that came since, in their order: only of installed packages, never of the user's own tree."""
    paths = sysconfig.get_paths()
    libraries = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots = tuple(root + os.sep for root in {*libraries, _OURS})
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name in before or spec is None or spec.name != name or not isinstance(origin, str):
            continue
        if os.path.realpath(origin).startswith(roots):
            found.append(name)
    return found


def _write(path: str, names: list[str]) -> None:
    beside = f"{path}.{os.getpid()}"
    with open(beside, "w") as file:
        json.dump(names, file)
    os.replace(beside, path)
