"""Lets a script import its own modules when the zygote has already imported others of the same names."""

import contextlib
import importlib
import os
import pkgutil
import sys
from importlib.machinery import all_suffixes

import holdfast.client

# What every interpreter has imported before a script begins, so that no file beside the script can come first; and us.
_EARLY = frozenset(sys.builtin_module_names) | {
    *("_collections_abc", "_sitebuiltins", "abc", "codecs", "encodings", "genericpath", "io", "os", "posixpath"),
    *("site", "stat", "zipimport", "importlib", "__main__", "holdfast"),
}


def forget_shadowed(folder: str) -> None:
    """Remove from sys.modules what modules in `folder` shadow. Call it in a fresh rank that imports from there first.

    Code that has imported such a module keeps it. Our own client modules are imported first, so that none of them
    picks up a user's module later.
    """
    names = {name for name in _importable_names(folder) if name in sys.modules and not _is_from(folder, name)} - _EARLY
    if not names:
        return
    ours = pkgutil.walk_packages(holdfast.client.__path__, "holdfast.client.")
    for module in ours if "torch" in sys.modules else ():  # without it they would take seconds, and few are wanted
        importlib.import_module(module.name)
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def _importable_names(folder: str) -> set[str]:
    """Return the names that can be imported from a folder; a folder needs an __init__.py to come first."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
        for entry in entries:
            suffix = next((s for s in all_suffixes() if entry.name.endswith(s)), "")
            if suffix:
                found.add(entry.name[: -len(suffix)])
            elif os.path.exists(os.path.join(entry.path, "__init__.py")):
                found.add(entry.name)
    return found


def _is_from(folder: str, name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and os.path.realpath(file).startswith(os.path.realpath(folder) + os.sep)
