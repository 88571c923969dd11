"""The ladder: from the first cause of an incident to a verdict, cheapest remedy first, every rung bounded.

1. Proof names a node (silent, GPU lost, words that leave no doubt): it is evicted.
2. The user's code raised: no node is ever evicted for it; what needs another setting is tried once more and then told.
3. A hang or a slow job whose stacks name nodes: these are evicted, if they can be replaced.
4. The same failure again, and nobody to blame: every node is tried while the job stands, alone and in pairs.
5. Nothing found: restarted in place, for many faults are transient.
7. Again, and the script allows it: groups of nodes do its work again, and who fails in two groupings is evicted.
8. Nothing left: the job ends with code 93 and the story, its state kept.

The first failure of its kind without a culprit is restarted at once, whatever it was: nothing is cheaper.
"""

from collections.abc import Mapping

import msgspec

from holdfast.core import story
from holdfast.core.triage import NOT_STARTED, is_echo, names_node
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.verdict import Remedy, Verdict

GAVE_UP = 93  # exit code: do not requeue
SURE = 0.9  # confidence of last words that stands as proof against a node
TOLD = 0.7  # and that explains a failure; an exit code alone does not
EVICT, CODE, SETTING, EXTERNAL = "evict_and_restart", "rollback_or_fix_code", "fix_config", "wait_external"  # actions
_PATIENCE_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0)  # for somebody outside to come back
_NODES, _BITS = 2, 3  # levels of probes: of machines, and of what they compute


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier failure, as far as the ladder needs it."""

    signature: str
    nodes: tuple[str, ...]
    at: float
    step: int
    counted: bool  # the step was counted by us since launch, not told by the script
    probed: bool = False  # nodes were tried after it
    replayed: bool = False  # and so was the job's own work


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
    may_probe: bool = False
    may_replay: bool = False
    may_evict: int = 1 << 30  # nodes, on evidence short of proof

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

    @property
    def is_proof(self) -> bool:
        """Whether the cause names a machine beyond doubt."""
        cause = self.cause
        told = cause.kind is Kind.CRASH and cause.action == EVICT and cause.confidence >= SURE
        return cause.kind is Kind.SILENCE or names_node(cause) or told

    @property
    def is_guess(self) -> bool:
        """Whether evidence short of proof is all there is; a stopped or missing process is more than that."""
        return not (self.is_proof or self.cause.hard)

    @property
    def is_blameless(self) -> bool:
        """Whether a machine may be at fault, and nobody says which."""
        cause = self.cause
        told = cause.action in (CODE, SETTING, EXTERNAL) and cause.confidence >= TOLD
        return not (cause.group == "script" or told) and cause.kind is not Kind.LINES and cause.klass != NOT_STARTED


def judge(case: Case) -> Verdict:
    verdict = _remedy(case)
    if verdict.remedy is Remedy.EVICT and case.is_guess and len(verdict.nodes) > case.may_evict:
        return _too_many(case, verdict)
    if verdict.remedy is Remedy.RESTART and case.may_probe and case.is_blameless and _is_due(case):
        level = _BITS if case.cause.kind in (Kind.LOSS, Kind.REPLICA) else _NODES
        reason = f"the same again, and nobody to blame: every node is tried (level {level})"
        return Verdict(remedy=Remedy.PROBE, level=level, reason=reason)
    if verdict.remedy is Remedy.RESTART and case.may_replay and case.is_blameless and _is_stubborn(case):
        reason = "the same again although nothing was found: groups of nodes do the work again, if the script allows it"
        return Verdict(remedy=Remedy.REPLAY, reason=reason)
    return verdict


def _is_stubborn(case: Case) -> bool:
    """It came again after probes that found nobody, and was not replayed yet."""
    since = [p for p in case.recent if p.at > case.further_at]
    return any(p.probed for p in since) and not any(p.replayed for p in since)


def tried(case: Case, bad: Mapping[str, str], found: str, *, replaceable: bool) -> Verdict:
    """What to do when nodes were tried: whoever was found bad goes, else on to the next rung."""
    told = "; ".join(f"{node} {why}" for node, why in bad.items())
    if bad and replaceable:
        return Verdict(remedy=Remedy.EVICT, nodes=tuple(bad), reason=f"tried: {told}: evicted")
    verdict = judge(msgspec.structs.replace(case, may_probe=False, may_replay=False))
    seen = f"{told}, and nobody can take their place" if bad else found or "nothing found"
    return msgspec.structs.replace(verdict, reason=f"tried: {seen}; {verdict.reason}")


def _is_due(case: Case) -> bool:
    """The same failure came before, and nodes were not tried since the job last got further."""
    return case.fruitless > 0 and not any(p.probed and p.at > case.further_at for p in case.recent)


def _remedy(case: Case) -> Verdict:
    cause = case.cause
    where = ", ".join(cause.suspects)
    if cause.kind is Kind.SILENCE or (case.is_proof and case.replaceable):
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} {cause.reason}: evicted")
    if cause.action == EXTERNAL and cause.confidence >= TOLD:
        return _outside(case)
    # With a cap given the user has said how often to try; without one the ledger says when trying is pointless.
    if case.max_restarts is None and case.rounds >= case.attempts:
        return _give_up(f"{case.rounds + 1} failures in a row without a step between them")
    if cause.kind is Kind.LOSS:
        return _loss(case)
    if case.is_proof:
        return _kept(case)
    if cause.kind is Kind.REPLICA:
        return _differ(case)
    if cause.kind is Kind.LINES:
        return _setup(case)
    if cause.kind in (Kind.HANG, Kind.SLOW) and case.replaceable and case.standbys >= len(cause.suspects):
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{story.cause(cause)}: evicted {where}")
    if cause.group == "script" or cause.action == CODE:
        return _user_code(case)
    if cause.action == SETTING and cause.kind is Kind.CRASH and cause.confidence >= TOLD:
        return _setup(case)
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
        hint = f"; {case.cause.hint}" if case.cause.hint else ""
        return _give_up(f"the same again without getting further{hint}")
    return Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place")


def _loss(case: Case) -> Verdict:
    """It names the rank that told of it first, which is no evidence against its node: they all share the loss."""
    if case.capped:
        return _capped(case)
    if case.max_restarts is None and case.fruitless >= case.attempts:
        what = "stood out" if case.cause.signature.startswith("spike") else "was not finite"
        return _give_up(f"the loss {what} {case.fruitless + 1} times without getting further: data or code")
    return Verdict(remedy=Remedy.RESTART, reason="restarted in place from a state before that")


def _outside(case: Case) -> Verdict:
    """A service outside the cluster: it will come back, and the state is kept until then."""
    tried = max(case.fruitless, case.rounds)
    if case.capped:
        return _capped(case)
    if tried >= len(_PATIENCE_S):
        waited = f"{sum(_PATIENCE_S) / 60:.0f} minutes"
        return _give_up(f"it did not come back within {waited} of waiting")
    wait_s = _PATIENCE_S[tried]
    reason = f"a service outside has to come back: restarted in place after {wait_s:g} s"
    return Verdict(remedy=Remedy.RESTART, wait_s=wait_s, reason=reason)


def _too_many(case: Case, verdict: Verdict) -> Verdict:
    """Machines are not burnt on a guess, however often it is made."""
    where = ", ".join(verdict.nodes)
    if case.capped:
        return _capped(case)
    if case.fruitless >= case.attempts or case.rounds >= case.attempts:
        return _give_up(f"evicting {where} would be more than may be evicted within an hour without proof")
    reason = f"{where} not evicted, as too many were within the hour: restarted in place"
    return Verdict(remedy=Remedy.RESTART, reason=reason)


def _capped(case: Case) -> Verdict:
    code = case.cause.code or 1
    reason = f"--max-restarts {case.max_restarts} used up"
    return Verdict(remedy=Remedy.GIVE_UP, code=code if code > 0 else 128 - code, reason=reason)


def _give_up(reason: str) -> Verdict:
    return Verdict(remedy=Remedy.GIVE_UP, code=GAVE_UP, reason=reason)
