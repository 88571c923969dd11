"""Lets a script import its own modules, even if the zygote has imported other modules of the same names."""

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
    """Remove each module from sys.modules that has the name of a module in `folder` but comes from elsewhere.

    Call this in a fresh rank whose sys.path begins with `folder`. Code that has imported a removed module keeps using
    it. If torch is loaded, all our client modules are imported before, so that none gets a user's module later.
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
    """Return the names of the modules and packages in a folder. A subfolder counts only if it has an __init__.py."""
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
