"""Requested faults, the records of what was done, and the facts that are needed to undo a fault."""

import msgspec


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One requested fault; targets left open are drawn at random. `docs/CHAOS.md` lists the fields of each kind."""

    kind: str
    rank: int | None = None
    node: str = ""
    count: int = 0  # of nodes struck at once, of lines, of bits
    at_step: int = 0  # not before the job has made this step
    after_s: float = 0.0  # nor before so long after the fault before it
    when: str = ""  # "saving", "restoring", "updating": struck in that moment
    for_s: float = 0.0  # undone after so long; 0: when the scenario ends
    overlap: bool = False  # the next one does not wait until the job has come back from this one
    code: int = 0
    error: str = ""  # of an exception: "TypeError: message"
    place: str = ""  # of bits: weights, optimizer, gradients, activations, all_reduce
    bits: str = ""  # sign, exponent, mantissa, any, nan
    chance: float = 0.0  # in every step; 0: once
    share: float = 0.0  # of processor time that is left, of frames that are lost
    delay_s: float = 0.0
    bytes_s: int = 0
    text: str = ""
    reading: str = ""
    value: float = 0.0
    path: str = ""


NEUTRAL = ("kind", "rank", "node", "at_step", "after_s", "when", "for_s", "overlap")  # any fault may have these
MOMENTS = ("", "saving", "restoring", "updating")


def given_fields(fault: InjectedFault) -> list[str]:
    """Return the names of the fields that differ from their defaults."""
    blank = InjectedFault(kind=fault.kind)
    return [name for name in fault.__struct_fields__ if getattr(fault, name) != getattr(blank, name)]


# --- what undoes a fault: plain facts, so that a process which outlives the injector can act on them ------------------


class ContinueProcess(msgspec.Struct, frozen=True, tag="continue"):
    """Undo: let a stopped process continue."""

    pid: int
    started: int


class DutyCycle(msgspec.Struct, frozen=True, tag="duty"):
    """Slow a process by stopping it for a part of every period; the undo lets it continue for good."""

    pid: int
    started: int
    share: float  # of the time in which it may run


class RemoveFile(msgspec.Struct, frozen=True, tag="remove"):
    path: str


class RewriteFile(msgspec.Struct, frozen=True, tag="write"):
    """Undo: write the old text back to a file, if the file still exists."""

    path: str
    text: str


class ForgetEntry(msgspec.Struct, frozen=True, tag="forget"):
    """Undo: remove one entry of a JSON object in a file, if both still exist; other entries stay."""

    path: str
    key: str


class PatchByte(msgspec.Struct, frozen=True, tag="patch"):
    """Undo: write back a byte's old value, unless the file has been replaced or the byte has changed again."""

    path: str
    inode: int
    at: int
    now: int
    then: int


class LeaveCgroup(msgspec.Struct, frozen=True, tag="leave"):
    """Undo: move all processes from chaos's cgroup `group` to the cgroup `back`, and remove `group`."""

    group: str
    back: str


class RemountWritable(msgspec.Struct, frozen=True, tag="writable"):
    """Undo: make a file system writable again. Chaos mounted it in a separate mount namespace."""

    pid: int  # somebody who lives in that namespace
    started: int
    path: str


class FreeDisk(msgspec.Struct, frozen=True, tag="freed"):
    """Undo: delete the file that fills a small file system made by chaos."""

    pid: int
    started: int
    path: str


Undo = (
    ContinueProcess
    | DutyCycle
    | RemoveFile
    | RewriteFile
    | ForgetEntry
    | PatchByte
    | LeaveCgroup
    | RemountWritable
    | FreeDisk
)


# --- RUN_DIR/chaos.jsonl: one line each -------------------------------------------------------------------------------


class GroundTruth(msgspec.Struct, frozen=True, kw_only=True, tag="struck", tag_field="line"):
    """The record of an injected fault, with its targets, its time and the alarms that should follow."""

    id: int
    fault: InjectedFault  # with what was drawn by lot filled in
    at: float
    generation: int
    step: int  # of the job, when it happened
    what: str  # in words
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    alarms: tuple[str, ...] = ()  # one of these kinds should be raised; (): none
    blind: str = ""  # why nobody can see it


class SkippedFault(msgspec.Struct, frozen=True, kw_only=True, tag="skipped", tag_field="line"):
    id: int
    fault: InjectedFault
    at: float
    why: str


class NoticedAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm as the job's journal recorded it."""

    kind: str
    at: float  # when the job heard of it
    suspects: tuple[str, ...]
    ranks: tuple[int, ...]
    stance: str
    reason: str


class FaultResult(msgspec.Struct, frozen=True, kw_only=True, tag="result", tag_field="line"):
    """The job's reaction to one fault: whether it detected, located and recovered from the fault."""

    id: int
    kind: str
    seen: bool | None  # an alarm of the right kind came; None: none was to come
    named: bool | None  # and it named a node that was struck
    seen_s: float | None  # from the strike to the alarm
    back_s: float | None  # and to the next step of the whole job; None: it did not come back in time
    alarms: tuple[NoticedAlarm, ...] = ()
    evicted: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()  # of the incidents that were closed


class UndoRecord(msgspec.Struct, frozen=True, kw_only=True, tag="undone", tag_field="line"):
    id: int
    at: float
    trouble: str = ""


ChaosRecord = GroundTruth | SkippedFault | FaultResult | UndoRecord


class CannotInject(Exception):
    """This fault cannot be injected here; the message is one sentence that says why."""
