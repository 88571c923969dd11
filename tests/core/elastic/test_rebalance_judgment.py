"""When work moves while nobody fails: not if workers are alike, not to and fro, and never so that a layer, a microbatch
or a worker's memory comes short. Jobs, speeds and noise are drawn at random."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.measured_speeds import fit_speeds
from holdfast.core.elastic.plan_ground import semantics_of, survey
from holdfast.core.elastic.proposal import PhaseCosts, Proposal
from holdfast.core.elastic.rebalance_judgment import (
    LOOK_STEPS,
    BalanceLook,
    BalanceVerdict,
    WorkBalance,
    judge_balance,
)
from holdfast.core.elastic.route_times import layer_times
from holdfast.core.elastic.split_pass_choice import passes_span
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, Semantics
from tests.core.elastic.plan_oracle import faults_of

UNIT_S = 0.05


class Move(NamedTuple):
    """A move, with the plan that it left and the world in which it was made."""

    at: int  # which look
    before: RoutePlan
    proposal: Proposal
    speeds: tuple[float, ...]


class World:
    """A pipeline whose workers have speeds, and a judge who sees them through noise."""

    def __init__(
        self, job: PipelineJob, workers: int, *, noise: float, seed: int, works: tuple[float, ...] = ()
    ) -> None:
        self.job, self.plan = job, first_plan(job, workers)
        self.speeds = (1.0,) * workers
        self.works = works or (1.0,) * job.layers
        self.balance, self.steps, self.committed = WorkBalance(), 0, 0
        self.moves: list[Move] = []
        self._noise, self._rng = noise, Random(seed)

    def step_s(self, plan: RoutePlan) -> float:
        times = layer_times(self.job, PhaseCosts(layer_s=self.works), self.speeds)
        return UNIT_S * passes_span(PhaseCosts(), times, plan, halves=False)

    def look(self) -> BalanceLook:
        passed = [
            {la for r in self.plan.routes for s in r if s.worker == w for la in range(s.first, s.end)}
            for w in range(len(self.speeds))
        ]
        wander = self._rng.uniform
        timed = [
            {la: UNIT_S * self.works[la] / speed * wander(1 - self._noise, 1 + self._noise) for la in mine}
            for mine, speed in zip(passed, self.speeds, strict=True)
        ]
        speeds = fit_speeds(timed, self.job.layers, self.balance.speeds)
        costs = PhaseCosts(step_s=self.step_s(self.plan) * wander(1 - self._noise, 1 + self._noise))
        costs = msgspec.structs.replace(costs, layer_s=speeds.layer_s, unit_s=speeds.unit_s)
        return BalanceLook(committed=self.committed, speeds=speeds, costs=costs, steps=self.steps, left=10_000)

    def pass_looks(self, looks: int) -> None:
        for _ in range(looks):
            self.committed += LOOK_STEPS
            self.steps += LOOK_STEPS
            verdict = judge_balance(self.job, self.plan, self.balance, self.look())
            self.balance = verdict.balance
            if verdict.move is not None:
                proposal = verdict.move.proposal
                self.moves.append(Move(self.committed // LOOK_STEPS, self.plan, proposal, self.speeds))
                self.plan, self.steps = proposal.plan, 0


def draw_world(seed: int, noise: float) -> World:
    rng = Random(seed)
    stages, pipelines = rng.randint(1, 4), rng.randint(1, 4)
    layers = stages * rng.randint(1, 3) + rng.randint(0, 2)
    job = PipelineJob(
        layers=layers,
        microbatches=pipelines * rng.randint(1, 6) + rng.randint(0, 2),
        stages=stages,
        ordered=rng.random() < 0.7,
        floor=rng.choice([Semantics.EXACT, Semantics.EXACT, Semantics.FP_ORDER]),
        capacity=rng.choice([0, 0, -(-layers // stages) + 1, layers]),
    )
    works = tuple(rng.choice([1.0, 1.0, 2.0, 0.4]) for _ in range(layers)) if rng.random() < 0.3 else ()
    return World(job, stages * pipelines + rng.choice([0, 0, 1]), noise=noise, seed=seed, works=works)


def slowed(world: World, seed: int) -> tuple[float, ...]:
    rng = Random(seed + 7)
    return tuple(rng.choice([1.0, 1.0, 0.6, 0.25]) for _ in world.speeds)


@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_nothing_moves_between_workers_and_layers_that_are_alike(noise: float) -> None:
    for stages, pipelines, layers, each in [(1, 1, 3, 4), (2, 2, 4, 4), (4, 1, 8, 8), (2, 3, 6, 2), (3, 2, 9, 5)]:
        job = PipelineJob(layers=layers, microbatches=pipelines * each, stages=stages, ordered=True)
        world = World(job, stages * pipelines, noise=noise, seed=1)
        world.pass_looks(60)
        assert world.moves == []


@pytest.mark.parametrize("part", range(4))
def test_work_does_not_move_to_and_fro(part: int) -> None:
    moved = 0
    for seed in range(15 * part, 15 * part + 15):
        world = draw_world(seed, noise=0.08)
        world.pass_looks(10)
        early = len(world.moves)
        world.speeds = slowed(world, seed)
        world.pass_looks(30)
        settled = len(world.moves)
        world.pass_looks(30)
        assert early <= 2 and settled - early <= 3, (seed, early, settled)
        assert len(world.moves) == settled, f"{seed}: with the same speeds, work moves again"
        moved += settled > early
    assert moved > 3, "and where workers became slow, work did move"


@pytest.mark.slow
def test_noise_beyond_what_is_taken_for_noise_moves_work_ever_less() -> None:
    for seed in range(4):
        world = draw_world(seed, noise=0.6)
        world.pass_looks(120)
        early, late = (sum(move.at <= 60 for move in world.moves), sum(move.at > 60 for move in world.moves))
        assert early + late <= 25 and late <= 8, (seed, [move.at for move in world.moves])


def moves_in(seeds: range) -> Iterator[tuple[World, Move]]:
    for seed in seeds:
        world = draw_world(seed, noise=0.05)
        world.pass_looks(4)
        world.speeds = slowed(world, seed)
        world.pass_looks(20)
        yield from ((world, move) for move in world.moves)


def test_every_move_can_be_followed_and_keeps_floor_memory_and_batch() -> None:
    followed = with_layers = 0
    for world, move in moves_in(range(80)):
        plan = move.proposal.plan
        situation = PipelineSituation(
            committed=plan.resume_step - 1,
            held=move.before.held,
            earlier=RoutePlan(held=move.before.held, routes=move.before.routes),
        )
        assert faults_of(world.job, situation, move.proposal) == []
        assert move.proposal.semantics >= world.job.floor
        assert semantics_of(survey(world.job, situation, PhaseCosts()), plan) == move.proposal.semantics
        assert max(map(len, plan.held)) <= (world.job.capacity or max(map(len, move.before.held)))
        assert [bool(mine) for mine in plan.held] == [bool(mine) for mine in move.before.held], "standbys stand by"
        followed += 1
        with_layers += bool(plan.transfers)
    assert followed > 20 and with_layers > 5


def test_a_move_makes_steps_faster() -> None:
    """If in each stage somebody has full speed: whom nobody can be compared with counts as fast."""
    seen = 0
    for seed in range(60):
        world = draw_world(seed, noise=0.05)
        speeds = slowed(world, seed)
        kinds = {
            mine: max(s for s, had in zip(speeds, world.plan.held, strict=True) if had == mine)
            for mine in world.plan.held
        }
        world.speeds = tuple(
            1.0 if kinds[mine] < 1 else speed for speed, mine in zip(speeds, world.plan.held, strict=True)
        )
        world.pass_looks(10)
        for move in world.moves[:1]:
            assert world.step_s(move.proposal.plan) < world.step_s(move.before), (seed, move.proposal.reason)
            seen += 1
    assert seen > 10


def test_all_who_know_the_same_judge_the_same() -> None:
    moved = 0
    for seed in range(40):
        world = draw_world(seed, noise=0.05)
        world.speeds = slowed(world, seed)
        for _ in range(4):
            world.committed += LOOK_STEPS
            world.steps += LOOK_STEPS
            known = (world.plan, world.balance, world.look())
            kinds = (RoutePlan, WorkBalance, BalanceLook)
            copies = [
                msgspec.json.decode(msgspec.json.encode(one), type=kind) for one, kind in zip(known, kinds, strict=True)
            ]
            one, other = judge_balance(world.job, *known), judge_balance(world.job, *copies)
            assert msgspec.json.encode(one) == msgspec.json.encode(other)
            world.balance = one.balance
            moved += one.move is not None
    assert moved > 5


def test_a_move_must_pay_before_the_job_ends_and_within_as_many_steps_as_the_plan_has_lasted() -> None:
    job = PipelineJob(layers=4, microbatches=8, stages=2, ordered=True)
    world = World(job, 4, noise=0.0, seed=1)
    world.speeds = (1.0, 1.0, 1.0, 0.25)
    world.balance = WorkBalance(needed=1)

    def verdict(plan_s: float, steps: int, left: int) -> BalanceVerdict:
        look = world.look()
        costs = msgspec.structs.replace(look.costs, plan_s=plan_s)
        look = msgspec.structs.replace(look, costs=costs, steps=steps, left=left)
        return judge_balance(job, world.plan, world.balance, look)

    cheap = verdict(0.1, 100, 100).move
    assert cheap is not None
    gain_s = world.step_s(world.plan) - cheap.step_s
    assert verdict(50 * gain_s, 100, 100).move is not None
    assert verdict(50 * gain_s, 40, 100).move is None
    assert verdict(50 * gain_s, 100, 40).move is None


def test_a_move_that_did_not_help_makes_the_next_one_need_more_looks() -> None:
    job = PipelineJob(layers=4, microbatches=8, stages=2, ordered=True)
    world = World(job, 4, noise=0.0, seed=1)
    world.speeds = (1.0, 1.0, 1.0, 0.25)
    world.pass_looks(2)
    [move] = world.moves
    assert move.at == 2, "two looks agree"
    look = world.look()
    kept = judge_balance(job, world.plan, world.balance, look).balance.needed
    as_before = msgspec.structs.replace(look.costs, step_s=world.step_s(move.before))
    lost = judge_balance(job, world.plan, world.balance, msgspec.structs.replace(look, costs=as_before)).balance.needed
    assert (kept, lost) == (2, 4)
