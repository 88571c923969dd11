"""Ranks that let children train: a child that is started afresh counts its steps as one that was forked does.

`torch.multiprocessing.spawn` starts interpreters that have imported nothing of ours. They get a note along with what
multiprocessing tells them anyway; to read it is to begin.
"""

import multiprocessing.process
import multiprocessing.spawn
import sys
from typing import Any

from holdfast.linux import process_control

# The environment of a child may lack us: then it does without.
_BEGIN = """
try:
    from holdfast.client.training import spawned_children
    spawned_children.begin_child()
except Exception:
    pass
"""


class SpawnNote:
    """Begins in whoever reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN, {})


def follow_spawns() -> None:
    """Give the note to every child that is started from now on."""
    plain = multiprocessing.spawn.get_preparation_data
    if getattr(plain, "tells_holdfast", False):
        return

    def prepared(name: str) -> dict[str, Any]:
        return {**plain(name), "holdfast": SpawnNote()}

    vars(prepared)["tells_holdfast"] = True
    multiprocessing.spawn.get_preparation_data = prepared


def begin_child() -> None:
    """In a child that has imported nothing yet: once it has what it needs, its steps are counted."""
    process_control.allow_stack_reads()
    plain = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch.optim.optimizer" in sys.modules:  # who needs no torch is not made to wait for it
            from holdfast.client.training import optimizer_hooks
            from holdfast.client.training.progress import here

            here.begin_child()
            optimizer_hooks.install_hooks(here)
        return plain(process, *args, **kwargs)

    multiprocessing.process.BaseProcess._bootstrap = _bootstrap  # type: ignore[attr-defined]
