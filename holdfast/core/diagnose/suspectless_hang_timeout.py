"""When to act on a hang in which no rank is named: a rule of costs, since nothing says which node to blame.

If every rank is inside the same collective, the network or a device is at fault, and no rank stands out. Waiting costs
the time of the whole job. A restart costs the start and the steps since the last saved state. Pauses have long tails: a
pause that has lasted for some time will last about as long again. So it pays to wait until the pause has lasted as long
as a restart would cost. The job then loses at most twice what the best choice would have cost.

There are two more limits. Ranks that do not wait for each other may compute, or wait for something outside the job.
They get the longest limit, `last_s`. A collective that times out ends the job anyway, and its watchdogs kill ranks
while other ranks still write to their logs. So the job is stopped just before the timeout, when stacks are at hand.
"""

from collections.abc import Sequence

import msgspec

from holdfast.core.diagnose.blocking_ranks import training_processes
from holdfast.core.diagnose.stack_folding import fold_stack, is_waiting, main_frames
from holdfast.model.rank_traces import Trace

_AHEAD_S = 5.0  # before a timeout: enough to look once more and to stop the ranks
SETTLED_S = 10.0  # without motion: a shorter standstill may be any pause, in which a forgotten collective times out


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """A job that makes no step and in which no rank stands out."""

    quiet_s: float  # half of the ranks or more have moved no frame, read or written nothing, entered no collective
    waits: bool  # half of the ranks or more wait for other ranks
    stepped: bool  # this generation has made a step
    restart_s: float = 0.0  # cost of a restart: the start, and the steps to make again
    usual_s: float = 0.0  # so long a pause of this run may last, since others did and ended by themselves
    expires_s: float | None = None  # until the first collective times out; None: nobody told


def find_reason(stall: Standstill, act_s: float, last_s: float) -> str:
    """Return why the job must be stopped now; "" if waiting is cheaper. `act_s` and `last_s` are the user's limits."""
    settled = stall.waits and stall.quiet_s >= SETTLED_S
    if settled and stall.expires_s is not None and stall.expires_s <= _AHEAD_S:
        return f"a collective times out in {max(0.0, stall.expires_s):.0f} s"
    if stall.waits and stall.quiet_s >= affordable_wait_s(stall.restart_s, stall.usual_s, act_s, last_s):
        cost = f", and a restart costs at most {stall.restart_s:.0f} s" if stall.restart_s < last_s else ""
        return f"nothing has moved for {stall.quiet_s:.0f} s{cost}"
    if stall.stepped and stall.quiet_s >= max(last_s, stall.usual_s):
        return f"nothing has moved for {stall.quiet_s:.0f} s"
    return ""


def affordable_wait_s(restart_s: float, usual_s: float, least_s: float, most_s: float) -> float:
    """Return how long to wait for a job without a step. This is as long as a restart costs, but not more than `most_s`.
    It is never less than `least_s`, nor less than pauses of this run usually last."""
    return max(least_s, min(restart_s, most_s), usual_s)


def do_most_wait(traces: Sequence[Trace]) -> bool:
    """Return whether at least half of the ranks wait for others, by stacks, open collectives or their own report."""
    mains = training_processes(traces)
    stacked = {rank for rank, process in mains.items() if is_waiting(fold_stack(main_frames(process)))}
    flights = [flight for trace in traces for flight in trace.flights]
    inside = {f.rank for f in flights if f.waits or any(group.entered > group.completed for group in f.groups)}
    return bool(mains) and 2 * len(mains.keys() & (stacked | inside)) >= len(mains)


def first_expiry(traces: Sequence[Trace], moved_at: float) -> float | None:
    """Return when the first open collective times out; None if no rank reports one. Collectives that had timed out
    before `moved_at`, when the job last made a step, are ignored."""
    told = [group.expires_at for trace in traces for flight in trace.flights for group in flight.groups]
    return min((at for at in told if at > moved_at), default=None)


def next_look_at(planned_at: float, now: float, expires_at: float | None) -> float:
    """Return when to look again: as planned, or earlier if a collective times out before that."""
    if expires_at is None or expires_at - _AHEAD_S <= now:
        return planned_at
    return min(planned_at, expires_at - _AHEAD_S)
