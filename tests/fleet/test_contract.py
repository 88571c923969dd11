"""What every fleet that can acquire must do. A second one joins FLEETS and passes the same tests."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.ports import Fleet
from tests.cli.driver import until
from tests.fleet import places

pytestmark = pytest.mark.e2e


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """How to open one sort of fleet at a place, as often as one likes, and how to look for a node there."""

    name: str
    open: Callable[[Path], Fleet]
    alive: Callable[[Path, str], bool]


FLEETS = (Kind(name="local", open=places.local, alive=places.local_alive),)


class Site:
    """A place with a fleet, which may be opened anew as a restarted controller does."""

    def __init__(self, kind: Kind, place: Path) -> None:
        self.kind = kind
        self.place = place
        self.fleet = kind.open(place)

    def reopen(self) -> Fleet:
        self.fleet = self.kind.open(self.place)
        return self.fleet

    def alive(self, node: str) -> bool:
        return self.kind.alive(self.place, node)


@pytest.fixture(params=[kind.name for kind in FLEETS])
async def site(request: pytest.FixtureRequest, tmp_path: Path, no_orphans: str) -> AsyncIterator[Site]:
    site = Site(next(kind for kind in FLEETS if kind.name == request.param), tmp_path)
    yield site
    for node in site.fleet.nodes():
        await site.fleet.give_back(node, "the test is over")


async def test_nodes_come_and_go(site: Site) -> None:
    fleet = site.fleet
    assert fleet.can_acquire
    assert fleet.nodes() == ()
    assert await fleet.acquire(0) == ()
    first = await fleet.acquire(2)
    second = await fleet.acquire(1)
    assert len({*first, *second}) == 3
    assert sorted(fleet.nodes()) == sorted((*first, *second))
    for node in fleet.nodes():
        until(lambda node=node: site.alive(node), f"{node} to be up")  # type: ignore[misc]
    await fleet.give_back(first[0], "not needed")
    assert sorted(fleet.nodes()) == sorted((first[1], *second))
    assert not site.alive(first[0]) and site.alive(first[1])


async def test_release_may_be_repeated(site: Site) -> None:
    fleet = site.fleet
    [node] = await fleet.acquire(1)
    until(lambda: site.alive(node), "the node to be up")
    await fleet.give_back(node, "once")
    await fleet.give_back(node, "twice")
    await site.reopen().give_back(node, "three times")
    await fleet.give_back("nobody", "never heard of")
    assert fleet.nodes() == ()


async def test_a_node_may_be_released_before_it_is_up(site: Site) -> None:
    [node] = await site.fleet.acquire(1)
    await site.fleet.give_back(node, "at once")
    assert site.fleet.nodes() == () and not site.alive(node)


async def test_a_fleet_that_is_opened_anew_knows_its_nodes_and_uses_no_name_twice(site: Site) -> None:
    kept, released = await site.fleet.acquire(2)
    until(lambda: site.alive(kept), "the node to be up")
    await site.fleet.give_back(released, "not needed")
    fleet = site.reopen()
    assert fleet.nodes() == (kept,)
    assert site.alive(kept)
    [new] = await fleet.acquire(1)
    assert new not in (kept, released)
    await fleet.give_back(kept, "not needed")
    assert not site.alive(kept)
