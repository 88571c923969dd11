"""Counts the messages that a rank sends to and receives from other ranks, and notes when it waits in torch.distributed.

Torch's recorder does not record gloo's messages. It numbers NCCL's messages separately in each process, so two ranks
cannot compare the numbers. Both ends of a channel count the same messages only if both count from the first one.
Counting therefore begins before the first process group is made. A call costs a microsecond.
"""

import functools
import sys
from _thread import get_ident
from contextlib import suppress
from typing import Any

ChannelKey = tuple[str, int, bool]  # torch's name of the group, the other's rank in it, whether this rank sends


class MessageCounts:
    def __init__(self) -> None:
        self.posted: dict[ChannelKey, tuple[int, int, int]] = {}  # so many; tag and bytes of the newest
        self.complete = True  # no message was received from whoever sends one
        self.waiting: set[int] = set()  # threads that wait for a collective or a message

    def note_message(self, group: Any, sends: bool, args: tuple[Any, ...]) -> None:
        """Count a call of ProcessGroup.send or recv, whose arguments torch passes by position. After a receive from any
        rank, mark the counts as incomplete."""
        if len(args) != 3:
            self.complete = False
            return
        (tensor, *_), peer, tag = args
        key = (group.group_name, peer, sends)
        known = self.posted.get(key)
        self.posted[key] = (known[0] + 1 if known else 1, tag, tensor.numel() * tensor.element_size())


def find_counts() -> MessageCounts | None:
    """Return the counts of this process; None if it does not count messages."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found = getattr(getattr(getattr(c10d, "ProcessGroup", None), "send", None), "holdfast_counts", None)
    return found if isinstance(found, MessageCounts) else None


def count_messages() -> None:
    """Start counting, if not yet done. Wrap the methods through which all of torch's functions send messages."""
    from torch._C import _distributed_c10d as c10d

    if find_counts() is not None:
        return
    counts = MessageCounts()
    for name, sends in (("send", True), ("recv", False), ("recv_anysource", False)):
        _wrap_message(c10d.ProcessGroup, name, sends, counts)
    _wrap_wait(c10d.Work, counts.waiting)


def _wrap_message(owner: Any, name: str, sends: bool, counts: MessageCounts) -> None:
    plain, note = getattr(owner, name), counts.note_message

    @functools.wraps(plain)
    def told(group: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # torch says what is wrong, not we
            note(group, sends, args)
        return plain(group, *args, **kwargs)

    vars(told)["holdfast_counts"] = counts
    setattr(owner, name, told)


def _wrap_wait(owner: Any, waiting: set[int]) -> None:
    plain = owner.wait

    @functools.wraps(plain)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        me = get_ident()
        waiting.add(me)
        try:
            return plain(work, *args, **kwargs)
        finally:
            waiting.discard(me)

    owner.wait = wait
