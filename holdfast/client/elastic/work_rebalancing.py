"""Moves work between the workers of a pipeline while nobody fails: microbatches, and layers with their states.

Every few steps, workers exchange what they have timed. All judge by the same function whether another plan would be so
much faster that the move pays. If it would, all follow it from the next step on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from holdfast.client.checkpointing.pickle_free_collectives import gather_values
from holdfast.client.elastic.held_layers import HeldLayers
from holdfast.client.elastic.layer_state import HOST
from holdfast.client.elastic.pipeline_recovery import PipelineRecovery, print_line
from holdfast.client.elastic.recovery_account import (
    PhaseTimes,
    StepWatch,
    compare_phases,
    describe_slow,
    gather_longest,
    learn_costs,
)
from holdfast.client.elastic.recovery_settlement import RankReport, choose_costs, compare_workers
from holdfast.core.elastic.rebalance_judgment import (
    LOOK_STEPS,
    BalanceLook,
    BalanceVerdict,
    WorkBalance,
    judge_balance,
)
from holdfast.core.elastic.rebalanced_plans import RebalancedPlan
from holdfast.model.pipeline_routes import RoutePlan, Semantics


class WorkMove(NamedTuple):
    """What one move of work did, what was expected of it, and what came of it."""

    step: int  # after which it was made
    layers: int  # that were sent
    speeds: tuple[float, ...]  # of the workers, as they were measured; () if all were alike
    shares_before: tuple[int, ...]  # of each worker: layers, times microbatches of a step that it computes them for
    shares: tuple[int, ...]  # and after the move
    semantics: Semantics
    expected_s: float  # for which training waits
    took_s: float
    phases: dict[str, PhaseTimes]
    before_step_s: float  # what a step took before
    expected_step_s: float  # what it was expected to take afterwards
    took_step_s: float = 0.0  # what it took in the first steps afterwards; 0: they have not been made yet


class WorkRebalancing:
    """Takes part, on behalf of one worker, in the looks at how the work is divided."""

    def __init__(self, held: HeldLayers, recovery: PipelineRecovery, *, named: bool) -> None:
        """With `named`, the user wants work to move."""
        self._held, self._phases, self._recovery, self._named = held, recovery.phases, recovery, named
        self._balance, self._watch = WorkBalance(), StepWatch()
        self.moves: list[WorkMove] = []

    def forget(self) -> None:
        """Begin anew, because workers have other numbers now."""
        self._balance = WorkBalance()
        self._watch.end()

    def look(self, total: int) -> bool:
        """Look at how the work is divided if it is time, and return whether it has moved. `total` is the job's last
        step. All workers call this between two steps."""
        held = self._held
        steps = held.times.steps  # on a GPU passes are not timed
        due = steps > 0 and steps % LOOK_STEPS == 0 and held.bare.then is None
        if not self._named or not due or held.device != HOST:
            return False
        phases = self._phases
        step_s, rest_s = phases.step_s, phases.rest_s
        phases.begin()
        phases.enter("plan")
        verdict = self._judge(total, step_s, rest_s)
        if verdict.move is None:
            phases.enter("")
            return False
        before = held.bare
        self._recovery.switch_plan(verdict.move.proposal.plan)
        phases.enter("")
        self._note_move(verdict, verdict.move, before)
        return True

    def _judge(self, total: int, step_s: float, rest_s: float) -> BalanceVerdict:
        held = self._held
        mine = RankReport(
            step_s=step_s,
            rest_s=rest_s,
            passes=held.times.list_layers(),
            send_s=held.times.median_send_s(),
            costs=held.costs,
            incidents=held.incidents,
        )
        told = gather_values((mine, total), tuple[RankReport, int])
        reports = [report for report, _ in told]
        speeds = compare_workers(reports, held.job.layers, self._balance.speeds)
        look = BalanceLook(
            committed=held.committed,
            speeds=speeds,
            costs=choose_costs(reports, speeds),
            steps=held.times.steps,
            left=min(last for _, last in told) - held.committed,
        )
        verdict = judge_balance(held.job, held.bare, self._balance, look)
        self._balance = verdict.balance
        return verdict

    def _note_move(self, verdict: BalanceVerdict, move: RebalancedPlan, before: RoutePlan) -> None:
        held = self._held
        phases = compare_phases(move.proposal, gather_longest(self._phases.took_s))
        held.costs = learn_costs(held.costs, move.proposal, phases)
        self.moves.append(
            WorkMove(
                step=held.committed,
                layers=len(held.plan.transfers),
                speeds=verdict.balance.speeds.speeds,
                shares_before=count_shares(before),
                shares=count_shares(held.bare),
                semantics=move.proposal.semantics,
                expected_s=move.move_s,
                took_s=sum(times.took_s for times in phases.values()),
                phases=phases,
                before_step_s=verdict.step_s,
                expected_step_s=move.step_s,
            )
        )
        self._watch.begin()
        _say(describe_move(self.moves[-1]))

    def watch_step(self, took_s: float) -> None:
        """Hear of a step that was made. Once enough were made after a move, record what a step takes."""
        mean_s = self._watch.add_step(took_s)
        if mean_s is not None:
            self.moves[-1] = self.moves[-1]._replace(took_step_s=mean_s)
            _say(describe_steps_since(self.moves[-1]))


def count_shares(plan: RoutePlan) -> tuple[int, ...]:
    """Return for each worker how many passes of one microbatch through one layer it makes in a step."""
    shares = [0] * len(plan.held)
    for route in plan.routes:
        for segment in route:
            shares[segment.worker] += segment.end - segment.first
    return tuple(shares)


def describe_move(move: WorkMove) -> str:
    """Return a line about a move: why, what moved, its expected cost and its real cost."""
    slow = describe_slow(move.speeds)
    moved = f"{move.layers} layers were sent" if move.layers else "microbatches take other routes"
    phases = ", ".join(f"{name} {times.took_s:.2f} for {times.expected_s:.2f}" for name, times in move.phases.items())
    phases = f" ({phases})" if phases else ""
    return (
        f"work moves after step {move.step}{f' ({slow})' if slow else ''}: {moved}, and workers make "
        f"{_list_numbers(move.shares)} passes of a step instead of {_list_numbers(move.shares_before)}; "
        f"{move.semantics.name}; {move.took_s:.2f} s, {move.expected_s:.2f} s expected{phases}"
    )


def describe_steps_since(move: WorkMove) -> str:
    return (
        f"a step takes {move.took_step_s:.3f} s since work has moved, {move.expected_step_s:.3f} s expected, "
        f"{move.before_step_s:.3f} s before"
    )


def _list_numbers(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return "/".join(map(str, numbers[:16])) + more


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print_line(text)
