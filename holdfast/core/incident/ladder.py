"""The ladder: from the first cause of an incident to a verdict, cheapest remedy first, every rung bounded.

1. Proof names a node (silent, GPU lost, words that leave no doubt): it is evicted.
2. The user's code raised: no node is ever evicted for it. A release on trial is rolled back, and one of the last day
   at the second time; what needs another setting is tried once more and then told.
3. A hang or a slow job whose stacks name nodes: these are evicted, if they can be replaced.
4. The same failure again, and nobody to blame: every node is tried while the job stands, alone and in pairs.
5. Nothing found: restarted in place, for many faults are transient.
6. Again: the newest release is rolled back; where the loss fails at the same step and the script can, its batch is
   left out.
7. Again, and the script allows it: groups of nodes do its work again, and who fails in two groupings is evicted.
8. Nothing left: a person is asked, or the job ends with code 93 and the story, its state kept.

The first failure of its kind without a culprit is restarted at once, whatever it was: nothing is cheaper. A release
that has not made its first steps is suspected before any machine is, unless there is proof against one.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from holdfast.core.incident import incident_text, loss_remedy
from holdfast.core.incident.incident_case import EXTERNAL, SETTING, TOLD, IncidentCase, PastFailure
from holdfast.core.incident.triage import NOT_STARTED, is_echo
from holdfast.core.snapshots.eviction_safety import may_leave
from holdfast.model.alarm import Kind
from holdfast.model.release import Skip
from holdfast.model.verdict import Remedy, Verdict

GAVE_UP = 93  # exit code: do not requeue
_PATIENCE_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0)  # for somebody outside to come back
_NODES, _BITS = 2, 3  # levels of probes: of machines, and of what they compute
_NOBODY = "no node is to blame: restarted in place"
_SLOWER = 0.2  # part by which a machine must be slower than others for it to explain a crash, or a loss


def find_verdict(case: IncidentCase) -> Verdict:
    """The verdict of the first rung that has one, kept within what may be evicted and what code may be changed."""
    verdict = _first_remedy(case)
    if verdict.remedy is Remedy.EVICT and len(verdict.nodes) > case.may_lose:
        return _give_up("more nodes were lost within the hour than the job has")
    if verdict.remedy is Remedy.EVICT and not case.is_proof:
        verdict = _spare_last_copies(case, verdict)
    if verdict.remedy is Remedy.EVICT and case.is_guess and len(verdict.nodes) > case.may_evict:
        verdict = _limit_evictions(case, verdict)
    if case.back_to and not case.update and _is_code_suspect(case, verdict):
        return _roll_back(case)
    if verdict.remedy is Remedy.GIVE_UP and case.cause.kind is Kind.SLOW:
        return Verdict(remedy=Remedy.RESTART, reason="nobody can take its place any more: restarted in place")
    if verdict.remedy is Remedy.GIVE_UP and verdict.code == GAVE_UP and case.update:
        return Verdict(remedy=Remedy.RESTART, reason="a newer release waits: restarted with it")
    if verdict.remedy is not Remedy.RESTART or not case.is_blameless:
        return verdict
    if case.may_probe and _is_due(case):
        level = _BITS if case.cause.kind in (Kind.LOSS, Kind.REPLICA) else _NODES
        why = "the same again" if case.recent_failures or not case.is_timeout else "a timeout had to be waited for"
        reason = f"{why}, and nobody to blame: every node is tried (level {level})"
        least = 0.0 if case.cause.kind is Kind.SLOW else _SLOWER
        return Verdict(remedy=Remedy.PROBE, level=level, least=least, reason=reason)
    if skip := _skip_batch(case):
        return skip
    if case.may_replay and _is_stubborn(case):
        reason = "the same again although nothing was found: groups of nodes do the work again, if the script allows it"
        return Verdict(remedy=Remedy.REPLAY, reason=reason)
    return verdict


def _is_code_suspect(case: IncidentCase, verdict: Verdict) -> bool:
    """Whether the newest release goes, and not a machine: change one thing at a time, and code is the cheaper one."""
    cause = case.cause
    if case.is_proof or cause.klass == NOT_STARTED or (cause.action == EXTERNAL and cause.confidence >= TOLD):
        return False
    if case.trial:
        hangs = cause.kind in (Kind.HANG, Kind.SLOW) and not cause.hard
        return case.is_code or case.mixed or hangs or case.is_repeated
    if verdict.remedy is Remedy.GIVE_UP and verdict.code == GAVE_UP:
        return True
    if case.is_code and case.is_new:  # however far it gets in between: it would go on like this until its authors come
        return True
    return verdict.remedy is Remedy.RESTART and case.is_blameless and _is_stubborn(case)


def _roll_back(case: IncidentCase) -> Verdict:
    why = "is the newest thing that changed, and nothing else helped"
    if case.trial:
        why = "failed in its first steps"
    elif case.is_code and case.is_new:
        why = "raised the same again, which the one before it did not lately"
    reason = f"the running release {why}: rolled back to release {case.back_to}"
    return Verdict(remedy=Remedy.ROLLBACK, to=case.back_to, reason=reason)


def _skip_batch(case: IncidentCase) -> Verdict | None:
    """The loss is not finite at the same step again, and no machine is to blame: its batch is left out."""
    cause = case.cause
    spike = cause.signature.startswith("spike")
    if cause.kind is not Kind.LOSS or spike or cause.not_after is None or not case.skippable:
        return None
    if not case.is_no_further or case.fruitless_restarts == 0:
        return None
    bad = cause.not_after + 1
    reason = f"the loss was not finite at step {bad} again, and no machine is to blame: its batch is left out"
    return Verdict(remedy=Remedy.SKIP, skips=(Skip(first=bad, last=bad),), reason=reason)


def _is_stubborn(case: IncidentCase) -> bool:
    """It came again after probes that found nobody, and was not replayed yet."""
    since = case.recent_failures if case.is_costly else _fruitless_failures(case)
    return any(p.probed for p in since) and not any(p.replayed for p in since)


def verdict_after_probe(case: IncidentCase, bad: Mapping[str, str], found: str, *, replaceable: bool) -> Verdict:
    """What to do when nodes were tried: whoever was found bad goes, else on to the next rung."""
    told = "; ".join(f"{node} {why}" for node, why in bad.items())
    if bad and replaceable:
        return Verdict(remedy=Remedy.EVICT, nodes=tuple(bad), reason=f"tried: {told}: evicted")
    verdict = find_verdict(msgspec.structs.replace(case, may_probe=False, may_replay=False))
    seen = f"{told}, and nobody can take their place" if bad else found or "nothing found"
    return msgspec.structs.replace(verdict, reason=f"tried: {seen}; {verdict.reason}")


def _is_due(case: IncidentCase) -> bool:
    """The same failure came before, in vain or at a high price, and nodes were not tried for it since.

    A process that dies while the job comes back, or soon after, is no such sign the first time: two may have been
    struck, and to restart once more costs less than to look. Where a timeout had to be waited for, to look costs less.
    """
    if case.is_timeout and not any(p.probed for p in case.recent_failures):
        return True
    soon = case.rounds == 1 or (case.fruitless_restarts == 1 and not case.is_no_further)
    if case.cause.kind is Kind.CRASH and soon and not case.is_costly:
        return False
    if case.fruitless_restarts > 0 and not any(p.probed for p in _fruitless_failures(case)):
        return True
    return case.is_costly and not any(p.probed for p in case.recent_failures)


def _fruitless_failures(case: IncidentCase) -> list[PastFailure]:
    return [p for p in case.recent_failures if case.counted or case.was_in_vain(p)]


def _first_remedy(case: IncidentCase) -> Verdict:
    cause = case.cause
    where = ", ".join(cause.suspects)
    if cause.kind is Kind.SILENCE or (case.is_proof and case.replaceable):
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} {cause.reason}: evicted")
    if cause.action == EXTERNAL and cause.confidence >= TOLD:
        return _wait_for_service(case)
    # With a cap given the user has said how often to try; without one the ledger says when trying is pointless.
    if case.max_restarts is None and case.rounds >= case.attempts:
        return _give_up(f"{case.rounds + 1} failures in a row without a step between them")
    if case.max_restarts is None and case.is_hopeless:
        return _give_up(f"{case.luckless + 1} failures, and more time was lost to them than the job got further in")
    if cause.kind is Kind.LOSS:
        return _judge_loss(case)
    if case.is_proof:
        return _keep_bad_node(case)
    if cause.kind is Kind.REPLICA:
        return _judge_replicas(case)
    if case.is_short_of_memory and case.replaceable:
        reason = f"{where} alone runs short of memory, twice: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=reason)
    if cause.kind is Kind.LINES:
        return _judge_setting(case)
    role = case.follows_the_rank
    waited = cause.kind in (Kind.HANG, Kind.SLOW) and case.replaceable and not role
    if waited and (named := _replaceable_suspects(case)):
        reason = f"{incident_text.describe_cause(cause)}: evicted {', '.join(named)}"
        return Verdict(remedy=Remedy.EVICT, nodes=named, reason=reason)
    if case.is_code:
        return _user_code(case)
    if cause.action == SETTING and cause.kind is Kind.CRASH and cause.confidence >= TOLD:
        return _judge_setting(case)
    if case.replaceable and cause.klass == NOT_STARTED:
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} could not start its ranks: evicted")
    if case.is_own_exit and not case.ever and case.recent_failures:
        # Amid failures of other kinds it may be their echo.
        if case.max_restarts is None and case.rounds <= len(case.recent_failures):
            return _give_up(f"it {cause.reason} again before any step was made, which no machine does by itself")
        return _restarts_used_up(case) if case.is_capped else Verdict(remedy=Remedy.RESTART, reason=_NOBODY)
    # An echo names a node that lost its peer, which is no reason to blame it however often it happens.
    again = any(set(p.nodes) & set(cause.suspects) for p in case.recent_failures)
    if case.replaceable and again and not role and not is_echo(cause) and cause.kind is not Kind.SLOW:
        reason = f"the same failure on {where} again within the window: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=reason)
    if case.is_capped:
        return _restarts_used_up(case)
    if case.max_restarts is None and case.is_stuck:
        return _give_up(f"the same failure {case.fruitless_restarts + 1} times without getting further")
    return Verdict(remedy=Remedy.RESTART, reason=_NOBODY)


def _user_code(case: IncidentCase) -> Verdict:
    """A bug in the user's code never costs a node."""
    if case.is_capped:
        return _restarts_used_up(case)
    if not case.ever:
        hint = f"; {case.cause.hint}" if case.cause.action == SETTING and case.cause.hint else ""
        return _give_up(f"the script failed before any step was seen; a restart would fail the same way{hint}")
    if case.is_no_further:
        return _give_up("the script failed the same way again without getting further")
    if case.is_stuck:
        return _give_up("the script failed the same way over and over, and hardly got further in between")
    did = "let a rank go" if case.cause.reason.endswith(incident_text.WHILE_OTHERS) else "raised"
    return Verdict(remedy=Remedy.RESTART, reason=f"the script {did}, after steps were made: restarted in place")


def _keep_bad_node(case: IncidentCase) -> Verdict:
    """A bad node that nobody can replace may still do for a while."""
    if case.is_capped:
        return _restarts_used_up(case)
    if case.recent_failures:
        return _give_up("the same again on a node that cannot be replaced")
    return Verdict(remedy=Remedy.RESTART, reason="nobody can take its place: restarted in place")


def _judge_replicas(case: IncidentCase) -> Verdict:
    """Replicas disagree and there is no majority: whose fault it was shows if it comes again and one more can say."""
    if case.is_capped:
        return _restarts_used_up(case)
    if case.max_restarts is None and case.is_stuck:
        return _give_up(
            f"replicas differed {case.fruitless_restarts + 1} times without getting further, and nobody can say why"
        )
    return Verdict(remedy=Remedy.RESTART, reason="nobody can be named: restarted in place from where they were equal")


def _judge_setting(case: IncidentCase) -> Verdict:
    """Something is to be set otherwise, such as how much memory is used: never a node's fault.

    As long as the job gets further in between, that is better than to stand until somebody has come.
    """
    if case.is_capped:
        return _restarts_used_up(case)
    hint, often = case.cause.hint, len(case.recent_failures) >= case.attempts
    if case.is_no_further or case.is_stuck or (often and not case.is_worth_it):
        return _give_up("the same again without getting further" + (f"; {hint}" if hint else ""))
    told = f" ({hint.rstrip('.')})" if hint and case.recent_failures else ""
    return Verdict(remedy=Remedy.RESTART, reason=f"no node is to blame: restarted in place{told}")


def _judge_loss(case: IncidentCase) -> Verdict:
    """It names the rank that told of it first, which is no evidence against its node: they all share the loss."""
    if case.is_capped:
        return _restarts_used_up(case)
    cause = case.cause
    if case.max_restarts is None and case.is_stuck:
        what = "stood out" if cause.signature.startswith("spike") else "was not finite"
        return _give_up(f"the loss {what} {case.fruitless_restarts + 1} times without getting further: data or code")
    skips, eases = loss_remedy.apply_policy(cause.policy, case.step, cause.not_after)
    if eases or (skips and case.skippable):  # a rank that leaves none out would wait for the others for ever
        return Verdict(remedy=Remedy.SKIP, skips=skips, eases=eases, reason=loss_remedy.describe_remedy(skips, eases))
    return Verdict(remedy=Remedy.RESTART, reason="restarted in place from a state before that")


def _wait_for_service(case: IncidentCase) -> Verdict:
    """A service outside the cluster: it will come back, and the state is kept until then."""
    tried = max(case.fruitless_restarts, case.rounds)
    if case.is_capped:
        return _restarts_used_up(case)
    if tried >= len(_PATIENCE_S):
        waited = f"{sum(_PATIENCE_S) / 60:.0f} minutes"
        return _give_up(f"it did not come back within {waited} of waiting")
    wait_s = _PATIENCE_S[tried]
    reason = f"a service outside has to come back: restarted in place after {wait_s:g} s"
    return Verdict(remedy=Remedy.RESTART, wait_s=wait_s, reason=reason)


def _replaceable_suspects(case: IncidentCase) -> tuple[str, ...]:
    """All suspects, or those that were before, or those with the ranks that are named: whom standbys can replace."""
    suspects, seen = case.cause.suspects, {node for past in case.recent_failures for node in past.nodes}
    some = [tuple(node for node in suspects if node in among) for among in (suspects, seen, case.near)]
    return next((nodes for nodes in some if 0 < len(nodes) <= case.standbys), ())


def _spare_last_copies(case: IncidentCase, verdict: Verdict) -> Verdict:
    """Without proof nobody goes together with the other copy of a state: when there are new copies is soon enough."""
    often = Counter(node for past in case.recent_failures for node in past.nodes)
    first = sorted(verdict.nodes, key=lambda node: (-often[node], node not in case.near, node))
    going = may_leave(first, case.bonds, case.lost)
    stay = ", ".join(node for node in verdict.nodes if node not in going)
    if not stay:
        return verdict
    why = f"not {stay}, as the last copy of a state would go too"
    if going:
        reason = f"{incident_text.describe_cause(case.cause)}: evicted {', '.join(going)}, {why}"
        return msgspec.structs.replace(verdict, nodes=going, reason=reason)
    if case.is_capped:
        return _restarts_used_up(case)
    reason = f"{stay} not evicted, as the last copy of a state would go too: restarted in place"
    return Verdict(remedy=Remedy.RESTART, reason=reason)


def _limit_evictions(case: IncidentCase, verdict: Verdict) -> Verdict:
    """Machines are not burnt on a guess, however often it is made."""
    where = ", ".join(verdict.nodes)
    if case.is_capped:
        return _restarts_used_up(case)
    if case.fruitless_restarts >= case.attempts or case.rounds >= case.attempts:
        return _give_up(f"evicting {where} would be more than may be evicted within an hour without proof")
    reason = f"{where} not evicted, as too many were within the hour: restarted in place"
    return Verdict(remedy=Remedy.RESTART, reason=reason)


def _restarts_used_up(case: IncidentCase) -> Verdict:
    code = case.cause.code or 1
    reason = f"--max-restarts {case.max_restarts} used up"
    return Verdict(remedy=Remedy.GIVE_UP, code=code if code > 0 else 128 - code, reason=reason)


def _give_up(reason: str) -> Verdict:
    return Verdict(remedy=Remedy.GIVE_UP, code=GAVE_UP, reason=reason)
