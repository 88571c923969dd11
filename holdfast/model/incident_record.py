"""The verdict on an incident, and the records of finished incidents and planned restarts."""

from enum import StrEnum

import msgspec

from holdfast.model.loss_response import Ease, Skip

HELD = "held by "  # how the reason of a planned restart begins that a person's hold led to


class Remedy(StrEnum):
    RESTART = "restart"
    EVICT = "evict"
    PROBE = "probe"  # and judge again by what that finds
    REPLAY = "replay"  # the same
    ROLLBACK = "rollback"  # to the release before
    SKIP = "skip"  # restart, and leave batches out or ease the learning rate
    GIVE_UP = "give up"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    remedy: Remedy
    reason: str
    nodes: tuple[str, ...] = ()  # whom to evict
    level: int = 0  # of the probes
    least: float = 0.0  # as in Probe
    wait_s: float = 0.0  # before the next launch: somebody outside has to come back
    code: int = 0  # the job's exit code when we give up
    guess: bool = False  # nodes go on evidence short of proof
    to: int = 0  # the release to go back to
    skips: tuple[Skip, ...] = ()
    eases: tuple[Ease, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one incident, from the last step before it to the first step after it."""

    number: int
    generation: int  # the generation it ended
    cause: str
    kind: str  # of the first alarm
    last_kind: str = ""  # of what the verdict is on, where there were several failures; "": journals did not tell
    last_cause: str = ""  # and what that was, if it was another one than the first
    causes: tuple[str, ...] = ()  # what each failure was, where there were several; (): one, or journals did not tell
    klass: str  # of the failure taxonomy, "" where unknown
    verdict: Verdict
    good_step: int  # last step before the trouble, -1: none was made
    good_at: float  # of that step; later if no controller was there until then, or ranks did something else or stood
    alarm_at: float
    stopped_at: float
    launched_at: float
    resumed_at: float  # first step of the next generation
    resumed_from: int | None  # None: it is not known what the script went on from
    probed_s: float = 0.0  # of the time between stop and launch
    asked_s: float = 0.0  # after that a person was asked for so long
    held_s: float = 0.0  # and for so long a person held the job, which the failure did not cost
    failures: int = 1  # until a step was made again
    echoes: int = 0
    evicted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    ordered: dict[str, str] = {}  # of the evicted nodes, those that a person or the fleet wanted gone, and how
    fleet_said: dict[str, str] = {}  # of the evicted nodes, those whose end the fleet could not see, and why
    passed: tuple[str, ...] = ()  # of the admitted nodes, those that were evicted again before a step was made
    ranks: tuple[int, ...] = ()
    suspects: tuple[str, ...] = ()
    grouped_at: float = 0.0  # when ranks of the next generation had their process groups; 0: nobody told
    restoring_at: float = 0.0  # when they began to restore their state
    restored_at: float = 0.0  # and when they had it
    set_up_at: float = 0.0  # until when one was seen to set itself up, before its training loop; 0: nobody knows
    rolled_back: int = 0  # the release that was given up for it
    brought_in: int = 0  # the release that had waited for a restart, and came in with one of this incident
    counted: bool = False  # its last good step is a count since the launch, and nobody knows where that began
    skipped: tuple[Skip, ...] = ()
    untold: bool = False  # ranks ran without a controller, and nobody said which step they came to
    disks: int = 0  # nodes from whose disks it went on
    apart: str = ""  # which step was held in memory for which rank, if none was for all
    label: str = ""  # what its cost is booked as; "": its class or kind
    made_step: int = -1  # the last step that ranks made, where steps after the last good one are in doubt
    again_at: float = 0.0  # when the last failure was heard of, where there were several, or the last pause was over
    earlier_s: dict[str, float] = {}  # what was done between the first failure and that one, by phase
    paused: bool = False  # ranks were being ended for a planned restart when the first failure was heard of
    silent_at: float = 0.0  # when the lost node counted as silent, where ranks were stopped before; 0: they were not
    ordered_at: float = 0.0  # when the launch was ordered that led to a step; 0: not known
    stepped_at: float = 0.0  # when the last good step was made, where time is lost only since later; 0: since then
    kept: int = 0  # ranks that went on in their processes at the last launch
    renewed: int = 0  # and those that got new ones then, if any went on
    short: str = ""  # of how many nodes the job then used how many, if it went on with the same batch on fewer
    sentence: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a planned restart: for a release, for a person, or to grow the job."""

    why: str
    generation: int  # the one it ended
    release: int  # that runs now
    good_step: int
    good_at: float
    asked_at: float
    stopped_at: float
    launched_at: float
    resumed_at: float
    resumed_from: int | None
    first_asked_at: float = 0.0  # where it replaced others before they came to a step: when the first was asked for
    earlier_s: dict[str, float] = {}  # what was done for those others, by phase
    held_s: float = 0.0  # between stop and launch a person let it wait so long
    grouped_at: float = 0.0
    restoring_at: float = 0.0
    restored_at: float = 0.0
    set_up_at: float = 0.0
    evicted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    counted: bool = False
    brought_in: int = 0  # a release that came in with it, although the restart was for something else
    ordered_at: float = 0.0  # as in Record
    failed: bool = False  # its ranks made no step: it ended where an incident began
    apart: str = ""  # as in Record
    kept: int = 0  # as in Record
    renewed: int = 0
    short: str = ""
    sentence: str = ""


def is_given_up(record: Record | Change) -> bool:
    """Return whether the job ended because nothing was left to try."""
    return isinstance(record, Record) and record.verdict.remedy is Remedy.GIVE_UP
