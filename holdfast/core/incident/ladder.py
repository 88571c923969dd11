"""The ladder of remedies: from the first cause of an incident to a verdict, cheapest first, every rung bounded.

1. A node is bad by proof (it is silent, its GPU is lost, or its log says so beyond doubt): evict it. Links that several
   machines lose together are no proof against any of them: wait for these links.
2. The user's code raised an exception: never evict a node for it. Roll back a release on trial, or at the second
   failure a release that is less than a day old. Before any step, try once more unless the script would fail the same
   way. If a setting must change, restart once more and then tell a person.
3. The stacks of a hung or slow job name nodes: evict them if they can be replaced. But ranks that are in different
   collectives, and so wait for each other for ever, are the work of the user's code.
4. The failure comes again without a culprit, or only a rank accuses a machine: probe every node while the job stands,
   alone and in pairs.
5. Probes find nothing: restart in place, since many faults are transient.
6. The failure comes again: roll the newest release back. If the loss fails at the same step again, leave that batch
   out, if the script can skip.
7. The failure comes again: replay the work in groups, if the script allows it. Evict a node that fails twice.
8. Nothing is left: ask a person, or end the job with code 93, keep its state and say why.

Any other first failure of its kind without a culprit leads to a restart in place, the cheapest remedy. A release that
has not made its first steps is suspected before any machine, unless there is proof against a machine.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from holdfast.core.incident import incident_text, loss_remedy
from holdfast.core.incident.first_cause import NOT_STARTED, is_echo
from holdfast.core.incident.incident_case import ALL_IN_DOUBT, EXTERNAL, SETTING, TOLD, IncidentCase, PastFailure
from holdfast.core.incident.node_swap_text import describe_lack
from holdfast.core.snapshots.node_eviction_bonds import may_leave
from holdfast.model.detector_alarm import Kind
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.loss_response import Skip

GAVE_UP = 93  # exit code: the same job would fail again; do not requeue
NO_REPLAY = "no replay: "  # how the result of a replay begins that was not made
_PATIENCE_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0)  # for somebody outside to come back
_NODES, _BITS = 2, 3  # levels of probes: of machines, and of what they compute
_NOBODY = "no node is to blame: restarted in place"
_SLOWER = 0.2  # part by which a machine must be slower than others for it to explain a crash, or a loss


def find_verdict(case: IncidentCase) -> Verdict:
    """Return the verdict of the first rule that applies, within the limits on evictions and on code changes."""
    if case.cause.klass == ALL_IN_DOUBT:
        return _give_up("to go on would mean to start from step 0, which a person must want")
    verdict = _first_remedy(case)
    if verdict.remedy is Remedy.EVICT and len(verdict.nodes) > case.may_lose and not case.together:
        return _give_up("more nodes were lost within the hour than the job has")
    if verdict.remedy is Remedy.EVICT and not case.is_witnessed:
        verdict = _spare_last_copies(case, verdict)
    if verdict.remedy is Remedy.EVICT and case.is_guess and len(verdict.nodes) > case.may_evict:
        verdict = _limit_evictions(case, verdict)
    if case.back_to and not case.update and _is_code_suspect(case, verdict):
        return _roll_back(case)
    if verdict.remedy is Remedy.GIVE_UP and case.cause.kind is Kind.SLOW:
        return Verdict(remedy=Remedy.RESTART, reason=f"{describe_lack(case.checking)}: restarted in place")
    if verdict.remedy is Remedy.GIVE_UP and verdict.code == GAVE_UP and case.update:
        return Verdict(remedy=Remedy.RESTART, reason="a newer release waits: restarted with it")
    if verdict.remedy is not Remedy.RESTART or not case.is_blameless:
        return verdict
    if case.may_probe and _is_due(case):
        level = _BITS if case.cause.kind in (Kind.LOSS, Kind.REPLICA, Kind.REDONE) else _NODES
        why = _reason_to_probe(case)
        reason = f"{why}, no culprit: probing every node (level {level})"
        least = 0.0 if case.cause.kind is Kind.SLOW else _SLOWER
        return Verdict(remedy=Remedy.PROBE, level=level, least=least, reason=reason)
    if skip := _skip_batch(case):
        return skip
    if case.may_replay and _is_stubborn(case):
        reason = "same failure again, and probes found nothing: replaying the work in groups, if the script allows it"
        return Verdict(remedy=Remedy.REPLAY, reason=reason)
    return verdict


def _reason_to_probe(case: IncidentCase) -> str:
    if case.recent_failures or not _is_probed_first(case):
        return "same failure again"
    if case.is_unnamed_hang:
        return "the job stood still"
    return "a collective timed out" if case.is_timeout else "a rank accuses a machine, and nobody else does"


def _is_probed_first(case: IncidentCase) -> bool:
    """Return whether a probe is cheaper than one more failure like this. Nodes are then probed before any restart."""
    return case.is_timeout or case.is_unwitnessed or case.is_unnamed_hang


def _is_code_suspect(case: IncidentCase, verdict: Verdict) -> bool:
    """Return whether to roll the newest release back instead of evicting a node; a rollback is cheaper."""
    cause = case.cause
    if case.is_witnessed or cause.klass == NOT_STARTED or (cause.action == EXTERNAL and cause.confidence >= TOLD):
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
    why = "is the newest change, and nothing else helped"
    if case.trial:
        why = "failed in its first steps"
    elif case.is_code and case.is_new:
        why = "raised the same error again, which the release before it did not"
    reason = f"the running release {why}: rolled back to release {case.back_to}"
    return Verdict(remedy=Remedy.ROLLBACK, to=case.back_to, reason=reason)


def _skip_batch(case: IncidentCase) -> Verdict | None:
    """Return a verdict to skip a batch if its loss was not finite again after a restart; None otherwise."""
    cause = case.cause
    if cause.kind is not Kind.LOSS or case.is_spike or cause.not_after is None or not case.skippable:
        return None
    if not case.is_no_further or case.fruitless_restarts == 0:
        return None
    bad = cause.not_after + 1
    reason = f"the loss was not finite at step {bad} again, and no machine is to blame: its batch is left out"
    return Verdict(remedy=Remedy.SKIP, skips=(Skip(first=bad, last=bad),), reason=reason)


def _is_stubborn(case: IncidentCase) -> bool:
    """Return whether the failure came again after probes that found nothing, and the work was not replayed yet."""
    since = case.recent_failures if case.is_costly else _fruitless_failures(case)
    return any(p.probed for p in since) and not any(p.replayed for p in since)


def verdict_after_probe(case: IncidentCase, bad: Mapping[str, str], found: str, *, replaceable: bool) -> Verdict:
    """Return the verdict after a probe: evict bad nodes that standbys can replace, or else take the next remedy."""
    told = "; ".join(f"{node} {why}" for node, why in bad.items())
    if bad and replaceable:
        return Verdict(remedy=Remedy.EVICT, nodes=tuple(bad), reason=f"probed: {told}: evicted")
    verdict = find_verdict(msgspec.structs.replace(case, may_probe=False, may_replay=False))
    seen = f"{told}, and {describe_lack(case.checking, 'them')}" if bad else found or "nothing found"
    probed = "" if seen.startswith(NO_REPLAY) else "probed: "
    return msgspec.structs.replace(verdict, reason=f"{probed}{seen}; {verdict.reason}")


def _is_due(case: IncidentCase) -> bool:
    """Return whether to probe now: the failure came again without progress or at a high cost, and no probe was made.

    A process that dies during or soon after a recovery first leads to one more restart. Two nodes may have failed at
    the same time, and a restart is cheaper than a probe. There is no such restart after a timeout of a collective,
    after a hang for which nobody is named, or if a rank accuses a machine that nobody else has seen fail.
    """
    if _is_probed_first(case) and not any(p.probed for p in case.recent_failures):
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
    if case.is_switch:
        return _judge_switch(case)
    if cause.kind is Kind.SILENCE or (case.is_proof and case.replaceable):
        return _evict_proven(case)
    if cause.action == EXTERNAL and cause.confidence >= TOLD:
        return _wait_for_service(case)
    if pointless := _reason_to_give_up(case):
        return _give_up(pointless)
    if cause.kind is Kind.LOSS:
        return _judge_loss(case)
    if case.is_proof:
        return _keep_bad_node(case)
    if cause.kind is Kind.REPLICA:
        return _judge_replicas(case)
    if cause.kind is Kind.REDONE:
        return _judge_redone(case)
    if case.is_short_of_memory and case.replaceable:
        reason = f"{where} alone runs short of memory, twice: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=reason)
    if cause.kind is Kind.LINES:
        return _judge_setting(case)
    role = case.follows_the_rank
    waited = cause.kind in (Kind.HANG, Kind.SLOW) and case.replaceable and not role and not case.is_code
    if waited and (named := _replaceable_suspects(case)):
        reason = f"{incident_text.describe_cause(cause)}: evicted {', '.join(named)}"
        return Verdict(remedy=Remedy.EVICT, nodes=named, reason=reason)
    if case.is_code:
        return _user_code(case)
    if case.is_setting:
        return _judge_setting(case)
    if case.replaceable and cause.klass == NOT_STARTED:
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=f"{where} could not start its ranks: evicted")
    if case.is_own_exit and not case.ever and case.recent_failures:
        # Amid failures of other kinds it may be their echo.
        if case.max_restarts is None and case.rounds <= len(case.recent_failures):
            return _give_up(f"it {cause.reason} again before the first step, which is no machine's fault")
        return _restarts_used_up(case) if case.is_capped else Verdict(remedy=Remedy.RESTART, reason=_NOBODY)
    # An echo names a node that lost its peer, which is no reason to blame it however often it happens.
    may_evict = case.replaceable and not (case.evicted_before or role or is_echo(cause) or cause.kind is Kind.SLOW)
    if may_evict and case.is_nodes_own:
        reason = f"the same failure on {where} again within the window: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=cause.suspects, reason=reason)
    if case.is_capped:
        return _restarts_used_up(case)
    if case.max_restarts is None and case.is_stuck:
        return _judge_stuck(case, may_evict=may_evict)
    return Verdict(remedy=Remedy.RESTART, reason=_reason_to_stay(case))


def _judge_stuck(case: IncidentCase, *, may_evict: bool) -> Verdict:
    """Return the verdict on a job that gets no further: evict the node if it failed there before, or else give up."""
    times, nodes = f"the same failure {case.fruitless_restarts + 1} times without progress", case.cause.suspects
    if may_evict and any(set(p.nodes).intersection(nodes) for p in _fruitless_failures(case)):
        return Verdict(remedy=Remedy.EVICT, nodes=nodes, reason=f"{times}, again on {', '.join(nodes)}: evicted")
    return _give_up(f"{times}{_advice(case)}")


def _reason_to_stay(case: IncidentCase) -> str:
    """Return why the job restarts on the same nodes: no node is to blame, or no standby can replace the bad node."""
    if case.cause.kind in (Kind.HANG, Kind.SLOW) and case.cause.suspects and not case.follows_the_rank:
        return f"{describe_lack(case.checking, ', '.join(case.cause.suspects))}: restarted in place"
    if gone := case.evicted_before:
        return f"the rank failed so again without {', '.join(gone)}, evicted for it: {_NOBODY}"
    others = case.shared_with
    return f"it came on {incident_text.list_some(others)}, too: {_NOBODY}" if others else _NOBODY


def _evict_proven(case: IncidentCase) -> Verdict:
    """Return the verdict on nodes that are silent, or against which there is proof."""
    nodes, reason = case.cause.suspects, f"{', '.join(case.cause.suspects)} {case.cause.reason}: evicted"
    if case.together:
        nodes = case.together
        where = f", all of {case.place}" if case.place else ""
        reason = f"{', '.join(nodes)} fell silent at once{where}: a switch, a cable or their power; evicted"
    return Verdict(remedy=Remedy.EVICT, nodes=nodes, reason=reason)


def _judge_switch(case: IncidentCase) -> Verdict:
    """Return the verdict on lost links of several machines: evict if enough standbys have links, else restart."""
    if pointless := _reason_to_give_up(case):
        return _give_up(pointless)
    if case.seated and len(case.seated) <= min(case.standbys, case.may_lose):
        reason = f"standbys have links: evicted {', '.join(case.seated)}"
        return Verdict(remedy=Remedy.EVICT, nodes=case.seated, reason=reason)
    if case.is_capped:
        return _restarts_used_up(case)
    return Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place once the links are back")


def _reason_to_give_up(case: IncidentCase) -> str:
    """Return why further restarts are pointless, whatever the cause; "" if they are useful or the user limits restarts.
    If a step was redone with another loss, that is progress, because a step was made."""
    if case.max_restarts is not None:
        return ""
    if case.rounds >= case.attempts and case.cause.kind is not Kind.REDONE:
        return f"{case.rounds + 1} failures in a row without a step between them"
    if case.is_hopeless:
        return f"{case.luckless + 1} failures, which cost more time than the job gained between them"
    return ""


def _user_code(case: IncidentCase) -> Verdict:
    """Return the verdict on a bug in the user's code, which never evicts a node."""
    if case.is_capped:
        return _restarts_used_up(case)
    if not case.ever:
        return _judge_start(case)
    if case.is_no_further:
        return _give_up("the script failed the same way again without progress")
    if case.is_stuck:
        return _give_up("the script keeps failing the same way, with hardly any progress in between")
    stands = case.cause.kind is Kind.HANG
    did = "let a rank go" if case.departed else "has ranks wait for each other for ever" if stands else "raised"
    return Verdict(remedy=Remedy.RESTART, reason=f"the script {did}, after steps were made: restarted in place")


def _judge_start(case: IncidentCase) -> Verdict:
    """Return the verdict on a script that fails before any step: one more try, unless it would fail the same way.

    A file may be missing only because another rank is still making it. If the user limits restarts, that limit applies.
    """
    if case.is_certain:
        return _give_up(f"the script failed before any step was seen; a restart would fail the same way{_advice(case)}")
    if case.past and case.max_restarts is None:
        return _give_up(f"the script failed the same way again before any step was seen{_advice(case)}")
    return Verdict(remedy=Remedy.RESTART, reason="the script failed before any step was seen: restarted in place")


def _advice(case: IncidentCase) -> str:
    return incident_text.advice_clause(case.cause.hint) if case.cause.action == SETTING else ""


def _keep_bad_node(case: IncidentCase) -> Verdict:
    """Return the verdict on a bad node that cannot be replaced: restart on it once, then give up. Failures after which
    the node was evicted do not count, because it may have been repaired before it came back."""
    if case.is_capped:
        return _restarts_used_up(case)
    kept = [past for past in case.recent_failures if not past.evicted]
    if any(set(past.nodes) & set(case.cause.suspects) for past in kept):
        return _give_up("same failure again on a node that cannot be replaced")
    return Verdict(remedy=Remedy.RESTART, reason=f"{describe_lack(case.checking)}: restarted in place")


def _judge_replicas(case: IncidentCase) -> Verdict:
    """Return the verdict on replicas that differ without a majority: restart, and later give up if that is in vain."""
    if case.is_capped:
        return _restarts_used_up(case)
    if case.max_restarts is None and case.is_stuck:
        return _give_up(f"replicas differed {case.fruitless_restarts + 1} times without progress, for no known reason")
    return Verdict(remedy=Remedy.RESTART, reason="no replica stands out: restarted in place from where they were equal")


def _judge_redone(case: IncidentCase) -> Verdict:
    """Return the verdict on a step that was made again with another loss: make it once more, and blame nobody."""
    if case.is_capped:
        return _restarts_used_up(case)
    return Verdict(remedy=Remedy.RESTART, reason="restarted in place, to see which result comes again")


def _judge_setting(case: IncidentCase) -> Verdict:
    """Return the verdict on a failure that needs another setting, such as memory use; no node is blamed. As long as the
    job gets further between failures, a restart is better than standing still until a person comes."""
    if case.is_capped:
        return _restarts_used_up(case)
    hint, often = incident_text.advice_clause(case.cause.hint), len(case.recent_failures) >= case.attempts
    if case.is_no_further or case.is_stuck or (often and not case.is_worth_it):
        return _give_up(f"same failure again without progress{hint}")
    told = f" ({hint.removeprefix('; ')})" if hint and case.recent_failures else ""
    return Verdict(remedy=Remedy.RESTART, reason=f"no node is to blame: restarted in place{told}")


def _judge_loss(case: IncidentCase) -> Verdict:
    """Return the verdict on a bad loss. The rank that reported it is not blamed, since all ranks share the loss."""
    if case.is_capped:
        return _restarts_used_up(case)
    cause = case.cause
    if case.max_restarts is None and case.is_stuck:
        what = f"{'stood out' if case.is_spike else 'was not finite'} {case.fruitless_restarts + 1} times"
        return _give_up(f"the loss {what} without progress: data, code, or a checkpoint of the script with a bad state")
    skips, eases = loss_remedy.apply_response(cause.response, case.step, cause.not_after)
    if eases or (skips and case.skippable):  # a rank that leaves none out would wait for the others for ever
        return Verdict(remedy=Remedy.SKIP, skips=skips, eases=eases, reason=loss_remedy.describe_remedy(skips, eases))
    return Verdict(remedy=Remedy.RESTART, reason=f"restarted in place{case.doubt_clause}")


def _wait_for_service(case: IncidentCase) -> Verdict:
    """Return the verdict on a failed outside service: restart after a growing wait, and give up in the end."""
    tried = max(case.fruitless_restarts, case.rounds)
    if case.is_capped:
        return _restarts_used_up(case)
    if tried >= len(_PATIENCE_S):
        waited = f"{sum(_PATIENCE_S) / 60:.0f} minutes"
        return _give_up(f"it did not come back within {waited} of waiting")
    wait_s = _PATIENCE_S[tried]
    reason = f"waiting for {case.awaited_service}: restarted in place after {wait_s:g} s"
    return Verdict(remedy=Remedy.RESTART, wait_s=wait_s, reason=reason)


def _replaceable_suspects(case: IncidentCase) -> tuple[str, ...]:
    """Return suspects that standbys can replace, or () if there are none. Three sets are tried until one is small
    enough: all suspects, suspects of earlier failures, and suspects whose ranks are named."""
    suspects, seen = case.cause.suspects, {node for past in case.recent_failures for node in past.nodes}
    some = [tuple(node for node in suspects if node in among) for among in (suspects, seen, case.near)]
    return next((nodes for nodes in some if 0 < len(nodes) <= case.standbys), ())


def _spare_last_copies(case: IncidentCase, verdict: Verdict) -> Verdict:
    """Take nodes that hold the last copy of a rank's state out of an unproven eviction. Return the changed verdict."""
    often = Counter(node for past in case.recent_failures for node in past.nodes)
    first = sorted(verdict.nodes, key=lambda node: (-often[node], node not in case.near, node))
    going = may_leave(first, case.bonds, case.lost)
    stay = ", ".join(node for node in verdict.nodes if node not in going)
    if not stay:
        return verdict
    why = f"not {stay}, which then holds the last copy of a state"
    if going:
        reason = f"{incident_text.describe_cause(case.cause)}: evicted {', '.join(going)}, {why}"
        return msgspec.structs.replace(verdict, nodes=going, reason=reason)
    if case.is_capped:
        return _restarts_used_up(case)
    reason = f"{stay} not evicted, because it holds the last copy of a state: restarted in place"
    return Verdict(remedy=Remedy.RESTART, reason=reason)


def _limit_evictions(case: IncidentCase, verdict: Verdict) -> Verdict:
    """Return the verdict for a job whose eviction would exceed the hourly limit: a restart in place, or giving up."""
    where = ", ".join(verdict.nodes)
    if case.is_capped:
        return _restarts_used_up(case)
    if case.fruitless_restarts >= case.attempts or case.rounds >= case.attempts:
        return _give_up(f"evicting {where} would exceed the hourly limit on evictions without proof")
    reason = f"{where} not evicted, because of the hourly limit on evictions: restarted in place"
    return Verdict(remedy=Remedy.RESTART, reason=reason)


def _restarts_used_up(case: IncidentCase) -> Verdict:
    code = case.cause.code or 1
    reason = f"--max-restarts {case.max_restarts} used up"
    return Verdict(remedy=Remedy.GIVE_UP, code=code if code > 0 else 128 - code, reason=reason)


def _give_up(reason: str) -> Verdict:
    return Verdict(remedy=Remedy.GIVE_UP, code=GAVE_UP, reason=reason)
