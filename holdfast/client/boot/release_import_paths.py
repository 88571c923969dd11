"""Makes a rank import the user's code from the staged copy of its release, not from the user's own tree."""

import functools
import os
import sys

from holdfast.client.boot import release_traceback_paths
from holdfast.client.boot.import_recorder import library_roots
from holdfast.wire.releases.staged_release import StagedRelease, editable_mappings, is_within


def find_strays() -> tuple[str, ...]:
    """Return the preloaded modules that are not installed, but for our own. They may come from a user's tree, which may
    change later."""
    roots = library_roots()
    folder_of = functools.cache(os.path.realpath)  # of two thousand modules in four hundred folders
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == "holdfast":
            continue
        real = os.path.realpath(file) if os.path.islink(file) else f"{folder_of(os.path.dirname(file))}/module"
        if not any(is_within(real, root) for root in roots):
            found.append(name)
    return tuple(found)


def move_imports(staged: StagedRelease, preloaded: tuple[str, ...]) -> None:
    """Redirect the imports of a fresh rank to the staged release. Remove each module of `preloaded` whose file belongs
    to the user's tree, so that it is imported from the release."""
    sys.path[:] = [staged.staged_path(path) if path else path for path in sys.path]
    for mapping in editable_mappings():
        mapping.update({name: staged.staged_path(path) for name, path in mapping.items()})
    for name in preloaded:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and is_within(os.path.realpath(file), staged.root):
            del sys.modules[name]
    if staged.at:
        release_traceback_paths.install_finder(staged)
