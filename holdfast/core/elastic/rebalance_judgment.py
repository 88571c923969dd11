"""Judges while nobody fails whether work should move between workers, such that it never moves to and fro.

At a look, all workers exchange what they have timed. All judge the same from the same numbers. Four things keep the
work where it is while times only wander: speeds that differ from those that count by no more than noise do not count;
a move must save a tenth of a step; several looks in a row must agree; and a move must pay in as many steps as the plan
of today has lasted, because the next change may come as soon as the last one did. If a move saves less than half of
what was expected of it, the next one needs twice as many looks.
"""

import msgspec

from holdfast.core.elastic.measured_speeds import MeasuredSpeeds
from holdfast.core.elastic.plan_faults import plan_faults
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.core.elastic.rebalanced_plans import RebalancedPlan, list_rebalanced
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan

LOOK_STEPS = 8  # between two looks
LEAST_GAIN = 0.1  # of a step
_AGREEING, _MOST_AGREEING = 2, 256  # looks in a row that must favour a move


class MoveExpectation(msgspec.Struct, frozen=True):
    """What was expected of the newest move."""

    before_s: float  # of a step
    expected_s: float


class WorkBalance(msgspec.Struct, frozen=True, kw_only=True):
    """What the judgment remembers from look to look, until ranks change."""

    speeds: MeasuredSpeeds = MeasuredSpeeds()  # as they count
    favoured: int = 0  # looks in a row that favoured a move
    needed: int = _AGREEING
    expected: MoveExpectation | None = None  # until it has been compared with what came
    settled: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # with these speeds and times nothing is gained


class BalanceLook(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers know at a look."""

    committed: int
    speeds: MeasuredSpeeds  # fitted beside those that are remembered
    costs: PhaseCosts  # with what was measured
    steps: int  # that the plan of today has lasted
    left: int  # steps, until the job's end


class BalanceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a look came to."""

    balance: WorkBalance
    move: RebalancedPlan | None = None
    step_s: float = 0.0  # of the plan of today


def judge_balance(job: PipelineJob, plan: RoutePlan, balance: WorkBalance, look: BalanceLook) -> BalanceVerdict:
    """Return whether work moves now, and what is remembered for the next look."""
    balance = _learn_from_move(balance, look.costs.step_s)
    balance = msgspec.structs.replace(balance, speeds=look.speeds)
    if not look.speeds.unit_s or not all(plan.routes):
        return BalanceVerdict(balance=msgspec.structs.replace(balance, favoured=0))
    seen = (look.speeds.speeds, look.speeds.layer_s)
    if balance.settled == seen:
        return BalanceVerdict(balance=msgspec.structs.replace(balance, favoured=0))
    situation = PipelineSituation(
        committed=look.committed,
        held=plan.held,
        earlier=RoutePlan(held=plan.held, routes=plan.routes, halves=plan.halves),
        speeds=look.speeds.speeds,
    )
    step_s, options = list_rebalanced(job, situation, look.costs)
    steps = min(look.steps, look.left)
    better = [one for one in options if step_s - one.step_s > LEAST_GAIN * step_s]
    paying = [one for one in better if (step_s - one.step_s) * steps > one.move_s]
    if not paying:
        settled = None if better else seen
        return BalanceVerdict(balance=msgspec.structs.replace(balance, favoured=0, settled=settled), step_s=step_s)
    favoured = balance.favoured + 1
    if favoured < balance.needed:
        return BalanceVerdict(balance=msgspec.structs.replace(balance, favoured=favoured), step_s=step_s)
    best = min(paying, key=lambda one: round(one.step_s * steps + one.move_s, 9))
    wrong = list(plan_faults(job, situation, best.proposal.plan, best.proposal.semantics))
    assert not wrong, wrong
    expected = MoveExpectation(step_s, best.step_s)
    after = msgspec.structs.replace(balance, favoured=0, expected=expected, settled=None)
    return BalanceVerdict(balance=after, move=best, step_s=step_s)


def _learn_from_move(balance: WorkBalance, step_s: float) -> WorkBalance:
    """Ask for more looks that agree if the newest move did not save half of what was expected, else for fewer."""
    if (was := balance.expected) is None:
        return balance
    kept = was.before_s - step_s >= (was.before_s - was.expected_s) / 2
    needed = max(_AGREEING, balance.needed // 2) if kept else min(_MOST_AGREEING, balance.needed * 2)
    return msgspec.structs.replace(balance, expected=None, needed=needed)
