"""The copy of a release on a node: the command, environment and paths with which ranks run from it."""

import os
import sys

import msgspec

from holdfast.model.code_release import Release
from holdfast.model.loss_response import Ease, Skip
from holdfast.wire.rank_environment_defaults import with_whole_paths
from holdfast.wire.run_and_node_specs import EntryPoint
from holdfast.wire.skip_ease_environment import EASE, SKIP


class StagedRelease(msgspec.Struct, frozen=True, kw_only=True):
    """The user's tree and its copy; without a copy, ranks run from the user's own tree."""

    root: str = ""
    at: str = ""

    def staged_path(self, path: str) -> str:
        """Return the path in the release copy for a path in the user's tree; other paths are returned unchanged."""
        real = os.path.realpath(path)
        if not self.at or not is_within(real, self.root):
            return path
        return os.path.normpath(os.path.join(self.at, os.path.relpath(real, self.root)))


def is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def staged_entry(entry: EntryPoint, release: Release, staged: StagedRelease) -> EntryPoint:
    """Return the entry point of a release's ranks. A release without arguments uses the host's own."""
    if not release.digest:
        return entry
    argv = release.argv or entry.argv
    if release.script:
        script = os.path.join(staged.at or staged.root, release.script)
        given = os.path.join(entry.cwd, entry.argv[0])
        as_given = not staged.at and os.path.realpath(given) == os.path.realpath(script)
        argv = (entry.argv[0] if as_given else script, *argv[1:])
    return msgspec.structs.replace(entry, argv=argv, copied=bool(staged.at))


def staged_environment(
    env: dict[str, str], entry: EntryPoint, release: Release, staged: StagedRelease
) -> dict[str, str]:
    """Return a rank's environment; the release's variables override those in `env`."""
    env = with_whole_paths(env | release.env, entry.cwd)
    if release.number:
        env["HOLDFAST_RELEASE"] = str(release.number)
    if not staged.at:
        return env
    given = env.get("PYTHONPATH", "")
    paths = [staged.staged_path(path) for path in given.split(os.pathsep)] if given else []
    if entry.module and not env.get("PYTHONSAFEPATH"):
        paths.insert(0, staged.staged_path(entry.cwd))  # as `python -m` has the working directory first
    if entry.python == sys.executable:
        paths += editable_folders(staged)
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env


def editable_folders(staged: StagedRelease) -> list[str]:
    """Return the copy's folders for packages that `pip install -e` installed from the user's tree."""
    roots = sys.path[0 if sys.flags.safe_path else 1 :]  # the first is where this process was started
    for mapping in editable_mappings():
        roots += [os.path.dirname(path) for path in mapping.values()]
    pairs = [(path, staged.staged_path(path)) for path in roots]
    return list(dict.fromkeys(moved for path, moved in pairs if moved != path))


def editable_mappings() -> list[dict[str, str]]:
    """Return the paths of packages by name, for each import finder that a setuptools editable install added."""
    found = []
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", "") or "")
        mapping = getattr(module, "MAPPING", None)
        if isinstance(mapping, dict):
            found.append(mapping)
    return found


def skip_variables(skips: tuple[Skip, ...], eases: tuple[Ease, ...]) -> dict[str, str]:
    """Return the environment variables that tell a rank which steps to skip or ease."""
    told = {
        SKIP: ",".join(f"{s.first}-{s.last}" for s in skips),
        EASE: ",".join(f"{e.factor}:{e.first}-{e.last}" for e in eases),
    }
    return {name: value for name, value in told.items() if value}
