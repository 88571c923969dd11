"""The task of ranks that repeat earlier work in a replay, and their results."""

import msgspec

from holdfast.model.message_bounds import Number


class ReplayTask(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of this replay of this group: it names folders, so it is letters, digits and dashes
    steps: int  # to do
    not_after: int = -1  # the newest checkpoint to begin with; -1: whichever is newest
    ranks: int = 0  # of the group; 0: not told
    job_ranks: int = 0  # of the whole job


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one rank of a replay group."""

    rank: Number  # within the group
    ended: bool  # it did all its steps
    failed: bool = False  # it crashed before that, or stood still
    bad_step: Number = -1  # the first whose loss was not finite
    marks: dict[Number, int] = {}  # what its state hashed to, by step
    signed: dict[Number, int] = {}  # and what it had sent to others by then, where the script signed that
    detail: str = ""
