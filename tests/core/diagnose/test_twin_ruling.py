"""Two halves and a referee, against every place that can be wrong."""

from itertools import product
from random import Random

import pytest

from holdfast.core.replay.node_grid import Nodes
from holdfast.core.replay.regrouped_replay import ReplayRuling, RulingKind
from holdfast.core.replay.twin_ruling import Referee, Signatures, TwinComparison, TwinLimits, WatchTwins


def nodes_of(replicas: int, stages: int, wide: int = 1) -> tuple[tuple[Nodes, ...], ...]:
    return tuple(tuple(tuple(f"r{r}s{s}n{w}" for w in range(wide)) for s in range(stages)) for r in range(replicas))


def signed(watch: WatchTwins, bad: tuple[int, int, int] | None, stages: int, wide: int) -> Signatures:
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


def run(halves: TwinComparison, bad: tuple[int, int, int], q: float, rng: Random) -> ReplayRuling:
    stages, wide = len(halves.nodes[0]), len(halves.nodes[0][0])
    for step in range(100_000):
        match halves.next_move():
            case ReplayRuling() as ruling:
                return ruling
            case WatchTwins() as watch:
                halves.on_signatures(step, signed(watch, bad if rng.random() < q else None, stages, wide))
            case Referee() as referee:
                assert referee.replica not in referee.pair
                wrong = referee.replica == bad[0] and referee.stage >= bad[1] and rng.random() < q
                halves.on_referee_signature(1000 + referee.stage + 500 * wrong)
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("replicas", "stages", "wide"), [(3, 1, 1), (4, 2, 1), (5, 3, 1), (6, 4, 2), (3, 2, 3)])
def test_every_place_is_named(replicas: int, stages: int, wide: int) -> None:
    rng = Random(replicas)
    for r, s, w, q in product(range(replicas), range(stages), range(wide), (1.0, 0.2)):
        halves = TwinComparison(nodes_of(replicas, stages, wide), TwinLimits())
        ruling = run(halves, (r, s, w), q, rng)
        node = f"r{r}s{s}n{w}"
        if any(r in pair for pair in halves.pairs):
            assert (ruling.how, ruling.nodes) == (RulingKind.ONE, (node,))
        else:  # of an odd number one has no twin, and is the referee
            assert ruling.how is RulingKind.NOBODY and node in ruling.unheard


def test_two_replicas_have_no_referee() -> None:
    ruling = run(TwinComparison(nodes_of(2, 2), TwinLimits()), (1, 1, 0), 1.0, Random(1))
    assert (ruling.how, ruling.nodes) == (RulingKind.SOME, ("r0s1n0", "r1s1n0"))
    with pytest.raises(ValueError, match="two replicas"):
        TwinComparison(nodes_of(1, 2), TwinLimits())


def test_a_referee_that_cannot_say() -> None:
    halves = TwinComparison(nodes_of(5, 1), TwinLimits(referees=2))
    watch = halves.next_move()
    assert isinstance(watch, WatchTwins)
    halves.on_signatures(7, signed(watch, (0, 0, 0), 1, 1))
    first = halves.next_move()
    assert isinstance(first, Referee) and (first.step, first.pair, first.replica) == (7, (0, 2), 4)
    halves.on_signatures(8, {})  # nobody trains meanwhile
    assert halves.next_move() == first
    halves.on_referee_signature(None)
    second = halves.next_move()
    assert isinstance(second, Referee) and second.replica == 3
    halves.on_referee_signature(77)
    ruling = halves.next_move()
    assert isinstance(ruling, ReplayRuling)
    assert (ruling.how, ruling.nodes) == (RulingKind.SOME, ("r0s0n0", "r2s0n0"))


def test_work_that_is_not_the_same_twice() -> None:
    halves = TwinComparison(nodes_of(6, 2), TwinLimits())
    halves.on_signatures(1, {r: [r, r] for r in range(6)})
    ruling = halves.next_move()
    assert isinstance(ruling, ReplayRuling)
    assert (ruling.how, ruling.nodes) == (RulingKind.EVERYWHERE, ())


def test_who_has_not_signed_is_not_compared() -> None:
    halves = TwinComparison(nodes_of(4, 1), TwinLimits(steps=2))
    halves.on_signatures(1, {0: [1], 1: [2], 2: [None], 3: [2]})
    assert isinstance(halves.next_move(), WatchTwins)
    halves.on_signatures(2, {})
    ruling = halves.next_move()
    assert isinstance(ruling, ReplayRuling)
    assert ruling.how is RulingKind.NOBODY and " 2 steps" in ruling.reason


def test_it_shows_once_and_never_inside() -> None:
    halves = TwinComparison(nodes_of(4, 2, wide=2), TwinLimits(steps=5))
    watch = halves.next_move()
    assert isinstance(watch, WatchTwins)
    halves.on_signatures(1, signed(watch, (3, 0, 0), 2, 2))
    halves.on_referee_signature(1000)
    inside = halves.next_move()
    assert inside == WatchTwins(pairs=((3, 0),), inside=0)
    for step in range(2, 9):
        halves.on_signatures(step, signed(inside, None, 2, 2))
    ruling = halves.next_move()
    assert isinstance(ruling, ReplayRuling)
    assert (ruling.how, ruling.nodes) == (RulingKind.SOME, ("r3s0n0", "r3s0n1"))
