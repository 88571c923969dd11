"""Everything the ladder looks at: the cause of an incident, what failed like it before, and what may be done."""

from collections import Counter

import msgspec

from holdfast.core.incident.triage import NOT_STARTED, TIMED_OUT, is_node_proof
from holdfast.core.snapshots.eviction_safety import Bonds
from holdfast.model.alarm import Alarm, Kind

SURE = 0.9  # confidence of last words that stands as proof against a node
TOLD = 0.7  # and that explains a failure; an exit code alone does not
EVICT, CODE, SETTING, EXTERNAL = "evict_and_restart", "rollback_or_fix_code", "fix_config", "wait_external"  # actions
# Classes for want of what a machine has, be it less than the others have. A full disk is none: it may be one that all
# share, and that only the node of rank 0 writes to.
_SCARCE = frozenset({"host_oom_kill"})
_CHANCE = 0.05  # that failures which may come anywhere come twice on one node: below this it is the node
_OFTEN = 10  # times `attempts`: so many failures where more time is lost than the job gets further in, or nobody knows
_WORTH = 10  # a restart was in vain if the job did not get further for a tenth of the time that it took
_GAIN = 2  # times what such failures cost the job gets further between them: better than to wait for a person
_TRIAL_S = 120.0  # to stop, try every node and start again; a failure that has cost more is worth it


class PastFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier failure, as far as the ladder needs it."""

    signature: str
    nodes: tuple[str, ...]
    at: float
    step: int
    counted: bool  # the step was counted by us since launch, not told by the script
    release: int = 0  # that ran
    probed: bool = False  # nodes were tried after it
    replayed: bool = False  # and so was the job's own work
    rolled: bool = False  # the release was given up for it
    hard: bool = False  # it was of a process that was stopped or gone, not of one that others waited for
    trained_s: float = 0.0  # time in which the job had got further, all in all, by then
    lost_s: float = 0.0  # and that it had lost to recoveries and to steps made again


class IncidentCase(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the ladder looks at."""

    cause: Alarm
    step: int  # the last good one
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
    replaceable: bool  # whether the job can do without the suspects
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

    @property
    def recent_failures(self) -> tuple[PastFailure, ...]:
        return tuple(p for p in self.past if p.at > self.since)

    @property
    def is_no_further(self) -> bool:
        """It failed like this before, no earlier in its work.

        Steps that we count begin anew with every launch, so of two counts only equality says something: the same work
        from the same state.
        """
        if self.counted:
            return any(p.counted and p.step == self.step for p in self.past)
        return any(not p.counted and p.step >= self.step for p in self.past)

    @property
    def fruitless_restarts(self) -> int:
        """How often it failed like this before, and the restart was in vain.

        Told steps show how far the job has come. Where we count them since launch, a failure led nowhere if it came
        after the same count as this one, or after less than half of what another launch has made.
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
        """Whether the job has hardly got further since: one step more is no reason to go on like this for ever."""
        return _WORTH * (self.trained_s - past.trained_s) <= self.lost_s - past.lost_s

    @property
    def is_worth_it(self) -> bool:
        """Whether the job gets further between such failures, for longer than they cost; untold steps tell nothing."""
        if self.counted or not self.recent_failures:
            return False
        since = self.recent_failures[0]
        return self.trained_s - since.trained_s >= _GAIN * (self.lost_s - since.lost_s)

    @property
    def is_stuck(self) -> bool:
        """Whether it has failed like this as often as it may."""
        return self.fruitless_restarts >= self.attempts or (self.counted and len(self.past) >= _OFTEN * self.attempts)

    @property
    def is_hopeless(self) -> bool:
        """Whether the job loses more time than it gets further in, and has for long, whatever it is that fails."""
        return self.luckless >= _OFTEN * self.attempts

    @property
    def is_costly(self) -> bool:
        """Whether it has cost more, since nodes were last tried for it, than to try them does."""
        looked = [p for p in self.recent_failures if p.probed or p.replayed]
        since = looked[-1:] or self.recent_failures[:1]
        return bool(since) and self.lost_s - since[0].lost_s >= _TRIAL_S

    @property
    def is_timeout(self) -> bool:
        """Whether a timeout had to be waited for: the next one would cost as much again, and more than to try nodes."""
        return self.cause.klass == TIMED_OUT

    @property
    def is_repeated(self) -> bool:
        """Whether it failed like this under the running release before, or fails without a step in between."""
        return self.rounds > 0 or any(p.release == self.release and p.at > self.since for p in self.past)

    @property
    def is_new(self) -> bool:
        """Whether the running release has failed like this lately, and no other one has."""
        return bool(self.recent_failures) and all(p.release == self.release for p in self.recent_failures)

    @property
    def is_capped(self) -> bool:
        return self.max_restarts is not None and self.restarts >= self.max_restarts

    @property
    def is_proof(self) -> bool:
        """Whether the cause names a machine beyond doubt."""
        cause = self.cause
        told = cause.kind is Kind.CRASH and cause.action == EVICT and cause.confidence >= SURE
        return cause.kind is Kind.SILENCE or is_node_proof(cause) or told

    @property
    def is_guess(self) -> bool:
        """Whether evidence short of proof is all there is; a stopped or missing process is more than that."""
        return not (self.is_proof or self.cause.hard)

    @property
    def is_code(self) -> bool:
        """Whether last words name the user's code."""
        return self.cause.group == "script" or self.cause.action == CODE

    @property
    def is_own_exit(self) -> bool:
        """Whether the process ended by itself with a code of its own, and nothing that it said blames a machine."""
        cause = self.cause
        return cause.kind is Kind.CRASH and cause.code is not None and cause.code > 0 and not cause.klass

    @property
    def follows_the_rank(self) -> bool:
        """Whether others wait for the same ranks again, and these are on other machines now: it is what they do there.

        Rank 0 alone saves and evaluates; whoever has it is waited for, and would be evicted one after the other.
        """
        waited = self.cause.kind in (Kind.HANG, Kind.SLOW) and not self.cause.hard
        return waited and any(not p.hard and set(p.nodes).isdisjoint(self.cause.suspects) for p in self.past)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether it is this one machine that runs short: twice now and nowhere else, or twice among so many nodes.

        Of thousands of nodes two may run short at the same time, each for itself. That failures which strike anywhere
        strike one node twice is as likely as two birthdays on one day. If they struck another one twice before, they
        come with a rank, not with a machine.
        """
        cause, where = self.cause, set(self.cause.suspects)
        told = cause.klass in _SCARCE and (cause.kind is Kind.LINES or cause.confidence >= TOLD)
        here = [set(p.nodes) <= where for p in self.recent_failures]
        elsewhere = Counter(p.nodes for p in self.recent_failures if not set(p.nodes) <= where)
        if max(elsewhere.values(), default=0) > 1:
            return False
        pairs = len(here) * (len(here) + 1) / 2
        return told and any(here) and (all(here) or pairs / self.nodes < _CHANCE)

    @property
    def is_blameless(self) -> bool:
        """Whether a machine may be at fault, and nobody says which."""
        cause = self.cause
        told = cause.action in (CODE, SETTING, EXTERNAL) and cause.confidence >= TOLD
        return not (cause.group == "script" or told) and cause.kind is not Kind.LINES and cause.klass != NOT_STARTED
