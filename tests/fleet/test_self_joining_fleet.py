"""The fleet of nodes that somebody else starts."""

import pytest

from holdfast.controller_interfaces import Fleet
from holdfast.fleet.self_joining_fleet import JoinFleet


async def test_it_cannot_acquire_and_says_what_to_do() -> None:
    fleet: Fleet = JoinFleet()
    assert not fleet.can_acquire
    assert fleet.nodes() == () and await fleet.survey() == {}
    await fleet.give_back("anybody", "evicted")
    with pytest.raises(OSError, match=r"\b2\b"):
        await fleet.acquire(2)
