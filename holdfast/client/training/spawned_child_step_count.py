"""Counts the optimizer steps of the child processes that a rank spawns.

`torch.multiprocessing.spawn` starts interpreters that have imported nothing of ours. A note is added to the data that
multiprocessing sends them; unpickling the note installs our hooks.
"""

import multiprocessing.process
import multiprocessing.spawn
import sys
from typing import Any

from holdfast.linux import own_process_settings

# The environment of a child may lack us: then it does without.
_BEGIN = """
try:
    from holdfast.client.training import spawned_child_step_count
    spawned_child_step_count.begin_child()
except Exception:
    pass
"""


class SpawnNote:
    """An object that runs begin_child in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_BEGIN, {})


def follow_spawns() -> None:
    """Add the note to the data of every child that is spawned from now on."""
    plain = multiprocessing.spawn.get_preparation_data
    if getattr(plain, "tells_holdfast", False):
        return

    def prepared(name: str) -> dict[str, Any]:
        return {**plain(name), "holdfast": SpawnNote()}

    vars(prepared)["tells_holdfast"] = True
    multiprocessing.spawn.get_preparation_data = prepared


def begin_child() -> None:
    """Install the step count in a spawned child, but only if the child imports torch before its work begins."""
    own_process_settings.allow_stack_reads()
    plain = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        if "torch.optim.optimizer" in sys.modules:  # who needs no torch is not made to wait for it
            from holdfast.client.training import logger_hooks, optimizer_step_count
            from holdfast.client.training.progress import here

            here.begin_child()
            optimizer_step_count.install_hooks(here)
            logger_hooks.follow_loggers(here, is_rank=False)
            follow_spawns()
        return plain(process, *args, **kwargs)

    multiprocessing.process.BaseProcess._bootstrap = _bootstrap  # type: ignore[attr-defined]
