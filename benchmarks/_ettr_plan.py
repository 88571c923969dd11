"""When which fault strikes whom: drawn beforehand from a seed, in the proportions of the study."""

import random

import msgspec

SHARES = {"rank crash": 0.60, "node loss": 0.20, "rank stopped": 0.15, "bad release": 0.05}


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float  # after the job's first step
    kind: str
    rank: int  # it, or its node


def plan(seed: int, duration_s: float, every_s: float, ranks: int) -> list[Strike]:
    """As many as there are on average, at moments that know nothing of one another."""
    chance = random.Random(seed)
    count = round(duration_s / every_s)
    kinds = [kind for kind, share in allotted(count).items() for _ in range(share)]
    chance.shuffle(kinds)
    moments = sorted(chance.uniform(0.0, duration_s) for _ in range(count))
    return [
        Strike(at_s=round(at_s, 2), kind=kind, rank=chance.randrange(ranks))
        for at_s, kind in zip(moments, kinds, strict=True)
    ]


def allotted(count: int) -> dict[str, int]:
    """How many of each kind: each once if there is room, and the rest one by one to whom most is owed."""
    found = dict.fromkeys(SHARES, 1 if count >= len(SHARES) else 0)
    while sum(found.values()) < count:
        found[max(SHARES, key=lambda kind: SHARES[kind] * count - found[kind])] += 1
    return found
