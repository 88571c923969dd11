"""The account of a pipeline's recovery: what was expected of it, what came of it, and what is learned from the two."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.client.checkpointing.pickle_free_collectives import gather_values
from holdfast.client.elastic.state_moves import STORAGE
from holdfast.core.elastic.expected_liveput import Liveput
from holdfast.core.elastic.hand_over import DeparturePlan
from holdfast.core.elastic.loss_forecast import LossHistory
from holdfast.core.elastic.proposal import PhaseCosts, Proposal
from holdfast.model.pipeline_routes import Semantics

_SETTLING, _SETTLED = 1, 5  # steps after a recovery: the first is not typical, the next ones say what a step takes


class PhaseTimes(NamedTuple):
    """Seconds that a phase of a recovery was expected to take, and took."""

    expected_s: float
    took_s: float


class Recovery(NamedTuple):
    """What one recovery of a pipeline did, why, and how long it took."""

    policy: str
    step: int  # after which the pipeline went on
    again: int  # steps that were committed and are made again
    workers: int  # with which it went on
    semantics: Semantics
    reason: str
    expected_s: float  # without the detection
    took_s: float  # since the first worker's step broke off
    phases: dict[str, PhaseTimes] = {}
    before_step_s: float = 0.0  # what a step took before; 0: none was made
    expected_step_s: float = 0.0  # what it was expected to take afterwards; 0: too few steps were timed to say
    took_step_s: float = 0.0  # what it took in the first steps afterwards; 0: they have not been made yet
    kept: int = 0  # microbatches of the step that broke off, of which all gradients were there
    halves: bool = False  # backward passes are made in two halves from now on


class StepWatch:
    """Times the first steps after a recovery."""

    def __init__(self) -> None:
        self._took_s: list[float] | None = None

    def begin(self) -> None:
        self._took_s = []

    def end(self) -> None:
        self._took_s = None

    def add_step(self, took_s: float) -> float | None:
        """Return the mean time of a step, once enough have been made; None before and afterwards."""
        if self._took_s is None:
            return None
        self._took_s.append(took_s)
        if len(self._took_s) < _SETTLING + _SETTLED:
            return None
        settled, self._took_s = self._took_s[_SETTLING:], None
        return sum(settled) / len(settled)


def gather_longest(took_s: Mapping[str, float]) -> dict[str, float]:
    """Return for each phase what the slowest worker took. All workers call this together."""
    told = gather_values(dict(took_s), dict[str, float])
    return {name: max(mine.get(name, 0.0) for mine in told) for name in sorted({*told[0]}.union(*told))}


def compare_phases(proposal: Proposal, took_s: Mapping[str, float]) -> dict[str, PhaseTimes]:
    """Return expected and real times of the phases. The new groups include the abort: ranks that leave a step cannot
    tell the two apart. The detection is not known to the ranks."""
    expected = {str(name): seconds for name, seconds in proposal.downtime_s.items()}
    expected.pop("detect", None)
    expected["rebuild"] = expected.pop("abort", 0.0) + expected.get("rebuild", 0.0)
    names = [*expected, *(name for name in took_s if name not in expected)]
    found = {name: PhaseTimes(expected.get(name, 0.0), took_s.get(name, 0.0)) for name in names}
    return {name: times for name, times in found.items() if any(times)}


def learn_costs(costs: PhaseCosts, proposal: Proposal, phases: Mapping[str, PhaseTimes]) -> PhaseCosts:
    """Return the costs, with what this recovery took in their running means."""
    for name in ("agree", "plan", "verify", "restart"):  # no process is started again in a recovery like this
        if name in phases:
            costs = costs.seen_phase(name, phases[name].took_s)
    if "rebuild" in phases:
        groups_s = max(0.0, phases["rebuild"].took_s - proposal.downtime_s.get("abort", 0.0))
        costs = costs.seen_phase("rebuild", groups_s).seen_phase("regroup", groups_s)  # here both are made whole
    stored = bool(proposal.plan.sources) and all(source == STORAGE for source in proposal.plan.sources)
    for name, cost in (("move", "transfer"), ("restore", "storage" if stored else "memory")):
        if name in phases and phases[name].expected_s > 0:
            of_one: float = getattr(costs, f"{cost}_s")
            costs = costs.seen_phase(cost, of_one * phases[name].took_s / phases[name].expected_s)
    return costs


def describe_recovery(recovery: Recovery) -> str:
    """Return a line about a finished recovery: what was done, its expected cost and its real cost."""
    again = f"{recovery.again} steps are made again" if recovery.again else "no step is made again"
    kept = f"; of the next one {recovery.kept} microbatches are there already" if recovery.kept else ""
    halves = "; backward passes are made in halves" if recovery.halves else ""
    phases = ", ".join(
        f"{name} {times.took_s:.2f} for {times.expected_s:.2f}" for name, times in recovery.phases.items()
    )
    return (
        f"{recovery.policy} on {recovery.workers} workers after step {recovery.step}: {recovery.reason}; {again}"
        f"{kept}{halves}; {recovery.semantics.name}; {recovery.took_s:.2f} s since a step broke off, "
        f"{recovery.expected_s:.2f} s expected{f' ({phases})' if phases else ''}"
    )


def describe_steps(recovery: Recovery) -> str:
    """Return a line about the first steps after a recovery."""
    expected = f", {recovery.expected_step_s:.3f} s expected" if recovery.expected_step_s else ""
    before = f", {recovery.before_step_s:.3f} s before" if recovery.before_step_s else ""
    return f"a step takes {recovery.took_step_s:.3f} s after {recovery.policy}{expected}{before}"


def describe_forecast(costs: PhaseCosts, liveput: Liveput) -> str:
    """Return a line about past losses, and what they forecast for the plan that was chosen."""
    losses = costs.losses or LossHistory()
    ahead_s = min(costs.repair_s, costs.change_s)
    return (
        f"workers lost: {losses.lost} in {losses.watched_s / 3600:.2f} hours of one worker; in the next "
        f"{ahead_s / 60:.0f} minutes {liveput.expected_s / ahead_s:.1%} of the whole job's training is expected, and a "
        f"layer is lost with a chance of {liveput.rollback_chance:.1%}"
    )


def describe_hand_over(step: int, leaving: Sequence[int], departure: DeparturePlan) -> str:
    """Return a line about what leaving workers have handed over or saved, after which step."""
    given = "others hold all of their layers"
    if departure.transfers:
        given = f"{len(departure.transfers)} layers have gone to others"
    elif departure.saves:
        given = "storage has all layers"
    elif departure.given_up:
        given = f"{departure.given_up} layers are lost with them"
    return f"workers {', '.join(map(str, leaving))} are about to leave after step {step}; {given}"


def describe_slow(speeds: Sequence[float]) -> str:
    """Return a phrase that names workers that were measured to be slow; "" if there are none."""
    slow = [f"{number} ({speed:.2f})" for number, speed in enumerate(speeds) if speed < 1]
    return f"slow workers, by speed: {', '.join(slow)}" if slow else ""
