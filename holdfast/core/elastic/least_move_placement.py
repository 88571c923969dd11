"""Assigns workers to places such that few layers have to move; for small numbers the assignment is optimal."""

from collections.abc import Sequence

EXACT_TO = 64  # members; beyond that each takes the best free place in turn


def assign_alike(costs: Sequence[Sequence[int]], kinds: Sequence[int]) -> list[int]:
    """Return the members as `assign_slots` does, where many members are alike. `kinds[member]` is the kind of a member,
    and `costs[slot][kind]` is what any member of that kind costs."""
    if len(kinds) <= EXACT_TO:
        return assign_slots([[row[kind] for kind in kinds] for row in costs])
    free: dict[int, list[int]] = {}
    for member in reversed(range(len(kinds))):
        free.setdefault(kinds[member], []).append(member)
    found = []
    for row in costs:
        kind = min(free, key=lambda one: (row[one], free[one][-1]))
        found.append(free[kind].pop())
        if not free[kind]:
            del free[kind]
    return found


def assign_slots(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the member for each slot. The members are chosen to make the sum of `costs[slot][member]` small, and for
    up to 64 members as small as possible. There must be at least as many members as slots."""
    if costs and len(costs[0]) > EXACT_TO:
        return _assign_in_turn(costs)
    return _assign_exactly(costs)


def _assign_in_turn(costs: Sequence[Sequence[int]]) -> list[int]:
    free = dict.fromkeys(range(len(costs[0])))
    found = []
    for row in costs:
        member = min(free, key=row.__getitem__)
        del free[member]
        found.append(member)
    return found


def _assign_exactly(costs: Sequence[Sequence[int]]) -> list[int]:
    """Assign each slot its member by shortest augmenting paths with potentials (Hungarian method), slot after slot."""
    members = len(costs[0]) if costs else 0
    slot_of = [-1] * members
    prices = [0] * members  # of members: what the slots seated so far would pay more elsewhere
    offers = [0] * len(costs)
    for slot in range(len(costs)):
        _seat_slot(costs, slot, (slot_of, prices, offers))
    found = [-1] * len(costs)
    for member, slot in enumerate(slot_of):
        if slot >= 0:
            found[slot] = member
    return found


def _seat_slot(costs: Sequence[Sequence[int]], slot: int, state: tuple[list[int], list[int], list[int]]) -> None:
    slot_of, prices, offers = state
    members = len(slot_of)
    far = sum(map(sum, costs)) + 1
    reach, came = [far] * members, [-1] * members  # by member: cheapest way to it, and the member before it
    seen: list[int] = []
    open_to = set(range(members))
    at, last = slot, -1
    while True:
        for member in open_to:
            way = costs[at][member] - offers[at] - prices[member]
            if way < reach[member]:
                reach[member], came[member] = way, last
        last = min(open_to, key=lambda member: (reach[member], member))
        step = reach[last]
        offers[slot] += step
        for member in seen:
            offers[slot_of[member]] += step
            prices[member] -= step
        for member in open_to:
            reach[member] -= step
        seen.append(last)
        open_to.remove(last)
        if slot_of[last] < 0:
            break
        at = slot_of[last]
    while last >= 0:
        before = came[last]
        slot_of[last] = slot if before < 0 else slot_of[before]
        last = before
