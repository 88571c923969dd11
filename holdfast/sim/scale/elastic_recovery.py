"""Simulates elastic recovery at scale: the policies of core/elastic choose plans, and the price sheet says how long
these take."""

from collections.abc import Mapping

import msgspec

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.layer_owners import busiest_link, missing_layers
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan
from holdfast.core.elastic.plan_ground import Propose, rename_route, survey
from holdfast.core.elastic.proposal import PhaseCosts, Proposal
from holdfast.core.elastic.route_times import count_routes, exchange_routes
from holdfast.model.action import Launch
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, Semantics
from holdfast.sim.scale.scale_state import ScaleState

ELASTIC = "elastic"
DEEPEST = 16  # stages of a pipeline, at most
_LAYERS = 4  # of each stage
_MICROBATCHES = 32  # of each pipeline
_LEAST = 0.75  # of the nodes have to be left
_ROLLBACKS = ("memory rollback", "disk rollback")  # what every policy needs beside itself
SINGLE = ("replace", "reroute", "retemplate", "drop", "hybrid")


class ElasticRecovery:
    """A pipeline whose workers are nodes. At each launch in kept processes, its plan is chosen again."""

    resizes = True

    def __init__(self, state: ScaleState, name: str = ELASTIC) -> None:
        self.name = name
        self._state = state
        setup = state.setup
        stages = max(size for size in range(1, DEEPEST + 1) if setup.nodes % size == 0)
        pipelines = setup.nodes // stages
        self.job = PipelineJob(
            layers=stages * _LAYERS,
            microbatches=pipelines * _MICROBATCHES,
            stages=stages,
            pipelines=pipelines,
            floor=Semantics.FP_ORDER,
        )
        self.costs = expected_costs(state)
        self.choices: dict[str, int] = {}  # policy -> how often it was chosen
        self._members: list[str] = []
        self._plan: RoutePlan | None = None
        self._chosen: Proposal | None = None
        self._spent_s = 0.0

    def least_nodes(self) -> int:
        return max(self.job.stages, int(self._state.setup.nodes * _LEAST))

    def seat_nodes(self, action: Launch) -> bool:
        """Choose a plan for the nodes that have seats now. Return False if all ranks must restore a state, and True if
        the job resumes from the state in its processes."""
        names = [seat.node for seat in action.seats]
        self._take_slow_steps()
        before, self._members = self._members, names
        plan, self._plan, self._chosen = self._plan, None, None
        live = action.keep and plan is not None
        if plan is None or not live:  # all begin anew, as if the whole job had lost those that are not there
            plan = first_plan(self.job, self._state.setup.nodes)
            before = [*names, *(f"absent {number}" for number in range(len(names), self._state.setup.nodes))]
        if before == names and not live:
            self._plan = plan
            return False
        forked = live and set(names) == set(before)  # nobody has left: a rank has
        situation = situation_of(plan, before, names, self._state.course.newest, forked=forked)
        self._chosen = self._choose(situation)
        self._plan = self._chosen.plan
        return live and not self._plan.rollback

    def _choose(self, situation: PipelineSituation) -> Proposal:
        """Choose a plan. If a layer has no live owner, assume that storage has all layers."""
        if missing_layers(self.job, situation.held):
            situation = msgspec.structs.replace(situation, stored=0)
        policies = policies_of(self.name, lost=bool(situation.lost))
        chosen = choose_plan(self.job, situation, self.costs, policies).chosen
        chosen = chosen or choose_plan(self.job, situation, self.costs, policies_of(ELASTIC, lost=False)).chosen
        assert chosen is not None, "no plan for what is left"
        self.choices[chosen.policy] = self.choices.get(chosen.policy, 0) + 1
        return chosen

    def resume_s(self) -> float:
        """Return how long it takes until the first step of the chosen plan. Use it in later estimates."""
        prices, chosen = self._state.prices, self._chosen
        if chosen is None:
            return prices("groups", "go_on")
        regrouped = chosen.plan.then is not None or chosen.downtime_s["rebuild"] == self.costs.regroup_s
        groups_s = prices("stage_groups") if regrouped else prices("groups")
        self.costs = self.costs.seen_phase("regroup" if regrouped else "rebuild", groups_s)
        warm_s = prices("fork") if chosen.downtime_s.get("warm") else 0.0
        return prices("choose", "go_on") + groups_s + warm_s + self._sent_s(chosen.plan)

    def _sent_s(self, plan: RoutePlan) -> float:
        if not plan.transfers:
            return 0.0
        layer_s = self._state.prices("layers_sent") / _LAYERS
        self.costs = self.costs.seen_phase("transfer", layer_s)
        return busiest_link(plan.transfers) * layer_s

    def begin_steps(self) -> None:
        """Let steps begin, and record how much slower they are under the chosen plan."""
        chosen, now, course = self._chosen, self._state.now, self._state.course
        if chosen is None:
            return
        at = now
        if chosen.plan.then is not None:
            at = now + chosen.slow_steps * self._state.setup.step_s / max(0.01, chosen.slow_rate)
            course.slow_steps(now, at, 1 - chosen.slow_rate)
            switch_s = self._state.prices("stage_groups", "go_on") + self._sent_s(chosen.plan.then)
            course.slow_steps(at, at + switch_s, 1.0)
            at += switch_s
            self._state.call_later(at - now, self._take_plan, chosen, chosen.plan.then)
        if chosen.rate_after < 1 and chosen.plan.then is None and not all(chosen.plan.held):
            at = self._return_to_whole(at, chosen)
        elif chosen.rate_after < 1:
            course.slow_steps(at, float("inf"), 1 - chosen.rate_after)

    def _return_to_whole(self, at: float, chosen: Proposal) -> float:
        """After one step, leave a plan in which a node has no work, and form the pipelines anew. Return the time at
        which this is done. If it would gain nothing, keep the plan and return `at`."""
        course, step_s = self._state.course, self._state.setup.step_s
        plan = msgspec.structs.replace(chosen.plan, transfers=())
        situation = situation_of(plan, self._members, self._members, course.newest, forked=False)
        back = POLICIES["retemplate"](survey(self.job, situation, self.costs))
        if not isinstance(back, Proposal) or back.rate_after <= chosen.rate_after:
            course.slow_steps(at, float("inf"), 1 - chosen.rate_after)
            return at
        until = at + step_s / max(0.01, chosen.rate_after)
        course.slow_steps(at, until, 1 - chosen.rate_after)
        switch_s = self._state.prices("groups", "go_on") + self._sent_s(back.plan)
        course.slow_steps(until, until + switch_s, 1.0)
        if back.rate_after < 1:
            course.slow_steps(until + switch_s, float("inf"), 1 - back.rate_after)
        self._state.call_later(until + switch_s - at, self._take_plan, chosen, back.plan)
        return until + switch_s

    def _take_plan(self, chosen: Proposal, plan: RoutePlan) -> None:
        """Make `plan` the current plan, unless another proposal has replaced `chosen` or training has stalled."""
        if self._chosen is chosen and not self._state.course.stalled:
            self._plan = plan

    def _take_slow_steps(self) -> None:
        for start, end, part in self._state.course.take_slow_steps(self._state.now):
            self._state.book.add_slow_stretch(start, end - start, part, "fewer nodes, or a plan in two parts")

    def end_job(self) -> None:
        self._take_slow_steps()


def policies_of(name: str, *, lost: bool) -> Mapping[str, Propose]:
    """Return the policies to choose from. The name "elastic" stands for all but stochastic wiring. Another name stands
    for its policy and for the rollbacks, which every policy needs. If no node was `lost`, "retemplate", which forms the
    pipelines anew, takes the place of the named policy."""
    if name == ELASTIC:  # wiring by lot is rerouting where all are alike, and takes seconds to draw for thousands
        return {one: propose for one, propose in POLICIES.items() if one != "stochastic wiring"}
    return {one: POLICIES[one] for one in (name if lost else "retemplate", *_ROLLBACKS)}


def situation_of(plan: RoutePlan, before: list[str], names: list[str], step: int, *, forked: bool) -> PipelineSituation:
    """Return the situation in which a new plan is chosen, for the nodes in `names`, which have seats now. `plan` was
    made for the nodes in `before`; the situation has it with the new numbers of the nodes, and with the layers that
    lost nodes held. With `forked`, a rank was forked again and so one node holds no layers."""
    places = {name: number for number, name in enumerate(names)}
    lost = [number for number, name in enumerate(before) if name not in places]
    renumbered = {number: places[name] for number, name in enumerate(before) if name in places}
    renumbered |= {number: -1 - order for order, number in enumerate(lost)}
    kept: list[tuple[int, ...]] = [()] * len(names)
    for number, mine in enumerate(plan.held):
        if renumbered[number] >= 0:
            kept[renumbered[number]] = mine
    held = list(kept)
    moved = {number: to for number, to in renumbered.items() if number != to}
    routes = {id(route): rename_route(route, moved) for route, _ in count_routes(plan.routes)}
    if forked:
        held[0] = ()  # one of them, whichever it is, forks a rank and gets its state again
    earlier = RoutePlan(held=tuple(kept), routes=exchange_routes(plan.routes, routes))
    return PipelineSituation(
        committed=step,
        held=tuple(held),
        earlier=earlier,
        lost=tuple(plan.held[number] for number in lost),
    )


def expected_costs(state: ScaleState) -> PhaseCosts:
    """Return how long phases are expected to take before any is measured: the means of their prices."""
    prices, setup = state.prices, state.setup
    rate = state.mix.rate if setup.rate is None else setup.rate
    return PhaseCosts(
        detect_s=prices.mean_price("silence"),
        abort_s=prices.mean_price("park"),
        agree_s=prices.mean_price("tell", "go_on"),
        plan_s=prices.mean_price("choose"),
        rebuild_s=prices.mean_price("groups"),
        regroup_s=prices.mean_price("stage_groups"),
        transfer_s=prices.mean_price("layers_sent") / _LAYERS,
        memory_s=prices.mean_price("peer_state") / _LAYERS,
        storage_s=prices.mean_price("stored_state") / _LAYERS,
        restart_s=prices.mean_price("first_step"),
        warm_s=prices.mean_price("fork"),
        step_s=setup.step_s,
        kappa=prices.share_value("kappa"),
        repair_s=prices.mean_price("acquire", "boot"),
        change_s=86400 / max(1e-9, rate * setup.nodes),
        failures_per_s=rate / 86400,
    )
