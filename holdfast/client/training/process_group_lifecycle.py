"""Reports when a script makes and destroys its process group, without any call by the script."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from holdfast.client.training import p2p_counts


def report_groups(on_group: Callable[[], None], on_teardown: Callable[[str], None]) -> None:
    """Wrap torch's group functions, once: call `on_group` when a group was made, `on_teardown` while one is destroyed.

    `on_teardown` gets "parting" while a group is being destroyed, then "parted" if no group is left, else "".
    """
    from torch.distributed import distributed_c10d as c10d

    from holdfast.client.training.process_group_replay import GROUP_CALLS

    p2p_counts.count_messages()
    made, ended, more = c10d.init_process_group, c10d.destroy_process_group, c10d.new_group
    if getattr(made, "tells_holdfast", False):
        return

    @functools.wraps(made)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        group = GROUP_CALLS.init_group(made, args, kwargs)
        if not GROUP_CALLS.rehearses:
            on_teardown("")
            on_group()
        return group

    @functools.wraps(more)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return GROUP_CALLS.new_group(more, args, kwargs)

    @functools.wraps(ended)
    def destroy_process_group(group: Any = None) -> Any:
        on_teardown("parting")
        GROUP_CALLS.forget(group)
        try:
            return ended(group)
        finally:
            on_teardown("" if c10d.is_initialized() else "parted")

    _replace_function("init_process_group", made, init_process_group)
    _replace_function("new_group", more, new_group)
    _replace_function("destroy_process_group", ended, destroy_process_group)


def _replace_function(name: str, plain: Any, telling: Any) -> None:
    """Replace `plain` by `telling`, a function that also reports, in every torch module that holds it."""
    vars(telling)["tells_holdfast"] = True
    for place in ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh"):
        module = sys.modules.get(place)
        if module is not None and vars(module).get(name) is plain:
            vars(module)[name] = telling
