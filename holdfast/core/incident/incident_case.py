"""The case of an incident: its cause, similar past failures, and which remedies are allowed."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.incident.first_cause import NOT_STARTED, TIMED_OUT, is_node_proof, is_switch_loss
from holdfast.core.incident.full_disks import DISK_FULL
from holdfast.core.snapshots.node_eviction_bonds import Bonds
from holdfast.model.detector_alarm import GPU_HANG, MACHINE_LOST, UNNAMED, Alarm, Kind

SURE = 0.9  # confidence of last words that stands as proof against a node
TOLD = 0.7  # and that explains a failure; an exit code alone does not
EVICT, CODE, SETTING, EXTERNAL = "evict_and_restart", "rollback_or_fix_code", "fix_config", "wait_external"  # actions
_ASK, _MACHINES = "run_diagnostics", "infrastructure"
# Classes for want of what a machine has, be it less than the others have. A full disk is none: it may be one that all
# share, and that only the node of rank 0 writes to.
_SCARCE = frozenset({"host_oom_kill"})
_UNREADABLE = frozenset(
    {"SyntaxError", "IndentationError", "TabError"}
)  # what Python says of a script that it cannot read
ALL_IN_DOUBT = "states_in_doubt"  # the class if no state is left that a restart may use
_CHANCE = 0.05  # that failures which may come anywhere come twice on one node: below this it is the node
_OFTEN = 10  # times `attempts`: so many failures where more time is lost than the job gets further in, or nobody knows
_WORTH = 10  # a restart was in vain if the job did not get further for a tenth of the time that it took
_GAIN = 2  # times what such failures cost the job gets further between them: better than to wait for a person
_TRIAL_S = 120.0  # to stop, try every node and start again; a failure that has cost more is worth it


class PastFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier failure, reduced to what the ladder needs."""

    signature: str
    nodes: tuple[str, ...]
    at: float
    step: int
    counted: bool  # the step was counted by us since launch, not told by the script
    release: int = 0  # that ran
    probed: bool = False  # nodes were tried after it
    replayed: bool = False  # and so was the job's own work
    rolled: bool = False  # the release was given up for it
    evicted: bool = False  # its nodes were
    ranks: tuple[int, ...] = ()  # that failed
    hard: bool = False  # it was of a process that was stopped or gone, or of a GPU that surely stood
    reason: str = ""  # of its alarm
    trained_s: float = 0.0  # time in which the job had got further, all in all, by then
    lost_s: float = 0.0  # and that it had lost to recoveries and to steps made again


class IncidentCase(msgspec.Struct, frozen=True, kw_only=True):
    """All facts from which the ladder judges one incident."""

    cause: Alarm
    step: int  # the last good one
    trusted_step: int | None = None  # later states are in doubt; None: none is
    counted: bool
    ever: bool  # whether the job ever made a step
    past: tuple[PastFailure, ...]  # failures with this signature
    since: float  # where the window begins
    trained_s: float = 0.0  # time in which the job has got further, all in all
    lost_s: float = 0.0  # and that it has lost to recoveries and to steps made again
    rounds: int  # failures of this incident before this one, no step between them
    attempts: int
    luckless: int = 0  # failures of whatever kind since which more time was lost than the job got further in
    restarts: int  # so far, without eviction
    max_restarts: int | None
    nodes: int = 1  # that the job runs on
    standbys: int = 0
    checking: tuple[str, ...] = ()  # nodes that may be standbys once their checks have ended
    replaceable: bool  # whether the job can do without the suspects
    seated: tuple[str, ...] = ()  # suspects with ranks; a switch may cut standbys off too
    together: tuple[str, ...] = ()  # nodes of several hosts that fell silent at the same moment
    place: str = ""  # where all of these are, as the fleet says; "": not known
    near: tuple[str, ...] = ()  # nodes with the ranks that are named; suspects may be all of their parallel group
    lost: tuple[str, ...] = ()  # nodes that did not answer
    bonds: Bonds = {}  # between nodes that must not leave at once
    may_probe: bool = False
    may_replay: bool = False
    may_evict: int = 1 << 30  # nodes, on evidence short of proof
    may_lose: int = 1 << 30  # nodes, on whatever evidence
    release: int = 0  # that runs
    back_to: int = 0  # the release before the running one, where that came in lately; 0: none
    trial: bool = False  # the running one has not made its first steps
    mixed: bool = False  # it came in together with other machines
    update: bool = False  # a newer one waits, and will be in the next launch
    skippable: bool = False  # the script asks which batches to leave out
    departed: bool = False  # ranks ended well while the others went on
    elsewhere: bool = False  # ranks of other nodes failed in the very same way, and not because of this failure

    @property
    def is_spike(self) -> bool:
        """Return whether a finite loss stood out. Only an alarm about it has the response that the user chose."""
        return self.cause.response is not None

    @property
    def doubt_clause(self) -> str:
        """Return a clause on the states that are in doubt after a bad loss; "" if steps have no numbers."""
        step = self.cause.not_after if self.trusted_step is None else self.trusted_step
        return "" if self.cause.not_after is None else f"; states after step {step} are in doubt"

    @property
    def awaited_service(self) -> str:
        """Return in words what has to come back before a restart is of use."""
        return "room on the disk" if self.cause.klass == DISK_FULL else "an external service"

    @property
    def recent_failures(self) -> tuple[PastFailure, ...]:
        return tuple(p for p in self.past if p.at > self.since)

    @property
    def is_no_further(self) -> bool:
        """Return whether the job failed like this before at the same step or later.

        If steps are only counted since the launch, the job must have failed at the same count.
        """
        if self.counted:
            return any(p.counted and p.step == self.step for p in self.past)
        return any(not p.counted and p.step >= self.step for p in self.past)

    @property
    def fruitless_restarts(self) -> int:
        """Return after how many of the earlier failures like this one the restart gained nothing.

        If steps are numbered, a restart gained nothing if it trained for too short a time for the time lost. Steps may
        also be counted from the launch only. Then a restart gained nothing if the job failed at the same count as now,
        or before half of the highest count.
        """
        tried = [p for p in self.past if not p.rolled]
        if not self.counted:
            return sum(self.was_in_vain(p) for p in tried)
        most = max((p.step for p in tried if p.counted), default=-1)
        if 2 * self.step >= most and all(p.step != self.step for p in tried):
            return 0
        led_on = [not p.counted or (p.step != self.step and 2 * p.step >= most) for p in reversed(tried)]
        return led_on.index(True) if True in led_on else len(led_on)

    def was_in_vain(self, past: PastFailure) -> bool:
        """Return whether the job has trained for at most a tenth of the time lost since the failure `past`."""
        return _WORTH * (self.trained_s - past.trained_s) <= self.lost_s - past.lost_s

    @property
    def is_worth_it(self) -> bool:
        """Return whether the job trained for at least twice as long as it lost, since the oldest recent failure like
        this one. Return False if steps have no numbers."""
        if self.counted or not self.recent_failures:
            return False
        since = self.recent_failures[0]
        return self.trained_s - since.trained_s >= _GAIN * (self.lost_s - since.lost_s)

    @property
    def is_stuck(self) -> bool:
        """Return whether the job has failed like this as often as allowed without getting further."""
        return self.fruitless_restarts >= self.attempts or (self.counted and len(self.past) >= _OFTEN * self.attempts)

    @property
    def is_hopeless(self) -> bool:
        """Return whether failures of any kind have long cost the job more time than it gained between them."""
        return self.luckless >= _OFTEN * self.attempts

    @property
    def is_costly(self) -> bool:
        """Return whether failures like this have cost more than a probe, since the last probe or replay."""
        looked = [p for p in self.recent_failures if p.probed or p.replayed]
        since = looked[-1:] or self.recent_failures[:1]
        return bool(since) and self.lost_s - since[0].lost_s >= _TRIAL_S

    @property
    def is_timeout(self) -> bool:
        """Return whether a collective timed out. One more timeout would cost more than a probe of the nodes."""
        return self.cause.klass == TIMED_OUT

    @property
    def is_unnamed_hang(self) -> bool:
        """Return whether the job stood still and no rank is named. One more such hang would cost as much again."""
        return self.cause.signature == UNNAMED

    @property
    def is_switch(self) -> bool:
        """Return whether several machines lost their links together."""
        return is_switch_loss(self.cause)

    @property
    def is_unwitnessed(self) -> bool:
        """Return whether only the rank itself reports a fault of a machine. A probe can confirm the fault."""
        return is_unwitnessed_fault(self.cause)

    @property
    def is_repeated(self) -> bool:
        """Return whether the running release failed like this before, or failed again within this incident."""
        return self.rounds > 0 or any(p.release == self.release and p.at > self.since for p in self.past)

    @property
    def is_new(self) -> bool:
        """Return whether only the running release has failed like this recently, and no other release."""
        return bool(self.recent_failures) and all(p.release == self.release for p in self.recent_failures)

    @property
    def is_capped(self) -> bool:
        return self.max_restarts is not None and self.restarts >= self.max_restarts

    @property
    def is_proof(self) -> bool:
        """Return whether the cause names a node beyond doubt."""
        return self.cause.kind is Kind.SILENCE or is_machine_proof(self.cause)

    @property
    def is_witnessed(self) -> bool:
        """Return whether a witness saw the cause, and not only ranks. A change of code would then not prevent it."""
        return self.is_proof or self.is_switch

    @property
    def is_guess(self) -> bool:
        """Return whether the evidence against nodes is no proof. A stopped or missing process is proof."""
        return not (self.is_proof or self.cause.hard)

    @property
    def is_code(self) -> bool:
        """Return whether the failure's class or recommended action blames the user's code."""
        return self.cause.group == "script" or self.cause.action == CODE

    @property
    def is_setting(self) -> bool:
        """Return whether the failure message says that a setting or a file must change. A message of low confidence is
        enough if it blames no machine and an earlier failure had the same message."""
        cause = self.cause
        again = cause.group != _MACHINES and any(p.reason == cause.reason for p in self.recent_failures)
        return cause.action == SETTING and cause.kind is Kind.CRASH and (cause.confidence >= TOLD or again)

    @property
    def is_certain(self) -> bool:
        """Return whether a script that failed at its start would fail the same way again. That is so if its code does
        not parse, if nothing known explains its exit, or if a setting must change. A missing file does not count,
        because another rank may be making the file."""
        cause = self.cause
        return (
            cause.raised in _UNREADABLE
            or not cause.klass
            or (cause.action == SETTING and cause.klass != "file_not_found")
        )

    @property
    def is_own_exit(self) -> bool:
        """Return whether the process exited with an error code of its own and its log shows no known failure class."""
        cause = self.cause
        return cause.kind is Kind.CRASH and cause.code is not None and cause.code > 0 and not cause.klass

    @property
    def follows_the_rank(self) -> bool:
        """Return whether a rank and not its node causes a hang or slowness, because other nodes had it before.

        For example, rank 0 alone saves and evaluates. Without this test, each node that gets rank 0 would be evicted. A
        stuck GPU is proof against its machine only the first time. A GPU that gets stuck on another node points to the
        code.
        """
        on_gpu = self.cause.signature.startswith(GPU_HANG)
        waited = self.cause.kind in (Kind.HANG, Kind.SLOW) and (on_gpu or not self.cause.hard)
        like = [p for p in self.past if on_gpu or not p.hard]
        return waited and any(set(p.nodes).isdisjoint(self.cause.suspects) for p in like)

    @property
    def evicted_before(self) -> tuple[str, ...]:
        """Return other nodes that were evicted when this rank failed like this before; () if there are none. If there
        are any, the rank causes the failure, not its node."""
        ranks, nodes = set(self.cause.ranks), set(self.cause.suspects)
        gone = (
            p.nodes for p in self.recent_failures if p.evicted and ranks & set(p.ranks) and nodes.isdisjoint(p.nodes)
        )
        return next(gone, ())

    @property
    def is_short_of_memory(self) -> bool:
        """Return whether this node runs short of memory by itself: it ran short before, and more often than by chance.
        If another node also ran short twice, the shortage moves with a rank and not with a machine."""
        cause, where = self.cause, set(self.cause.suspects)
        told = cause.klass in _SCARCE and (cause.kind is Kind.LINES or cause.confidence >= TOLD)
        elsewhere = Counter(p.nodes for p in self.recent_failures if not set(p.nodes) <= where)
        return told and self.is_nodes_own and max(elsewhere.values(), default=0) < 2

    @property
    def is_nodes_own(self) -> bool:
        """Return whether these nodes cause such failures: all recent ones were on them, or such failures are too few to
        strike a node twice by chance. A bug may strike any node, and with few nodes it soon strikes one twice. A
        failure that strikes several nodes at once, such as a loss of storage, is caused by none of them."""
        if self.elsewhere:
            return False
        here = [bool(set(p.nodes).intersection(self.cause.suspects)) for p in self.recent_failures]
        pairs = len(here) * (len(here) + 1) / 2
        return any(here) and (all(here) or pairs / self.nodes < _CHANCE)

    @property
    def shared_with(self) -> tuple[str, ...]:
        """Return the other nodes that failed like this recently; () if chance cannot explain these failures."""
        nodes, here = {node for p in self.recent_failures for node in p.nodes}, set(self.cause.suspects)
        return tuple(sorted(nodes - here)) if nodes & here and not self.is_nodes_own else ()

    @property
    def is_blameless(self) -> bool:
        """Return whether no script, setting, service or switch explains the failure, so a machine may be at fault."""
        cause = self.cause
        told = cause.action in (CODE, SETTING, EXTERNAL) and cause.confidence >= TOLD
        known = cause.group == "script" or told or self.is_setting or self.is_switch
        return not known and cause.kind is not Kind.LINES and cause.klass != NOT_STARTED


def is_unwitnessed_fault(alarm: Alarm) -> bool:
    """Return whether only a rank's log reports a machine fault, without a witness. A script can print anything."""
    told = alarm.kind is Kind.CRASH and alarm.action == _ASK and alarm.confidence >= TOLD
    return told and alarm.group == _MACHINES


def is_machine_proof(alarm: Alarm) -> bool:
    """Return whether the alarm proves a machine bad: a witness saw the fault, or the rank's log is beyond doubt."""
    told = alarm.kind is Kind.CRASH and alarm.action == EVICT and alarm.confidence >= SURE
    return is_node_proof(alarm) or told or alarm.signature == MACHINE_LOST


def machine_faults(cause: Alarm, found: Mapping[str, str], leaving: Iterable[str]) -> dict[str, str]:
    """Return the fault of each leaving node whose machine is known to be bad; leave out all other nodes.

    A machine is known to be bad if the cause proves it, or if a probe or replay found it (`found`). Other evictions
    prove nothing about a machine. A silent host may have lost its network or power, and come back. Stacks name ranks,
    and for a whole parallel group all its nodes are suspects. A script may fail on one node alone. The examination
    after an eviction may still find a fault.
    """
    proven = dict.fromkeys(cause.suspects, cause.reason) if is_machine_proof(cause) else {}
    known = proven | dict(found)
    return {node: known[node] for node in leaving if node in known}
