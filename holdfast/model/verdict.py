"""What we believe about an incident, and the record of one that is over."""

from enum import StrEnum

import msgspec


class Remedy(StrEnum):
    RESTART = "restart"
    EVICT = "evict"
    PROBE = "probe"  # and judge again by what that finds
    REPLAY = "replay"  # the same
    GIVE_UP = "give up"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    remedy: Remedy
    reason: str
    nodes: tuple[str, ...] = ()  # whom to evict
    level: int = 0  # of the probes
    wait_s: float = 0.0  # before the next launch: somebody outside has to come back
    code: int = 0  # the job's exit code when we give up


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One incident from its last good step to the next step, as the report shows it."""

    number: int
    generation: int  # the generation it ended
    cause: str
    kind: str  # of the first alarm
    klass: str  # of the failure taxonomy, "" where unknown
    verdict: Verdict
    good_step: int  # last step before the trouble, -1: none was made
    good_at: float
    alarm_at: float
    stopped_at: float
    launched_at: float
    resumed_at: float  # first step of the next generation
    resumed_from: int | None  # None: the script restores itself and did not say
    probed_s: float = 0.0  # of the time between stop and launch
    failures: int = 1  # until a step was made again
    echoes: int = 0
    evicted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    suspects: tuple[str, ...] = ()
    sentence: str = ""
