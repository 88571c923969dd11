"""Makes a forked copy of the zygote into a rank that looks freshly started."""

import os
import sys
from typing import Any, NamedTuple, cast

from holdfast.client.boot import release_import_paths
from holdfast.linux import own_process_settings
from holdfast.linux.regular_files import open_log
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.releases.staged_release import StagedRelease


class RankFiles(NamedTuple):
    """The files a rank starts with, opened before the fork so that a failure can still be reported to the holder."""

    stdin: int
    stdout: int
    stderr: int
    cwd: int

    @classmethod
    def open(cls, request: ForkRank) -> "RankFiles":
        fds: list[int] = []
        try:
            fds.append(own_process_settings.open_input(request.stdin))
            for path in (request.stdout, request.stderr):
                fds.append(open_log(path))
            fds.append(os.open(request.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return cls(*fds)

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def become_rank(request: ForkRank, files: RankFiles, coerced: dict[str, str], preloaded: tuple[str, ...] = ()) -> None:
    """Turn this process into the rank. The zygote's usher is still its parent; `await_holder` waits for the holder."""
    os.setsid()
    for fd, standard in zip(files[:3], (0, 1, 2), strict=True):
        os.dup2(fd, standard)
    os.fchdir(files.cwd)
    files.close()
    os.environ.clear()
    os.environ.update(coerced | request.env)
    own_process_settings.reset_signals()
    if request.root:
        release_import_paths.move_imports(StagedRelease(root=request.root, at=request.staged), preloaded)
    _forget_the_zygote()
    python = [sys.executable, "-u", *(["-m"] if request.module else [])]
    own_process_settings.set_command_line(
        [*python, *request.argv], [f"{name}={value}" for name, value in request.env.items()]
    )
    own_process_settings.allow_stack_reads()


def await_holder(go: int, holder: int) -> None:
    """Wait until this process is a child of `holder`, and let it die with `holder`. `go` is a pipe that says when."""
    if not os.read(go, 1):
        os._exit(127)  # the zygote died before it could tell of us
    os.close(go)
    own_process_settings.die_with_parent(holder, 127)


def _forget_the_zygote() -> None:
    """Reset values that standard modules and numpy cached in the zygote. Other modules are left alone, because each
    changed object costs the rank a copied page of memory. The module `random` reseeds itself after a fork."""
    for path in sys.path:
        finder = sys.path_importer_cache.get(path)
        if finder is not None and hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()
    loaded = cast(dict[str, Any], sys.modules)
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
