"""Both ways to name a faulty machine by doing the job's work again, on as many nodes as wanted, by their real code.

Costs are counted in steps of the job: those that are done again, and with launches what these take besides.
"""

from collections.abc import Sequence
from random import Random

import msgspec

from holdfast.core.diagnose import chances
from holdfast.core.diagnose.grid import Nodes, Plan, UnfitError, fit, plan
from holdfast.core.diagnose.halves import Halves, HalvesLimits, Referee, Watch
from holdfast.core.diagnose.replay import How, Replay, ReplayLimits, Ruling
from holdfast.sim import costs

_WRONG = 1  # added to what a faulty node signs
_POINTS = 400  # at which the costs are compared
_LEAST_Q = 1e-4


class Trying(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Nodes are laid out replica by replica, stage by stage."""

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
    launch_s: float = msgspec.field(default_factory=lambda: modelled("first_step"))  # of the whole job
    group_launch_s: float = msgspec.field(default_factory=lambda: modelled("group_step"))  # of a few nodes


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """So many of the trials named the faulty node and nobody else."""

    found: int
    trials: int
    low: float
    high: float
    reckoned: float

    @property
    def agrees(self) -> bool:
        return self.low <= self.reckoned <= self.high


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One q, both ways."""

    q: float
    repeats: int
    dual: Rate
    dual_steps: float  # done again, on average
    dual_cost: float  # with launches
    halves: Rate
    halves_steps: float
    halves_cost: float


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two machines faulty at once, with a fault that always shows."""

    trials: int
    held: int  # both were in the set
    suspects: float  # in it, on average


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """From which q on the dual-phase replay costs less for every machine named; None: for none."""

    steps: int  # of one replay
    by_steps: float | None
    with_launches: float | None


class Study(msgspec.Struct, frozen=True, kw_only=True):
    setup: Trying
    m: int
    n: int
    left_over: int
    lines: tuple[Line, ...]
    two: Pair
    crossings: tuple[Crossing, ...]


def study(setup: Trying, chosen: tuple[float, ...]) -> Study:
    """Raises UnfitError where nodes and replicas do not go together."""
    made = planned(setup)
    rng = Random(setup.seed)
    lines = tuple(_line(setup, made, q, rng) for q in chosen)
    lengths = sorted({1, 2, setup.steps, 10})
    return Study(
        setup=setup,
        m=made.m,
        n=made.n,
        left_over=len(made.left_over),
        lines=lines,
        two=_two(setup, made, rng),
        crossings=tuple(crossing(setup, steps) for steps in lengths),
    )


def modelled(name: str) -> float:
    """What this takes on average."""
    (row,) = (row for row in costs.load() if row.name == name)
    return (row.least_s + row.most_s) / 2


def planned(setup: Trying) -> Plan:
    if setup.replica % setup.stages:
        raise UnfitError(f"{setup.replica} nodes of a replica are not {setup.stages} stages")
    if setup.group % setup.replica:
        raise UnfitError(f"a group of {setup.group} nodes does not hold whole replicas of {setup.replica}")
    m, n = (setup.group, setup.nodes // setup.group) if setup.group else fit(setup.nodes, setup.replica)
    return plan([f"n{x}" for x in range(setup.nodes)], m, n)


def replayed(replay: Replay, bad: set[str], q: float, rng: Random) -> tuple[Ruling, int]:
    """What it rules, and after how many waves."""
    waves = 0
    while not isinstance(asked := replay.next(), Ruling):
        waves += 1
        for group in asked.groups:
            struck = () if bad.isdisjoint(group.nodes) else bad.intersection(group.nodes)
            replay.heard(group, any(rng.random() < q for _ in struck))
    return asked, waves


def watched(halves: Halves, bad: tuple[int, int, int], p: float, rng: Random) -> Ruling:
    """Halves with a fault in this node of this stage of this replica that shows with chance p in a step."""
    replica, stage, node = bad
    wide = len(halves.nodes[0][0])
    stages = range(len(halves.nodes[0]))
    good = tuple(stages)
    clean: dict[int, Sequence[int]] = {r: good for pair in halves.pairs for r in pair}
    wrong = {**clean, replica: tuple(s + _WRONG * (s >= stage) for s in stages)}
    step = 0
    while not isinstance(asked := halves.next(), Ruling):
        step += 1
        struck = rng.random() < p
        match asked:
            case Watch(inside=None):
                halves.heard(step, wrong if struck else clean)
            case Watch(pairs=((one, other),)):
                shares = [int(struck and one == replica and place == node) for place in range(wide)]
                halves.heard(step, {one: shares, other: [0] * wide})
            case Referee(stage=at, replica=by):
                halves.refereed(at + _WRONG * (struck and by == replica and at >= stage))
    return asked


def _line(setup: Trying, made: Plan, q: float, rng: Random) -> Line:
    limits = ReplayLimits(q=q, confidence=setup.confidence, most=setup.most)
    repeats = chances.repeats(q, setup.confidence, setup.most)
    found = waves = 0
    for _ in range(setup.trials):
        bad = f"n{rng.randrange(setup.nodes)}"
        ruling, took = replayed(Replay(made, limits), {bad}, q, rng)
        found += (ruling.how, ruling.nodes) == (How.ONE, (bad,))
        waves += took
    named, steps = _halves(setup, q, rng)
    p = chances.per_step(q, setup.steps)
    shown = chances.shown(p, _watched_steps(setup, q))
    launches = setup.launch_s + shown * setup.group_launch_s * (1 + (setup.replica > setup.stages))
    waves_each = waves / setup.trials
    return Line(
        q=q,
        repeats=repeats,
        dual=_rate(found, setup.trials, chances.success(q, repeats)),
        dual_steps=waves_each * setup.steps,
        dual_cost=waves_each * (setup.steps + setup.group_launch_s / setup.step_s),
        halves=_rate(named, setup.trials, _reckoned(setup, p, _watched_steps(setup, q))),
        halves_steps=steps,
        halves_cost=steps + launches / setup.step_s,
    )


def _watched_steps(setup: Trying, q: float) -> int:
    """As many as the other way may do in both phases."""
    return 2 * setup.steps * chances.repeats(q, setup.confidence, setup.most)


def _reckoned(setup: Trying, p: float, steps: int) -> float:
    """The fault shows once; where a stage has several nodes, once more, in what is left of the steps."""
    if setup.replica == setup.stages or p == 1.0:
        return chances.shown(p, steps)
    # The referee does a step, too: the last at which a first showing still leaves one to look inside is two before.
    return sum(p * (1 - p) ** (at - 1) * chances.shown(p, max(0, steps - at - 1)) for at in range(1, steps))


def _halves(setup: Trying, q: float, rng: Random) -> tuple[int, float]:
    nodes = _layout(setup)
    limits = HalvesLimits(steps=_watched_steps(setup, q), confidence=setup.confidence)
    p = chances.per_step(q, setup.steps)
    found = steps = 0
    for _ in range(setup.trials):
        halves = Halves(nodes, limits)
        bad = rng.randrange(2 * len(halves.pairs)), rng.randrange(setup.stages), rng.randrange(len(nodes[0][0]))
        ruling = watched(halves, bad, p, rng)
        found += (ruling.how, ruling.nodes) == (How.ONE, (nodes[bad[0]][bad[1]][bad[2]],))
        steps += halves.steps
    return found, steps / setup.trials


def _layout(setup: Trying) -> tuple[tuple[Nodes, ...], ...]:
    wide = setup.replica // setup.stages
    return tuple(
        tuple(tuple(f"n{r * setup.replica + s * wide + w}" for w in range(wide)) for s in range(setup.stages))
        for r in range(setup.nodes // setup.replica)
    )


def _two(setup: Trying, made: Plan, rng: Random) -> Pair:
    names = [f"n{x}" for x in range(setup.nodes)]
    held = suspects = 0
    for _ in range(setup.trials):
        bad = set(rng.sample(names, 2))
        ruling, _ = replayed(Replay(made, ReplayLimits(q=1.0)), bad, 1.0, rng)
        held += bad <= set(ruling.nodes)
        suspects += len(ruling.nodes)
    return Pair(trials=setup.trials, held=held, suspects=suspects / setup.trials)


def dual_cost(setup: Trying, q: float, launch_s: float) -> float:
    """Steps for every machine that is named, on average."""
    repeats = chances.repeats(q, setup.confidence, setup.most)
    shown = chances.shown(q, repeats)
    m = setup.group or fit(setup.nodes, setup.replica)[0]
    waves = (1 + shown) * shown / q * (2 if setup.nodes % m else 1)  # who is left over runs in a wave of its own
    return waves * (setup.steps + launch_s / setup.step_s) / shown**2


def halves_cost(setup: Trying, q: float, launch_s: float, group_launch_s: float) -> float:
    """The same for the other way."""
    p, steps = chances.per_step(q, setup.steps), _watched_steps(setup, q)
    shown = chances.shown(p, steps)
    inside = setup.replica > setup.stages
    spent = (1 + inside) * shown / p + shown
    launches = launch_s + shown * group_launch_s * (1 + inside)
    return (spent + launches / setup.step_s) / shown ** (1 + inside)


def crossing(setup: Trying, steps: int) -> Crossing:
    same = msgspec.structs.replace(setup, steps=steps)
    return Crossing(
        steps=steps,
        by_steps=_least(same, 0.0, 0.0),
        with_launches=_least(same, setup.launch_s, setup.group_launch_s),
    )


def _least(setup: Trying, launch_s: float, group_launch_s: float) -> float | None:
    """The least q above which the dual-phase replay never costs more."""
    found = None
    for point in range(_POINTS + 1):
        q = _LEAST_Q ** (point / _POINTS)
        if dual_cost(setup, q, group_launch_s) > halves_cost(setup, q, launch_s, group_launch_s) + chances.DIGITS:
            break
        found = q
    return found


def _rate(found: int, trials: int, reckoned: float) -> Rate:
    low, high = chances.wilson(found, trials)
    return Rate(found=found, trials=trials, low=low, high=high, reckoned=reckoned)
