"""Study of the two replay methods that find a faulty machine; it runs their real code for any number of nodes.

Costs are counted in steps of the job: the repeated steps, plus the launch times divided by the time of a step."""

from collections.abc import Sequence
from random import Random

import msgspec

from holdfast.core.replay import detection_odds
from holdfast.core.replay.node_grid import Nodes, ReplayPlan, UnfitError, fit_grid, plan_grid
from holdfast.core.replay.regrouped_replay import DualPhaseReplay, ReplayLimits, ReplayRuling, RulingKind
from holdfast.core.replay.twin_ruling import Referee, TwinComparison, TwinLimits, WatchTwins
from holdfast.sim import cost_model

_WRONG = 1  # added to what a faulty node signs
_POINTS = 400  # at which the costs are compared
_LEAST_Q = 1e-4


class ReplaySetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a study; nodes are ordered by replica, then by stage."""

    nodes: int = 1200
    replica: int = 8  # nodes of a whole replica
    stages: int = 8  # of its pipeline
    group: int = 0  # nodes of a replay group; 0: as many as fit
    steps: int = 5  # of one replay
    confidence: float = 0.95
    most: int = 200  # repeats of a phase
    trials: int = 400
    seed: int = 1
    step_s: float = 10.0
    launch_s: float = msgspec.field(default_factory=lambda: mean_cost("first_step"))  # of the whole job
    group_launch_s: float = msgspec.field(default_factory=lambda: mean_cost("group_step"))  # of a few nodes


class NamingRate(msgspec.Struct, frozen=True, kw_only=True):
    """How many trials named exactly the faulty node, with confidence bounds and the rate that theory predicts."""

    found: int
    trials: int
    low: float
    high: float
    reckoned: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.reckoned <= self.high


class ReplayLine(msgspec.Struct, frozen=True, kw_only=True):
    """Results of dual-phase and two-half replays for one `q`, the chance that one replay shows the fault."""

    q: float
    repeats: int
    dual: NamingRate
    dual_steps: float  # done again, on average
    dual_cost: float  # with launches
    halves: NamingRate
    halves_steps: float
    halves_cost: float


class TwoFaulty(msgspec.Struct, frozen=True, kw_only=True):
    """Results for two faulty machines at once, with a fault that every replay reproduces."""

    trials: int
    held: int  # both were in the set
    suspects: float  # in it, on average


class CostCrossing(msgspec.Struct, frozen=True, kw_only=True):
    """The least q from which a dual-phase replay costs no more than a two-half replay, per machine named. A value is
    None if there is no such q. `by_steps` counts only steps; `with_launches` includes the costs of launches."""

    steps: int  # of one replay
    by_steps: float | None
    with_launches: float | None


class ReplayStudy(msgspec.Struct, frozen=True, kw_only=True):
    setup: ReplaySetup
    m: int
    n: int
    left_over: int
    lines: tuple[ReplayLine, ...]
    two: TwoFaulty
    crossings: tuple[CostCrossing, ...]


def run_study(setup: ReplaySetup, chosen: tuple[float, ...]) -> ReplayStudy:
    """Run the study for the chosen values of q. Raise UnfitError if the nodes cannot be divided into replicas, stages
    and groups."""
    made = plan_replay(setup)
    rng = Random(setup.seed)
    lines = tuple(_study_chance(setup, made, q, rng) for q in chosen)
    lengths = sorted({1, 2, setup.steps, 10})
    return ReplayStudy(
        setup=setup,
        m=made.m,
        n=made.n,
        left_over=len(made.left_over),
        lines=lines,
        two=_study_two_faulty(setup, made, rng),
        crossings=tuple(find_crossing(setup, steps) for steps in lengths),
    )


def mean_cost(name: str) -> float:
    """Return the mean duration of the named operation, in seconds."""
    (row,) = (row for row in cost_model.load_costs() if row.name == name)
    return (row.least_s + row.most_s) / 2


def plan_replay(setup: ReplaySetup) -> ReplayPlan:
    if setup.replica % setup.stages:
        raise UnfitError(f"{setup.replica} nodes of a replica are not {setup.stages} stages")
    if setup.group % setup.replica:
        raise UnfitError(f"a group of {setup.group} nodes does not hold whole replicas of {setup.replica}")
    m, n = (setup.group, setup.nodes // setup.group) if setup.group else fit_grid(setup.nodes, setup.replica)
    return plan_grid([f"n{x}" for x in range(setup.nodes)], m, n)


def play_replay(replay: DualPhaseReplay, bad: set[str], q: float, rng: Random) -> tuple[ReplayRuling, int]:
    """Simulate a dual-phase replay in which the nodes in `bad` are faulty. Return the nodes that it names (its ruling),
    and how many rounds of replays it took."""
    waves = 0
    while not isinstance(asked := replay.next_wave(), ReplayRuling):
        waves += 1
        for group in asked.groups:
            struck = () if bad.isdisjoint(group.nodes) else bad.intersection(group.nodes)
            replay.on_group_result(group, any(rng.random() < q for _ in struck))
    return asked, waves


def play_halves(halves: TwinComparison, bad: tuple[int, int, int], p: float, rng: Random) -> ReplayRuling:
    """Simulate a two-half replay; the fault at `bad` (replica, stage, node) shows in a step with chance p."""
    replica, stage, node = bad
    wide = len(halves.nodes[0][0])
    stages = range(len(halves.nodes[0]))
    good = tuple(stages)
    clean: dict[int, Sequence[int]] = {r: good for pair in halves.pairs for r in pair}
    wrong = {**clean, replica: tuple(s + _WRONG * (s >= stage) for s in stages)}
    step = 0
    while not isinstance(asked := halves.next_move(), ReplayRuling):
        step += 1
        struck = rng.random() < p
        match asked:
            case WatchTwins(inside=None):
                halves.on_signatures(step, wrong if struck else clean)
            case WatchTwins(pairs=((one, other),)):
                shares = [int(struck and one == replica and place == node) for place in range(wide)]
                halves.on_signatures(step, {one: shares, other: [0] * wide})
            case Referee(stage=at, replica=by):
                halves.on_referee_signature(at + _WRONG * (struck and by == replica and at >= stage))
    return asked


def _study_chance(setup: ReplaySetup, made: ReplayPlan, q: float, rng: Random) -> ReplayLine:
    limits = ReplayLimits(q=q, confidence=setup.confidence, most=setup.most)
    repeats = detection_odds.repeats_needed(q, setup.confidence, setup.most)
    found = waves = 0
    for _ in range(setup.trials):
        bad = f"n{rng.randrange(setup.nodes)}"
        ruling, took = play_replay(DualPhaseReplay(made, limits), {bad}, q, rng)
        found += (ruling.how, ruling.nodes) == (RulingKind.ONE, (bad,))
        waves += took
    named, steps = _study_halves(setup, q, rng)
    p = detection_odds.step_odds(q, setup.steps)
    shown = detection_odds.shown_odds(p, _watched_steps(setup, q))
    launches = setup.launch_s + shown * setup.group_launch_s * (1 + (setup.replica > setup.stages))
    waves_each = waves / setup.trials
    return ReplayLine(
        q=q,
        repeats=repeats,
        dual=_make_rate(found, setup.trials, detection_odds.dual_phase_odds(q, repeats)),
        dual_steps=waves_each * setup.steps,
        dual_cost=waves_each * (setup.steps + setup.group_launch_s / setup.step_s),
        halves=_make_rate(named, setup.trials, _reckon_rate(setup, p, _watched_steps(setup, q))),
        halves_steps=steps,
        halves_cost=steps + launches / setup.step_s,
    )


def _watched_steps(setup: ReplaySetup, q: float) -> int:
    """Return the step limit of the two-half replay: as many steps as both phases of the dual-phase replay may take."""
    return 2 * setup.steps * detection_odds.repeats_needed(q, setup.confidence, setup.most)


def _reckon_rate(setup: ReplaySetup, p: float, steps: int) -> float:
    """Return the chance that a two-half replay names the faulty node. With several nodes in a stage, the fault must
    show twice: first to find the stage, then to find the node."""
    if setup.replica == setup.stages or p == 1.0:
        return detection_odds.shown_odds(p, steps)
    # The referee does a step, too: the last at which a first showing still leaves one to look inside is two before.
    return sum(p * (1 - p) ** (at - 1) * detection_odds.shown_odds(p, max(0, steps - at - 1)) for at in range(1, steps))


def _study_halves(setup: ReplaySetup, q: float, rng: Random) -> tuple[int, float]:
    nodes = _node_layout(setup)
    limits = TwinLimits(steps=_watched_steps(setup, q), confidence=setup.confidence)
    p = detection_odds.step_odds(q, setup.steps)
    found = steps = 0
    for _ in range(setup.trials):
        halves = TwinComparison(nodes, limits)
        bad = rng.randrange(2 * len(halves.pairs)), rng.randrange(setup.stages), rng.randrange(len(nodes[0][0]))
        ruling = play_halves(halves, bad, p, rng)
        found += (ruling.how, ruling.nodes) == (RulingKind.ONE, (nodes[bad[0]][bad[1]][bad[2]],))
        steps += halves.steps
    return found, steps / setup.trials


def _node_layout(setup: ReplaySetup) -> tuple[tuple[Nodes, ...], ...]:
    wide = setup.replica // setup.stages
    return tuple(
        tuple(tuple(f"n{r * setup.replica + s * wide + w}" for w in range(wide)) for s in range(setup.stages))
        for r in range(setup.nodes // setup.replica)
    )


def _study_two_faulty(setup: ReplaySetup, made: ReplayPlan, rng: Random) -> TwoFaulty:
    names = [f"n{x}" for x in range(setup.nodes)]
    held = suspects = 0
    for _ in range(setup.trials):
        bad = set(rng.sample(names, 2))
        ruling, _ = play_replay(DualPhaseReplay(made, ReplayLimits(q=1.0)), bad, 1.0, rng)
        held += bad <= set(ruling.nodes)
        suspects += len(ruling.nodes)
    return TwoFaulty(trials=setup.trials, held=held, suspects=suspects / setup.trials)


def dual_cost(setup: ReplaySetup, q: float, launch_s: float) -> float:
    """Return what a dual-phase replay costs for each machine that it names, in steps: trials that name none count
    too."""
    repeats = detection_odds.repeats_needed(q, setup.confidence, setup.most)
    shown = detection_odds.shown_odds(q, repeats)
    m = setup.group or fit_grid(setup.nodes, setup.replica)[0]
    waves = (1 + shown) * shown / q * (2 if setup.nodes % m else 1)  # who is left over runs in a wave of its own
    return waves * (setup.steps + launch_s / setup.step_s) / shown**2


def halves_cost(setup: ReplaySetup, q: float, launch_s: float, group_launch_s: float) -> float:
    """Return the mean cost of a two-half replay, in steps: of all trials, divided by the number of machines named."""
    p, steps = detection_odds.step_odds(q, setup.steps), _watched_steps(setup, q)
    shown = detection_odds.shown_odds(p, steps)
    inside = setup.replica > setup.stages
    spent = (1 + inside) * shown / p + shown
    launches = launch_s + shown * group_launch_s * (1 + inside)
    return (spent + launches / setup.step_s) / shown ** (1 + inside)


def find_crossing(setup: ReplaySetup, steps: int) -> CostCrossing:
    same = msgspec.structs.replace(setup, steps=steps)
    return CostCrossing(
        steps=steps,
        by_steps=_least_chance(same, 0.0, 0.0),
        with_launches=_least_chance(same, setup.launch_s, setup.group_launch_s),
    )


def _least_chance(setup: ReplaySetup, launch_s: float, group_launch_s: float) -> float | None:
    """Find the least q from which a dual-phase replay costs no more than a two-half replay, up to q = 1. Return None if
    the dual-phase replay costs more even at q = 1."""
    found = None
    for point in range(_POINTS + 1):
        q = _LEAST_Q ** (point / _POINTS)
        if (
            dual_cost(setup, q, group_launch_s)
            > halves_cost(setup, q, launch_s, group_launch_s) + detection_odds.DIGITS
        ):
            break
        found = q
    return found


def _make_rate(found: int, trials: int, reckoned: float) -> NamingRate:
    low, high = detection_odds.wilson_interval(found, trials)
    return NamingRate(found=found, trials=trials, low=low, high=high, reckoned=reckoned)
