"""Records the calls by which a script made its process groups, so that the same groups can be made again.

A rank that replaces a dead one runs the script up to the function that survives, while the survivors are already in
that function. Until it joins them, its groups are fake: they have the right size, and every collective returns at once.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from holdfast.wire.progress_environment import PATIENCE, REHEARSAL

_BACKEND_ARGUMENT = 2  # of new_group
# With these, torch lets this process live when another one of its groups dies. Its watchdog then neither ends the
# process nor aborts what GPUs do; it does not sleep for four times 15 s, for which leaving a group would wait; and no
# monitor ends the process eight minutes later, because a watchdog once asked for a dump.
_LENIENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class GroupCall(NamedTuple):
    """One call of torch that made a group."""

    make: Callable[..., Any]  # torch's own function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group: Any  # what came of it


class GroupCalls:
    """The calls by which the script has made its process groups, in order. The first call made the default group."""

    def __init__(self) -> None:
        self.made: list[GroupCall] = []
        self.steps_aside = False  # whether steps are a rehearsal
        self.lenient = False  # whether torch lets this process live when another one of its groups dies

    @property
    def rehearses(self) -> bool:
        """Return whether this process's groups are fake until it joins the survivors."""
        return bool(os.environ.get(REHEARSAL))

    @contextmanager
    def rehearsed_step(self) -> Iterator[None]:
        """Treat the steps of optimizers in this block as a rehearsal; they are not counted."""
        self.steps_aside = True
        try:
            yield
        finally:
            self.steps_aside = False

    def init_group(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call torch's init_process_group, or make a fake group in its place, and record the call."""
        self.made.clear()
        if float(os.environ.get(PATIENCE, "0")) and _names_survival():
            self.be_lenient()
        if self.rehearses:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            made = plain("fake", store=FakeStore(), rank=rank, world_size=world)
        else:
            made = plain(*args, **kwargs)
        self.made.append(GroupCall(plain, args, kwargs, dist.group.WORLD))
        return made

    def be_lenient(self) -> None:
        """Let groups that are made from now on outlive the failure of another rank."""
        os.environ.update(_LENIENT)
        self.lenient = True

    def new_group(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call torch's new_group, or make a fake group in its place, and record the call."""
        if not self.rehearses:
            group = plain(*args, **kwargs)
        elif len(args) > _BACKEND_ARGUMENT:
            group = plain(*args[:_BACKEND_ARGUMENT], "fake", *args[_BACKEND_ARGUMENT + 1 :], **kwargs)
        else:
            group = plain(*args, **{**kwargs, "backend": "fake"})
        self.made.append(GroupCall(plain, args, kwargs, group))
        return group

    def forget(self, group: Any) -> None:
        """Forget a group that is about to be destroyed; None or the default group means all groups."""
        whole = group is None or group is dist.group.WORLD
        self.made[:] = [] if whole else [call for call in self.made if call.group is not group]

    def make_again(self, made: list[GroupCall], *, alone: bool = False) -> dict[Any, Any]:
        """Repeat these calls, over the store that the environment now names. Return a map from old groups to new ones.
        With `alone`, the new groups have this process only; then none of the old ones may be a group of some ranks."""
        self.made.clear()
        for call in made:
            args, kwargs = call.args, call.kwargs
            if alone and call is made[0]:
                args = args[:1]
                kwargs = {name: value for name, value in kwargs.items() if name != "init_method"}
                kwargs |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            group = call.make(*args, **kwargs)
            self.made.append(call._replace(group=group or dist.group.WORLD))
        return {old.group: new.group for old, new in zip(made, self.made, strict=True)}


def _names_survival() -> bool:
    """Return whether code on the call stack names `survive`; such code makes groups before it calls `survive`."""
    return any("survive" in frame.f_code.co_names for frame, _ in traceback.walk_stack(None))


def list_groups(made: list[GroupCall]) -> list[Any]:
    """Return the groups of which this rank is a member."""
    return [call.group for call in made if call.group is not dist.GroupMember.NON_GROUP_MEMBER]


GROUP_CALLS = GroupCalls()
