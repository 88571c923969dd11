"""A plan in two parts: first damaged pipelines are dropped, so that the remaining pipelines make steps while the second
part is prepared. The second part is replacement or rerouting."""

from math import ceil

import msgspec

from holdfast.core.elastic.drop_policy import propose_drop
from holdfast.core.elastic.plan_ground import PlanGround
from holdfast.core.elastic.proposal import Infeasible, Phase, Proposal
from holdfast.core.elastic.replace_policy import propose_replace
from holdfast.core.elastic.reroute_policy import propose_reroute
from holdfast.model.pipeline_routes import RoutePlan

HYBRID = "hybrid"


def propose_hybrid(ground: PlanGround) -> Proposal | Infeasible:
    """Propose to drop damaged pipelines until newcomers are warm and new groups are prepared. Propose to replace the
    lost workers after that, or to reroute if no worker is free. Layers are sent between two steps, because every step
    changes them."""
    costs = ground.costs
    first = ground.ask(propose_drop)
    if isinstance(first, Infeasible):
        return Infeasible(policy=HYBRID, reason=first.reason)
    second = ground.ask(propose_replace)
    if isinstance(second, Infeasible):
        second = ground.ask(propose_reroute)
    if isinstance(second, Infeasible):
        return Infeasible(policy=HYBRID, reason=second.reason)
    beside_s = second.downtime_s["rebuild"] + second.downtime_s.get("warm", 0.0)
    steps = max(1, ceil(beside_s / (costs.step_s / max(first.rate_after, 0.01))))
    later = msgspec.structs.replace(second.plan, resume_step=first.plan.resume_step + steps)
    downtime: dict[Phase, float] = dict(first.downtime_s)
    downtime["rebuild"] = 2 * costs.regroup_s  # without the lost, and then with what was prepared
    downtime["agree"] = 2 * costs.agree_s
    downtime |= {name: second.downtime_s[name] for name in ("move", "verify") if name in second.downtime_s}
    return Proposal(
        policy=HYBRID,
        plan=_with_then(first.plan, later),
        downtime_s=downtime,
        rate_after=second.rate_after,
        extra_memory=max(first.extra_memory, second.extra_memory),
        tolerance=min(first.tolerance, second.tolerance),
        semantics=min(first.semantics, second.semantics),
        reason=f"{steps} steps without damaged pipelines, then {second.policy}: {second.reason}",
        slow_steps=steps,
        slow_rate=first.rate_after,
    )


def _with_then(plan: RoutePlan, then: RoutePlan) -> RoutePlan:
    return msgspec.structs.replace(plan, then=then)
