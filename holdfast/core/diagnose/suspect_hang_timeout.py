"""When to act on a hang in which ranks are named: at once if the hang cannot end, otherwise once waiting has
cost as much as a restart.

Two kinds of hang never end by themselves. In one kind, ranks of a group are in different operations under one sequence
number. In the other kind, ranks wait in a circle, each in a collective for another of them. The job acts if a second
inspection shows the same hang. If stacks do not confirm a circle, another thread may have entered the collectives. Then
the cost of waiting decides.

A rank that only sleeps, or waits for a lock or a child of its own, may or may not come back. Pauses have long tails, so
the job waits as long as a restart would cost, at least ten seconds and at most `act_s` (`suspectless_hang_timeout.py`
has the rule). The job thus loses at most twice what the best choice would have cost. If the restarted job stands at the
same place again, the restart was no remedy, so the job waits for twice as long.

A rank that may wait for something outside the job gets the full `act_s`, because storage and services do come back. A
rank may wait outside if it reads, polls or is in uninterruptible sleep. It may also if its code saves, evaluates,
compiles, loads or talks to a service, or if nothing is known about it. A rank that computes or spins gets `last_s`.
"""

from collections.abc import Iterator, Sequence

import msgspec

from holdfast.core.diagnose.blocking_ranks import BlockingRanks, training_processes
from holdfast.core.diagnose.stack_folding import fold_stack, is_waiting, is_waiting_for_one, main_frames, shorten_path
from holdfast.core.diagnose.suspectless_hang_timeout import SETTLED_S, affordable_wait_s
from holdfast.model.rank_traces import Process, Thread, Trace

# How the names of kernel functions begin in which a thread waits for nothing but time, a lock, or its own child.
_TIME, _LOCK, _CHILD = ("hrtimer_nanosleep", "do_nanosleep"), ("futex_",), ("do_wait", "kernel_wait")
_UNINTERRUPTIBLE = "D"
_BACKWARD = "torch/autograd/"
# Code that waits for storage or services, retries, or compiles: how the paths of its files begin inside their packages.
_OUTSIDE_FILES = (
    *("socket.py", "ssl.py", "selectors.py", "subprocess.py", "http/", "urllib/", "asyncio/"),
    *("multiprocessing/connection.py", "torch/utils/data/", "torch/utils/file_baton.py", "filelock/"),
    *("torch/serialization.py", "torch/distributed/checkpoint/", "torch/_dynamo/convert_frame.py", "torch/_inductor/"),
    *("triton/", "urllib3/", "requests/", "httpx/", "httpcore/", "aiohttp/", "grpc/", "tenacity/", "backoff/"),
    *("botocore/", "boto3/", "fsspec/", "s3fs/", "gcsfs/", "google/", "huggingface_hub/", "datasets/", "webdataset/"),
)
# How the names of functions begin that may take their time.
_LONG_WORK = (
    *("save", "write", "dump", "checkpoint", "ckpt", "restore", "eval", "valid", "compile", "download", "upload"),
)
ENDLESS = "which cannot end by itself"  # the reason to act on a deadlock, which only code can make
_TRAINING = "train"  # how the name of a phase begins in which steps are made


class NamedStandstill(msgspec.Struct, frozen=True, kw_only=True):
    """A job that makes no step because it waits for ranks that are named."""

    deadlock: str = ""  # as of `BlockingRanks`, if two looks agree
    certain: bool = False  # that it is one
    stood_s: float  # since the last step
    quiet_s: float = 0.0  # the ranks have moved no frame, read or written nothing, entered no collective
    still_s: float = 0.0  # and have used no processor time
    asleep_s: float = 0.0  # and wait for nothing outside the job, while most of the others wait for them
    restart_s: float = 0.0  # cost of a restart: the start, and the steps to make again
    usual_s: float = 0.0  # so long a pause of this run may last, since others did and ended by themselves
    slept_s: float = 0.0  # the same of pauses at this place, in this phase, or in which ranks were asleep
    tried_s: float = 0.0  # after so long the job was restarted when it stood at this place before


class Term(msgspec.Struct, frozen=True):
    """How long a condition has lasted, and how long it may last before the job acts."""

    lasts_s: float
    limit_s: float
    reason: str


def hang_terms(hang: NamedStandstill, act_s: float, last_s: float) -> Iterator[Term]:
    """Yield the conditions of this hang, each with how long it has lasted and its limit. The job acts once one of them
    has reached its limit. `act_s` and `last_s` are the user's limits."""
    if hang.deadlock and hang.certain:
        yield Term(0.0, 0.0, ENDLESS)
    cost_s = max(hang.restart_s, 2 * hang.tried_s)
    rent_s = affordable_wait_s(cost_s, hang.slept_s, min(SETTLED_S, act_s), act_s)
    is_least = rent_s == min(SETTLED_S, act_s) > cost_s
    cost = f"a restart costs at most {hang.restart_s:.0f} s" if hang.restart_s < act_s else ""
    cost = f", the least to wait for a rank that may wake, and {cost}" if is_least else cost and f", and {cost}"
    if hang.deadlock:
        yield Term(hang.quiet_s, rent_s, f"without a move for {hang.quiet_s:.0f} s{cost}")
    yield Term(hang.asleep_s, rent_s, f"without a sign of life for {hang.asleep_s:.0f} s{cost}")
    yield Term(hang.still_s, max(act_s, hang.usual_s), f"without a sign of life for {hang.still_s:.0f} s")
    yield Term(hang.stood_s, max(last_s, hang.usual_s), "which is longer than hang.last_s")


def is_certain_deadlock(named: BlockingRanks, traces: Sequence[Trace], still: bool) -> bool:
    """Return whether the named ranks can never go on: they are in different operations under one sequence number, or
    wait in a circle.

    Stacks must confirm a circle, because records may be of background threads and omit messages: each main thread is in
    a collective. If `still` (nothing moves), it may also be in a backward pass, where gradients are reduced.
    """
    if named.deadlock != "circle":
        return named.deadlock == "operations"  # of a circle in which not all are named, not all were looked at
    mains = training_processes(traces)
    stacks = [fold_stack(main_frames(mains[rank])) if rank in mains else () for rank in named.ranks]
    return all(
        (is_waiting(stack) and not is_waiting_for_one(stack)) or (still and bool(stack) and _BACKWARD in stack[-1])
        for stack in stacks
    )


def sleeps_inside(kernel_function: str) -> bool:
    """Return whether a thread that sleeps in this function of the kernel waits only for a timer, a lock or a child."""
    return kernel_function.startswith((*_TIME, *_LOCK, *_CHILD))


def is_other_phase(phase: str) -> bool:
    """Return whether the script has named the phase and the name does not mean training."""
    return bool(phase) and not phase.lower().startswith(_TRAINING)


def find_outside_waits(traces: Sequence[Trace], phase: str) -> set[int]:
    """Return the ranks that may wait for something outside the job, or are in work that may take long."""
    mains = training_processes(traces)
    if is_other_phase(phase):
        return set(mains)
    below: dict[int, list[Process]] = {}
    for process in (p for trace in traces for p in trace.processes if p is not mains.get(p.rank)):
        below.setdefault(process.rank, []).append(process)
    return {rank for rank, main in mains.items() if _may_wait_outside(main, below.get(rank, []))}


def _may_wait_outside(main: Process, below: list[Process]) -> bool:
    """Return whether a rank may wait for something outside the job, such as a disk. If the main thread waits for a
    lock, all threads are examined. If it waits for a child process, the child is examined as well."""
    if not main_frames(main) or any(process.state == _UNINTERRUPTIBLE for process in (main, *below)):
        return True
    own = next(thread for thread in main.threads if thread.main)
    if not _is_inside(own):
        return True
    if own.sleeps_in.startswith(_LOCK):
        return not all(_is_inside(thread) for thread in main.threads)
    return own.sleeps_in.startswith(_CHILD) and any(_may_wait_outside(child, []) for child in below)


def _is_inside(thread: Thread) -> bool:
    """Return whether a thread waits only for a timer, a lock or a child process, and does no long work."""
    return sleeps_inside(thread.sleeps_in) and not any(
        shorten_path(frame.file).startswith(_OUTSIDE_FILES)
        or frame.function.rpartition(".")[2].lstrip("_").lower().startswith(_LONG_WORK)
        for frame in thread.frames
    )
