"""Triage of the alarms of one incident: which alarm is the first cause, and which are only echoes of it."""

import msgspec

from holdfast.model.decider_events import Outcome
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind
from holdfast.model.job_and_seats import Seat

TIMED_OUT = "nccl_timeout"
# Classes that a rank shows because another one failed, and what happened to the rank itself.
ECHOES = {
    "peer_connection_lost": "lost its peer",
    TIMED_OUT: "waited for its peers in vain",
    "preempted_cancelled": "was told to stop",
}
_NCCL_ERROR = "nccl_init_config"  # NCCL's general error, whatever happened to it
_NO_ROOM = ("No space left on device", "Disk quota exceeded")  # in the words of an OSError
NOT_STARTED = "dns_ssh_launch"  # the taxonomy's class for a node on which ranks could not be started

# A silence alarm is dated at the last word heard, up to one beat before the death itself: a crash counts as earlier
# than the silence only by more than that.
_NOTICE_S = 1.0
_ABORTED = -6
_SURE = 0.7  # confidence of a class that explains a failure
# Classes of errors that a rank makes by itself. A file that is missing or damaged is none: a rank that failed may have
# been writing it. Of other exceptions only the types count that Python raises for what the code itself does: a library
# tells the loss of a peer by a RuntimeError, an OSError or a type of its own. What the script's own code raises counts
# whatever its type.
_OWN_CLASSES = frozenset(
    {"gpu_oom", "cuda_device_assert", "shape_dtype_device", "import_dependency", "config_argument", "permission_denied"}
)
_EXCEPTION = "python_exception"
_RAISED_CLASSES = frozenset({_EXCEPTION, "framework_runtime_error", "data_corrupt", *_OWN_CLASSES})
_OWN_ERRORS = frozenset(
    "AssertionError AttributeError FloatingPointError IndexError KeyError NameError NotImplementedError OverflowError "
    "RecursionError TypeError UnboundLocalError UnicodeDecodeError ValueError ZeroDivisionError".split()
)


def is_echo(alarm: Alarm) -> bool:
    return alarm.klass in ECHOES


def with_word(alarm: Alarm, word: str) -> Alarm:
    """Return the alarm of a silence with what the node's fleet says of it, unless the alarm tells it already."""
    word = word.rstrip(".")
    if not word or word in alarm.reason or alarm.evidence:
        return alarm
    return msgspec.structs.replace(alarm, reason=f"{alarm.reason} (its fleet says: {word})", evidence=(word,))


def is_killed(alarm: Alarm) -> bool:
    """Return whether a signal killed the rank. An abort that only shows the failure of another rank does not count: a
    library may abort a rank that lost a peer."""
    return alarm.kind is Kind.CRASH and alarm.code is not None and alarm.code < 0 and not is_echo(alarm)


def list_other_causes(cause: Alarm, alarms: list[Alarm]) -> list[Alarm]:
    """Return the alarms of a round that show other causes beside the first: whatever no failure elsewhere brings about.

    These are other nodes that are lost, ranks on other nodes than these that a signal killed, and errors that a rank
    makes by itself. An error that another failure may have brought about is left out, even if no catalog knows it.
    """
    lost: dict[tuple[str, ...], Alarm] = {}
    for alarm in alarms:
        if is_node_loss(alarm) and set(alarm.suspects).isdisjoint(cause.suspects):
            lost.setdefault(alarm.suspects, alarm)
    nodes = {node for names in lost for node in names}
    killed = [a for a in list_killed(cause, alarms) if nodes.isdisjoint(a.suspects)]
    raised: dict[tuple[str, str], Alarm] = {}
    for alarm in sorted((a for a in alarms if a is not cause and _is_own_error(a)), key=lambda a: (a.at, a.ranks)):
        error = (alarm.signature, alarm.raised)
        if error != (cause.signature, cause.raised) and nodes.isdisjoint(alarm.suspects):
            raised.setdefault(error, alarm)  # the same error at the same place is no further cause
    if is_node_loss(cause):
        raised = {error: a for error, a in raised.items() if set(a.suspects).isdisjoint(cause.suspects)}
    return [*lost.values(), *killed, *raised.values()]


def _is_own_error(alarm: Alarm) -> bool:
    """Return whether the rank failed by an error that no other rank's failure brings about."""
    if alarm.kind is not Kind.CRASH or is_echo(alarm) or not alarm.alone:
        return False
    if alarm.own and alarm.klass in _RAISED_CLASSES:
        return True
    if alarm.confidence < _SURE:
        return False
    return alarm.klass in _OWN_CLASSES or (alarm.klass == _EXCEPTION and alarm.raised in _OWN_ERRORS)


def list_killed(cause: Alarm, alarms: list[Alarm]) -> list[Alarm]:
    """Return the alarms about killed ranks, without the cause.

    Leave out an aborted rank whose alarm has another signature than the cause. If the cause is no crash, also leave out
    ranks on the nodes that the cause names.
    """
    told = [a for a in alarms if a is not cause and is_killed(a) and not set(a.ranks) <= set(cause.ranks)]
    if cause.kind is not Kind.CRASH:
        told = [a for a in told if set(a.suspects).isdisjoint(cause.suspects)]
    return [a for a in told if a.code != _ABORTED or a.signature == cause.signature]


def list_alike(cause: Alarm, alarms: list[Alarm]) -> list[Alarm]:
    """Return the alarms about other ranks that raised the same error as the cause, at the same place."""
    if cause.kind is not Kind.CRASH or not cause.raised or is_echo(cause):
        return []
    same = (a for a in alarms if (a.kind, a.raised, a.signature) == (cause.kind, cause.raised, cause.signature))
    return [alarm for alarm in same if not set(alarm.ranks) <= set(cause.ranks)]


def add_alike(causes: list[Alarm], alarms: list[Alarm]) -> list[Alarm]:
    """Return these causes, and the alarms about other ranks that raised the same as one of them."""
    return [*causes, *(alike for cause in causes for alike in list_alike(cause, alarms))]


def is_told_elsewhere(cause: Alarm, alarms: list[Alarm]) -> bool:
    """Return whether ranks on other nodes crashed with the same error as the cause. Ranks that a signal killed do not
    count, because they leave no error."""
    if cause.kind is not Kind.CRASH or is_echo(cause) or is_killed(cause):
        return False
    alike = (a for a in alarms if a.kind is Kind.CRASH and a.signature == cause.signature and a.reason == cause.reason)
    return any(set(a.suspects).isdisjoint(cause.suspects) for a in alike)


def is_node_proof(alarm: Alarm) -> bool:
    """Return whether the alarm is proof against a machine, whichever generation runs there."""
    return alarm.hard and alarm.kind in (Kind.HEALTH, Kind.LINES, Kind.REPLICA) and not is_switch_loss(alarm)


def is_switch_loss(alarm: Alarm) -> bool:
    """Return whether several machines lost their links together, which is no fault of any of them."""
    return alarm.signature == SWITCH


def is_node_loss(alarm: Alarm) -> bool:
    """Return whether the alarm means the loss of a machine: the machine is silent, or there is proof against it."""
    return alarm.kind is Kind.SILENCE or is_node_proof(alarm)


def first_cause(alarms: list[Alarm]) -> Alarm:
    """Return the alarm that shows the first cause. Usually this is the earliest alarm that is no echo (no mere sign of
    another failure).

    An alarm that proves a machine bad comes first, even if it is late. Neighbours of a vanished node report closed
    connections before the silence detector reports the node. The gauges of a bad machine are read only after its ranks
    fail.

    A rank whose collective timed out closes its connections. Another rank may then fail with a general NCCL error, and
    end first. So after a timeout such errors are no causes.
    """
    timed_out = any(a.klass == TIMED_OUT for a in alarms)
    told = [a for a in alarms if not is_echo(a) and not (timed_out and a.klass == _NCCL_ERROR)]
    told = told or [a for a in alarms if a.klass == TIMED_OUT] or alarms
    causes = [a for a in alarms if is_node_proof(a) or is_switch_loss(a)] or told
    first = min(causes, key=lambda a: (a.at, a.ranks))
    if first.kind in (Kind.LOSS, Kind.REDONE):  # the earliest step counts: by the next sum all others have it too
        first = min((a for a in causes if a.kind is first.kind), key=_spoilt_at)
    silences = [a for a in causes if a.kind is Kind.SILENCE]
    if not silences:
        return first
    silence = min(silences, key=lambda a: (a.at, a.suspects))
    return first if first.at < silence.at - _NOTICE_S else silence


def _spoilt_at(alarm: Alarm) -> tuple[float, float, tuple[int, ...]]:
    return (float("inf") if alarm.not_after is None else alarm.not_after), alarm.at, alarm.ranks


def launch_alarm(now: float, event: Outcome, generation: int, seats: tuple[Seat, ...]) -> Alarm:
    """Return the alarm for a failed launch: a crash on the nodes that failed or, if these are unknown, on all."""
    words = "; ".join(sorted(set(event.failed.values()))) or event.detail or "no reason given"
    alarm = Alarm(
        kind=Kind.CRASH,
        at=now,
        suspects=tuple(sorted(event.failed)) or tuple(seat.node for seat in seats),
        generation=generation,
        klass=NOT_STARTED,
        group="infrastructure",
        reason=f"could not start ranks ({words})",
        signature=f"launch {words}",
    )
    if not any(sign in words for sign in _NO_ROOM):
        return alarm
    # Room comes back as a service does: whoever may free it is waited for, longer each time.
    full = {"klass": "disk_full", "group": "data_storage", "action": "wait_external", "confidence": 1.0}
    return msgspec.structs.replace(alarm, **full)
