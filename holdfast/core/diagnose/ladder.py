"""The ladder: from the first cause of an incident to a verdict, cheapest remedy first, every rung bounded."""

import msgspec

from holdfast.core import story
from holdfast.core.triage import NOT_STARTED, is_echo, names_node
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.verdict import Remedy, Verdict

GAVE_UP = 93  # exit code: do not requeue


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier failure, as far as the ladder needs it."""

    signature: str
    nodes: tuple[str, ...]
    at: float
    step: int
    counted: bool  # the step was counted by us since launch, not told by the script


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the ladder looks at."""

    cause: Alarm
    step: int  # the last good one
    counted: bool
    ever: bool  # whether the job ever made a step
    past: tuple[Past, ...]  # failures with this signature
    since: float  # where the window begins
    further_at: float  # when the job last got further than ever, by told steps
    rounds: int  # failures of this incident before this one, no step between them
    attempts: int
    restarts: int  # so far, without eviction
    max_restarts: int | None
    standbys: int = 0
    replaceable: bool  # whether the job can do without the suspects

    @property
    def recent(self) -> tuple[Past, ...]:
        return tuple(p for p in self.past if p.at > self.since)

    @property
    def no_further(self) -> bool:
        """It failed like this before, no earlier in its work.

        Steps that we count begin anew with every launch, so of two counts only equality says something: the same work
        from the same state.
        """
        if self.counted:
            return any(p.counted and p.step == self.step for p in self.past)
        return any(not p.counted and p.step >= self.step for p in self.past)

    @property
    def fruitless(self) -> int:
        """How often it failed like this before, since the job last got further than ever.

        Told steps need no window, for they show progress whenever it comes; where we count, all within it are taken.
        """
        return len(self.recent) if self.counted else sum(p.at > self.further_at for p in self.past)

    @property
    def capped(self) -> bool:
        return self.max_restarts is not None and self.restarts >= self.max_restarts


def judge(case: Case) -> Verdict:
    cause = case.cause
    where = ", ".join(cause.suspects)
    if cause.kind is Kind.SILENCE:
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} {cause.reason}: evicted")
    if names_node(cause) and case.replaceable:
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} {cause.reason}: evicted")
    # With a cap given the user has said how often to try; without one the ledger says when trying is pointless.
    if case.max_restarts is None and case.rounds >= case.attempts:
        return _give_up(f"{case.rounds + 1} failures in a row without a step between them")
    if cause.kind is Kind.LOSS:
        return _loss(case)
    if names_node(cause):
        return _kept(case)
    if cause.kind is Kind.REPLICA:
        return _differ(case)
    if cause.kind is Kind.LINES:
        return _setup(case)
    if cause.kind in (Kind.HANG, Kind.SLOW) and case.replaceable and case.standbys >= len(cause.suspects):
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{story.cause(cause)}: evicted {where}")
    if cause.group == "script":
        return _user_code(case)
    if case.replaceable and cause.klass == NOT_STARTED:
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} could not start its ranks: evicted")
    # An echo names a node that lost its peer, which is no reason to blame it however often it happens.
    if case.replaceable and not is_echo(cause) and any(set(p.nodes) & set(cause.suspects) for p in case.recent):
        reason = f"the same failure on {where} again within the window: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=reason)
    if case.capped:
        return _capped(case)
    if case.max_restarts is None and case.fruitless >= case.attempts:
        return _give_up(f"the same failure {case.fruitless + 1} times without getting further")
    return Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place")


def _user_code(case: Case) -> Verdict:
    """A bug in the user's code never costs a node."""
    if case.capped:
        return _capped(case)
    if not case.ever:
        return _give_up("the script failed before its first step; a restart would fail the same way")
    if case.no_further or (case.counted and len(case.recent) >= case.attempts):
        return _give_up("the script failed the same way again without getting further")
    return Verdict(remedy=Remedy.RESTART, reason="the script raised, after steps were made: restarted in place")


def _kept(case: Case) -> Verdict:
    """A bad node that nobody can replace may still do for a while."""
    if case.capped:
        return _capped(case)
    if case.recent:
        return _give_up("the same again on a node that cannot be replaced")
    return Verdict(remedy=Remedy.RESTART, reason="nobody can take its place: restarted in place")


def _differ(case: Case) -> Verdict:
    """Replicas disagree and there is no majority: whose fault it was shows if it comes again and one more can say."""
    if case.capped:
        return _capped(case)
    if case.max_restarts is None and case.fruitless >= case.attempts:
        return _give_up(f"replicas differed {case.fruitless + 1} times without getting further, and nobody can say why")
    return Verdict(remedy=Remedy.RESTART, reason="nobody can be named: restarted in place from where they were equal")


def _setup(case: Case) -> Verdict:
    """Something is to be set otherwise, such as how much memory is used: never a node's fault."""
    if case.capped:
        return _capped(case)
    if case.no_further or len(case.recent) >= case.attempts:
        return _give_up("the same again without getting further")
    return Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place")


def _loss(case: Case) -> Verdict:
    """It names the rank that told of it first, which is no evidence against its node: they all share the loss."""
    if case.capped:
        return _capped(case)
    if case.max_restarts is None and case.fruitless >= case.attempts:
        what = "stood out" if case.cause.signature.startswith("spike") else "was not finite"
        return _give_up(f"the loss {what} {case.fruitless + 1} times without getting further: data or code")
    return Verdict(remedy=Remedy.RESTART, reason="restarted in place from a state before that")


def _capped(case: Case) -> Verdict:
    code = case.cause.code or 1
    reason = f"--max-restarts {case.max_restarts} used up"
    return Verdict(remedy=Remedy.GIVE_UP, code=code if code > 0 else 128 - code, reason=reason)


def _give_up(reason: str) -> Verdict:
    return Verdict(remedy=Remedy.GIVE_UP, code=GAVE_UP, reason=reason)
