"""Finds, from the reports that workers exchange after a failure, which step counts and who holds what.

The last exchange of a step is its vote. Each worker has its summed gradients when it enters the vote. So if one worker
has finished the vote, all others can make the step too, and do. If no worker has, all drop the step and make it again.
"""

import statistics
from collections.abc import Sequence

import msgspec

from holdfast.client.elastic.pass_times import LayerPassTimes
from holdfast.core.elastic.loss_forecast import LossHistory
from holdfast.core.elastic.measured_speeds import UNMEASURED, MeasuredSpeeds, fit_speeds
from holdfast.core.elastic.plan_ground import join_segments
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.core.elastic.route_times import Route
from holdfast.model.pipeline_routes import PipelineSituation, RoutePlan, RouteSegment


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker reports about itself when it meets the others in a new generation."""

    meeting: int = 0  # at which its plan was made, counted from the job's first; 0: it has none
    changes: int = 0  # of the plan since that meeting, between two steps; workers have kept their numbers
    worker: int = -1  # its number there
    plan: RoutePlan | None = None
    layers: tuple[tuple[int, int], ...] = ()  # that it holds whole, each with the last step whose update is in it
    handed: tuple[int, ...] = ()  # of these, layers that a worker gave it before it left
    ready: int = 0  # the step whose summed gradients it has in hand; 0: none
    kept_step: int = 0  # the step that it has begun, and of which `kept` is
    kept: tuple[tuple[int, int], ...] = ()  # (layer, microbatch) whose gradient it has
    voted: int = 0  # the last step whose vote it came out of
    totals: tuple[float, ...] = ()  # of that vote: losses by microbatch, then squares of gradients by layer
    snapshots: tuple[tuple[int, int], ...] = ()  # (layer, step) in its memory
    stored: int = -1  # the newest whole step on storage
    broke_at: float = 0.0  # when its step broke off, by the wall clock; 0: it was in none
    watched_s: float = 0.0  # since it met the others last
    announced: int = 0  # workers whose end it was told of since then
    step_s: float = 0.0  # what its steps took lately
    rest_s: float = 0.0  # of that, all but the passes
    passes: tuple[LayerPassTimes, ...] = ()  # of its layers under this plan; () before enough steps were made
    send_s: float = 0.0  # what it takes to hand over one tensor; 0: not known
    costs: PhaseCosts = PhaseCosts()  # as it has measured them
    incidents: int = 0  # in how many
    line: str = ""  # a name for what is written from now on, if it is the first worker


class SettledStep(msgspec.Struct, frozen=True):
    """The step that counts: the newest one that all workers can have made."""

    committed: int
    held: tuple[tuple[int, ...], ...]  # by worker, once those who can have made `committed`
    totals: tuple[float, ...]  # of its vote, for workers that have not made it; () if there are none


def settle_step(reports: Sequence[RankReport]) -> SettledStep:
    """Return the newest step that any worker has made or whose vote it has finished, and each worker's layers then."""
    made = [step for report in reports for _, step in report.layers]
    committed = max([0, *made, *(report.voted for report in reports)])
    held = tuple(
        tuple(
            layer
            for layer, step in report.layers
            if step == committed or (step == committed - 1 and report.ready == committed)
        )
        for report in reports
    )
    totals = next(
        (report.totals for report in reports if report.voted == committed and report.totals),
        (),
    )
    return SettledStep(committed, held, totals)


def describe_situation(reports: Sequence[RankReport], settled: SettledStep) -> PipelineSituation:
    """Return the situation from which routes are chosen. In its earlier plan, workers have the numbers that they have
    now; lost workers have negative numbers."""
    newest = max(report.meeting for report in reports)
    told = {report.worker: rank for rank, report in enumerate(reports) if report.meeting == newest and report.plan}
    plan = _newest_plan(reports, newest)
    gone = [worker for worker in range(len(plan.held)) if worker not in told] if plan else []
    return PipelineSituation(
        committed=settled.committed,
        held=_split_shadows(reports, settled.held, plan, newest, shadows=False),
        shadows=_split_shadows(reports, settled.held, plan, newest, shadows=True),
        earlier=_renumber(
            plan,
            told | {worker: -1 - place for place, worker in enumerate(gone)},
            len(reports),
        ),
        lost=tuple(plan.held[worker] for worker in gone) if plan else (),
        snapshots=tuple(report.snapshots for report in reports),
        stored=min(report.stored for report in reports),
    )


def _newest_plan(reports: Sequence[RankReport], newest: int) -> RoutePlan | None:
    """Return the newest plan of the newest meeting. Amid a change of plan, only some have the new one; whoever has it
    knows that all others hold the layers that it gives them."""
    having = [report for report in reports if report.meeting == newest and report.plan]
    return max(having, key=lambda report: report.changes).plan if having else None


def _split_shadows(
    reports: Sequence[RankReport],
    held: tuple[tuple[int, ...], ...],
    plan: RoutePlan | None,
    newest: int,
    *,
    shadows: bool,
) -> tuple[tuple[int, ...], ...]:
    """Return each worker's layers: with `shadows`, only those that its plan does not give it, else only the rest."""
    own = [
        (*plan.held[report.worker], *report.handed) if plan and report.meeting == newest and report.plan else mine
        for report, mine in zip(reports, held, strict=True)
    ]
    return tuple(
        tuple(layer for layer in mine if (layer not in known) == shadows) for mine, known in zip(held, own, strict=True)
    )


def _renumber(plan: RoutePlan | None, numbers: dict[int, int], world: int) -> RoutePlan | None:
    if plan is None:
        return None
    held: list[tuple[int, ...]] = [()] * world
    for worker, layers in enumerate(plan.held):
        if numbers[worker] >= 0:
            held[numbers[worker]] = layers
    known: dict[tuple[RouteSegment, ...], tuple[RouteSegment, ...]] = {}  # routes of one pipeline stay one object
    for route in plan.routes:
        if route not in known:
            known[route] = tuple(RouteSegment(numbers[s.worker], s.first, s.end) for s in route)
    routes = tuple(known[route] for route in plan.routes)
    return RoutePlan(held=tuple(held), routes=routes, resume_step=plan.resume_step, halves=plan.halves)


def find_finished(reports: Sequence[RankReport], plan: RoutePlan) -> dict[int, Route]:
    """Return the microbatches that were finished before the plan's first step broke off, each with the workers that
    have its gradients, as a route. Each of them still holds the layers in question, and will sum their gradients."""
    owner: dict[tuple[int, int], int] = {}
    for rank, report in enumerate(() if plan.rollback else reports):
        mine = frozenset(plan.held[rank] if report.kept_step == plan.resume_step else ())
        for layer, m in report.kept:
            if layer in mine:
                owner.setdefault((layer, m), rank)
    found: dict[int, Route] = {}
    for m, route in enumerate(plan.routes):
        layers = range(route[-1].end) if route else ()
        if layers and all((layer, m) in owner for layer in layers):
            found[m] = join_segments([RouteSegment(owner[layer, m], layer, layer + 1) for layer in layers])
    return found


def choose_costs(reports: Sequence[RankReport], measured: MeasuredSpeeds) -> PhaseCosts:
    """Return the costs as measured by the worker with the most incidents, but the slowest worker's step time and the
    layer times of `measured`. If nothing was measured, layer times stay those of the incident before."""
    known = max(reports, key=lambda report: report.incidents).costs
    if step_s := max(report.step_s for report in reports):
        known = msgspec.structs.replace(known, step_s=step_s)
    if not measured.unit_s:
        return known
    sends = [report.send_s for report in reports if report.send_s]
    rests = [report.rest_s for report in reports if report.step_s]
    return msgspec.structs.replace(
        known,
        layer_s=measured.layer_s,
        unit_s=measured.unit_s,
        send_s=2 * statistics.median(sends) / measured.unit_s if sends else 0.0,  # forward and backward
        rest_s=min(rests) / measured.unit_s,  # whoever comes last to the sums waits least
        **_share_passes(reports),
    )


def _share_passes(reports: Sequence[RankReport]) -> dict[str, float]:
    """Return which shares of layers' passes are forward, and for weights, as far as that was measured."""
    timed = [(one, one.forward_s + one.backward_s) for report in reports for one in report.passes]
    found = {"forward_share": statistics.median([one.forward_s / total for one, total in timed if total] or [1 / 3])}
    if weights := [one.weights_s / total for one, total in timed if total and one.weights_s]:
        found["weights_share"] = statistics.median(weights)
    return found


def count_losses(costs: PhaseCosts, reports: Sequence[RankReport], situation: PipelineSituation) -> PhaseCosts:
    """Return the costs with what was lost since workers met last, and for how long they were watched."""
    newest = max(report.meeting for report in reports)
    watched_s = max(report.watched_s for report in reports if report.meeting == newest)
    known = sum(report.meeting == newest for report in reports) + len(situation.lost)
    unknown = len(situation.lost) - max(report.announced for report in reports)
    losses = (costs.losses or LossHistory()).add(known, watched_s, max(0, unknown))
    return msgspec.structs.replace(costs, losses=losses)


def compare_workers(reports: Sequence[RankReport], layers: int, known: MeasuredSpeeds = UNMEASURED) -> MeasuredSpeeds:
    """Return how fast workers are and how long layers take, from the passes that workers have timed, and from what was
    `known` of the same workers before."""
    timed = [{one.layer: one.forward_s + one.backward_s for one in report.passes} for report in reports]
    return fit_speeds(timed, layers, known)
