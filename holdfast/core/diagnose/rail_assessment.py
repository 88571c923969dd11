"""Decides which pairs of nodes failed a pair test over several rails, and on which rail. It judges rails one by one."""

from collections.abc import Mapping

from holdfast.core.diagnose.pair_assessment import Measured, assess_pairs, stated_failure
from holdfast.core.diagnose.pair_test import PairResult, World

Rails = Mapping[str, tuple[str, ...]]  # by node; those with the same number are tested with each other


def shared_rails(found: Rails, *, by_name: bool) -> Rails:
    """Return for each node the rails that all nodes have, matched by name or else by number. Return no rails if nodes
    share fewer than two."""
    shared = set.intersection(*(set(rails) for rails in found.values())) if found else set()
    count = min((len(rails) for rails in found.values()), default=0)
    same = {node: tuple(sorted(shared)) if by_name else rails[:count] for node, rails in found.items()}
    return same if all(len(rails) > 1 for rails in same.values()) else dict.fromkeys(found, ())


def assess_rails(now: Measured, before: Measured, rails: Rails) -> tuple[PairResult, ...]:
    """Return the result of each world (pair of nodes) in `now`. A world passes if every rail that connects any pair
    passes. Without rails, use `assess_pairs`."""
    if not any(rails.values()):
        return assess_pairs(now, before)
    unused = _unused_rails({**before, **now}, rails)
    found = {one.world: one for one in assess_pairs(_rail_worlds(now, rails), _rail_worlds(before, rails))}
    results = []
    for world in now:
        failed = {
            number: one
            for number in range(len(rails[world[0]]))
            if number not in unused and not (one := found[_rail_world(world, number, rails)]).ok
        }
        told = "; ".join(f"{' and '.join(one.world)}: {one.reason}" for one in failed.values())
        bad = {node: ", ".join(rails[node][number] for number in failed) for node in world} if failed else {}
        results.append(PairResult(world=world, ok=not failed, reason=told, rails=bad))
    return tuple(results)


def _unused_rails(measured: Measured, rails: Rails) -> set[int]:
    """Return the numbers of rails over which no pair of nodes can talk. Such a rail does not connect nodes; it may lead
    to a board controller or a storage network. Return none if no rail at all connects nodes."""
    worlds = [(world, number) for world in measured for number in range(len(rails[world[0]]))]
    told = _rail_worlds(measured, rails)
    met: dict[int, list[bool]] = {}
    for world, number in worlds:
        one = _rail_world(world, number, rails)
        met.setdefault(number, []).append(not stated_failure(one, told[one]))
    dead = {number for number, all_met in met.items() if len(all_met) > 1 and not any(all_met)}
    return dead if len(dead) < len(met) else set()


def _rail_worlds(measured: Measured, rails: Rails) -> Measured:
    return {
        _rail_world(world, number, rails): {
            _rail_name(node, number, rails): [f for f in told.get(node, ()) if f.place == rails[node][number]]
            for node in world
        }
        for world, told in measured.items()
        for number in range(len(rails[world[0]]))
    }


def _rail_world(world: World, number: int, rails: Rails) -> World:
    return tuple(_rail_name(node, number, rails) for node in world)


def _rail_name(node: str, number: int, rails: Rails) -> str:
    return f"{node} rail {rails[node][number]}"
