"""Two halves and a referee, against every place that can be wrong."""

from itertools import product
from random import Random

import pytest

from holdfast.core.diagnose.grid import Nodes
from holdfast.core.diagnose.halves import Halves, HalvesLimits, Referee, Signatures, Watch
from holdfast.core.diagnose.replay import How, Ruling


def nodes_of(replicas: int, stages: int, wide: int = 1) -> tuple[tuple[Nodes, ...], ...]:
    return tuple(tuple(tuple(f"r{r}s{s}n{w}" for w in range(wide)) for s in range(stages)) for r in range(replicas))


def signed(watch: Watch, bad: tuple[int, int, int] | None, stages: int, wide: int) -> Signatures:
    """A wrong stage makes all later ones wrong, a wrong node inside a stage itself alone."""
    found: dict[int, list[int]] = {replica: [] for pair in watch.pairs for replica in pair}
    for replica, places in found.items():
        for place in range(stages if watch.inside is None else wide):
            if watch.inside is None:
                wrong = bad is not None and replica == bad[0] and place >= bad[1]
            else:
                wrong = bad is not None and (replica, watch.inside, place) == bad
            places.append(1000 + place + 500 * wrong)
    return found


def run(halves: Halves, bad: tuple[int, int, int], q: float, rng: Random) -> Ruling:
    stages, wide = len(halves.nodes[0]), len(halves.nodes[0][0])
    for step in range(100_000):
        match halves.next():
            case Ruling() as ruling:
                return ruling
            case Watch() as watch:
                halves.heard(step, signed(watch, bad if rng.random() < q else None, stages, wide))
            case Referee() as referee:
                assert referee.replica not in referee.pair
                wrong = referee.replica == bad[0] and referee.stage >= bad[1] and rng.random() < q
                halves.refereed(1000 + referee.stage + 500 * wrong)
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("replicas", "stages", "wide"), [(3, 1, 1), (4, 2, 1), (5, 3, 1), (6, 4, 2), (3, 2, 3)])
def test_every_place_is_named(replicas: int, stages: int, wide: int) -> None:
    rng = Random(replicas)
    for r, s, w, q in product(range(replicas), range(stages), range(wide), (1.0, 0.2)):
        halves = Halves(nodes_of(replicas, stages, wide), HalvesLimits())
        ruling = run(halves, (r, s, w), q, rng)
        node = f"r{r}s{s}n{w}"
        if any(r in pair for pair in halves.pairs):
            assert (ruling.how, ruling.nodes) == (How.ONE, (node,))
        else:  # of an odd number one has no twin, and is the referee
            assert ruling.how is How.NOBODY and node in ruling.unheard


def test_two_replicas_have_no_referee() -> None:
    ruling = run(Halves(nodes_of(2, 2), HalvesLimits()), (1, 1, 0), 1.0, Random(1))
    assert (ruling.how, ruling.nodes) == (How.SOME, ("r0s1n0", "r1s1n0"))
    assert "no third replica" in ruling.reason
    with pytest.raises(ValueError, match="two replicas"):
        Halves(nodes_of(1, 2), HalvesLimits())


def test_a_referee_that_cannot_say() -> None:
    halves = Halves(nodes_of(5, 1), HalvesLimits(referees=2))
    watch = halves.next()
    assert isinstance(watch, Watch)
    halves.heard(7, signed(watch, (0, 0, 0), 1, 1))
    first = halves.next()
    assert isinstance(first, Referee) and (first.step, first.pair, first.replica) == (7, (0, 2), 4)
    halves.heard(8, {})  # nobody trains meanwhile
    assert halves.next() == first
    halves.refereed(None)
    second = halves.next()
    assert isinstance(second, Referee) and second.replica == 3
    halves.refereed(77)
    ruling = halves.next()
    assert isinstance(ruling, Ruling)
    assert (ruling.how, ruling.nodes) == (How.SOME, ("r0s0n0", "r2s0n0"))
    assert "no third agreed with either" in ruling.reason


def test_work_that_is_not_the_same_twice() -> None:
    halves = Halves(nodes_of(6, 2), HalvesLimits())
    halves.heard(1, {r: [r, r] for r in range(6)})
    ruling = halves.next()
    assert isinstance(ruling, Ruling)
    assert (ruling.how, ruling.nodes) == (How.EVERYWHERE, ())


def test_who_has_not_signed_is_not_compared() -> None:
    halves = Halves(nodes_of(4, 1), HalvesLimits(steps=2))
    halves.heard(1, {0: [1], 1: [2], 2: [None], 3: [2]})
    assert isinstance(halves.next(), Watch)
    halves.heard(2, {})
    ruling = halves.next()
    assert isinstance(ruling, Ruling)
    assert ruling.how is How.NOBODY and "agreed in all 2 steps" in ruling.reason


def test_it_shows_once_and_never_inside() -> None:
    halves = Halves(nodes_of(4, 2, wide=2), HalvesLimits(steps=5))
    watch = halves.next()
    assert isinstance(watch, Watch)
    halves.heard(1, signed(watch, (3, 0, 0), 2, 2))
    halves.refereed(1000)
    inside = halves.next()
    assert inside == Watch(pairs=((3, 0),), inside=0)
    for step in range(2, 9):
        halves.heard(step, signed(inside, None, 2, 2))
    ruling = halves.next()
    assert isinstance(ruling, Ruling)
    assert (ruling.how, ruling.nodes) == (How.SOME, ("r3s0n0", "r3s0n1"))
