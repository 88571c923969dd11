"""Time limits and counts that bound the decider's choices."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits and counts that bound the decider's choices."""

    stop_grace_s: float = 2.0  # SIGTERM to SIGKILL when an incident stops the ranks
    shutdown_grace_s: float = 30.0  # the same when a person stops the job (torchrun's --shutdown-timeout)
    stop_s: float = 20.0  # a node that has not stopped its ranks this long after the grace is evicted
    launch_s: float = 120.0  # a node that has not started its ranks by then is evicted
    ready_s: float = 300.0  # an acquired node that has not reported by then is given back
    wait_s: float = 600.0  # how long to wait for nodes before giving up
    last_call_s: float = 30.0  # with A:B, how long to wait for more than A
    window_s: float = 1800.0  # the same failure again within this window climbs the ladder
    evictions: int = 0  # nodes that may be evicted within an hour on evidence short of proof; 0: a quarter, at least 8
    attempts: int = 3  # restarts after a failure, or ends of all nodes, that lead no further, before the job gives up
    trial_steps: int = 20  # a new release that fails before it has made so many is the first suspect
    ask_s: float = 0.0  # how long an incident that nobody could solve waits for a person; 0: the job ends at once
    recheck_s: float = 3600.0  # a standby is probed again after so long; 0: only when it comes
    survive_s: float = 5.0  # a rank that survives has so long to leave a broken generation; 0: all ranks are ended
    spares: bool = False  # every rank that survives has a spare one while the job trains, and its model twice in memory
    leave_s: float = 120.0  # so long before the fleet takes a node away, its seat moves; or the job ends with all
