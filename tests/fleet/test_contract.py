"""What every fleet must do. Another one joins FLEETS and passes the same tests: all of them, if it can acquire."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.controller_interfaces import Fleet, FleetRefusal
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from tests.cli.driver import PATIENCE_S, until
from tests.fleet import places
from tests.kube import places as kube_places
from tests.slurm import places as slurm_places

pytestmark = pytest.mark.e2e


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """How to open one sort of fleet at a place, as often as one likes, and how to look for a node there."""

    name: str
    open: Callable[[Path], Fleet]
    alive: Callable[[Path, str], bool]
    lose: Callable[[Path, str], None]  # ends the machine of a node that is up
    hold: Callable[[Path, pytest.MonkeyPatch], Callable[[], None]]  # keeps new nodes from coming up, until called
    held: FleetState  # as which they are told
    cut: Callable[[Path, pytest.MonkeyPatch], None]  # the controller ends once the cluster has heard of a request
    doubt: Callable[[Path, str, str], Callable[[], None]]  # hides whether a node on a host lives, until called
    refuse: Callable[[Path, pytest.MonkeyPatch], str] | None = None  # forbids all nodes; returns the cluster's sentence
    close: Callable[[Path], Awaitable[None]] | None = None


FLEETS = (
    Kind(
        name="local",
        open=places.local,
        alive=places.local_alive,
        lose=places.lose_local,
        hold=places.hold_local,
        held=FleetState.STARTING,
        cut=places.cut_local,
        doubt=places.doubt_local,
    ),
    Kind(
        name="slurm",
        open=slurm_places.slurm,
        alive=slurm_places.slurm_alive,
        lose=slurm_places.lose_slurm,
        hold=slurm_places.hold_slurm,
        held=FleetState.QUEUED,
        cut=slurm_places.cut_slurm,
        doubt=slurm_places.doubt_slurm,
        refuse=slurm_places.refuse_slurm,
    ),
    Kind(
        name="kubernetes",
        open=kube_places.fake,
        alive=kube_places.alive,
        lose=kube_places.lose,
        hold=kube_places.hold,
        held=FleetState.QUEUED,
        cut=kube_places.cut,
        doubt=kube_places.doubt,
        refuse=kube_places.refuse,
        close=kube_places.close,
    ),
)


OPENERS: dict[str, Callable[[Path], Fleet]] = {kind.name: kind.open for kind in FLEETS} | {"join": places.join}


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

    async def look_until(self, node: str, state: FleetState) -> FleetNode:
        """Survey until the fleet sees the node so."""
        until_at = time.monotonic() + PATIENCE_S
        while (seen := (await self.fleet.survey())[node]).state is not state:
            assert time.monotonic() < until_at, f"{node} is not {state} but {seen}"
            await asyncio.sleep(0.05)
        return seen


@pytest.fixture(params=OPENERS)
async def any_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], Fleet]]:
    """Opens a fleet as often as one likes; it may be one that cannot acquire."""
    if request.param == "slurm":
        request.getfixturevalue("slurm_lab")
    yield lambda: OPENERS[request.param](tmp_path)
    if request.param == "kubernetes":
        await kube_places.close(tmp_path)


async def test_a_fleet_without_nodes_says_so_and_has_nothing_to_release(any_fleet: Callable[[], Fleet]) -> None:
    for fleet in (any_fleet(), any_fleet()):
        assert fleet.nodes() == () and fleet.departures() == () and await fleet.survey() == {}
        for _ in range(2):
            await fleet.give_back("nobody", "never heard of", Dismissal.EVICTED)
        assert fleet.nodes() == ()
        assert (fleet.survey_s > 0) == fleet.can_acquire, "who made nodes can tell of them"


async def test_a_fleet_whose_nodes_others_start_can_only_ask_for_them(tmp_path: Path) -> None:
    fleet = places.join(tmp_path)
    assert not fleet.can_acquire
    with pytest.raises(OSError, match=r"\b2\b") as told:
        await fleet.acquire(2)
    assert not isinstance(told.value, FleetRefusal), "they may come yet"
    await fleet.give_back("h7", "evicted", Dismissal.EVICTED)  # returns, and proves nothing
    assert fleet.nodes() == () and await fleet.survey() == {}


@pytest.fixture(params=[kind.name for kind in FLEETS])
async def site(
    request: pytest.FixtureRequest, tmp_path: Path, warm_server: Path, no_orphans: str
) -> AsyncIterator[Site]:
    if request.param == "slurm":
        request.getfixturevalue("slurm_lab")
    if request.param == "local":
        places.share_server(tmp_path, warm_server)
    site = Site(next(kind for kind in FLEETS if kind.name == request.param), tmp_path)
    yield site
    for node in site.fleet.nodes():
        await site.fleet.give_back(node, "the test is over")
    if site.kind.close is not None:
        await site.kind.close(tmp_path)


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


async def test_a_survey_follows_a_node_through_its_life(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await site.fleet.survey() == {}
    let_go = site.kind.hold(site.place, monkeypatch)
    [node] = await site.fleet.acquire(1)
    for _ in range(2):
        assert {name: seen.state for name, seen in (await site.fleet.survey()).items()} == {node: site.kind.held}
    let_go()
    await site.look_until(node, FleetState.UP)
    until(lambda: site.alive(node), "the node to be up")
    site.kind.lose(site.place, node)
    assert (await site.look_until(node, FleetState.GONE)).reason
    assert site.fleet.nodes() == (node,), "it is there until it is given back"
    await site.fleet.give_back(node, "lost")
    assert await site.fleet.survey() == {}


async def test_a_survey_after_the_controller_is_back_tells_of_the_same_nodes(site: Site) -> None:
    lost, kept, released = await site.fleet.acquire(3)
    for node in (lost, kept, released):
        until(lambda node=node: site.alive(node), f"{node} to be up")  # type: ignore[misc]
    site.kind.lose(site.place, lost)
    await site.fleet.give_back(released, "not needed")
    site.reopen()
    await site.look_until(lost, FleetState.GONE)
    seen = await site.fleet.survey()
    assert {node: one.state for node, one in seen.items()} == {lost: FleetState.GONE, kept: FleetState.UP}
    assert sorted(site.fleet.nodes()) == sorted(seen)


async def test_a_controller_that_ends_amid_an_acquisition_leaves_no_node_that_nobody_knows(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        site.kind.cut(site.place, patch)
        with pytest.raises(places.Cut):
            await site.fleet.acquire(2)
    fleet = site.reopen()
    known = fleet.nodes()
    until_at = time.monotonic() + PATIENCE_S
    while {one.state for one in (await fleet.survey()).values()} - {FleetState.UP, FleetState.GONE}:
        assert time.monotonic() < until_at, await fleet.survey()
        await asyncio.sleep(0.05)
    [new] = await fleet.acquire(1)
    assert new not in known
    await site.look_until(new, FleetState.UP)
    until(lambda: site.alive(new), "the new node to be up")
    for node in fleet.nodes():
        await fleet.give_back(node, "not needed")
    assert await fleet.survey() == {}
    for node in ("n0", "n1", new):
        until(lambda node=node: not site.alive(node), f"the end of {node}")  # type: ignore[misc]


@pytest.mark.slow  # Slurm takes its time to miss a host
async def test_a_release_without_proof_is_an_error_and_the_node_is_unknown_until_then(site: Site) -> None:
    kept, lost = await site.fleet.acquire(2)
    for node in (kept, lost):
        until(lambda node=node: site.alive(node), f"{node} to be up")  # type: ignore[misc]
    lift = site.kind.doubt(site.place, lost, (await site.look_until(lost, FleetState.UP)).host)
    try:
        assert (await site.look_until(lost, FleetState.UNKNOWN)).reason
        with pytest.raises(OSError, match=r"\w") as told:
            await site.fleet.give_back(lost, "evicted", Dismissal.EVICTED)
        assert not isinstance(told.value, FleetRefusal)
        site.reopen()
        assert site.fleet.nodes() == (kept,) and site.alive(kept), "it is not the job's any more, proof or not"
        [new] = await site.fleet.acquire(1)
        assert new not in (kept, lost)
    finally:
        lift()
    until(lambda: not site.alive(lost), "its end, when it is heard of again")


async def test_no_node_of_many_is_told_gone_while_it_starts(site: Site) -> None:
    told: set[FleetState] = set()

    async def look() -> set[FleetState]:
        now = {seen.state for seen in (await site.fleet.survey()).values()}
        told.update(now)
        await asyncio.sleep(0)
        return now

    asked = asyncio.create_task(site.fleet.acquire(4))
    while not asked.done():
        await look()
    await asked
    until_at = time.monotonic() + PATIENCE_S
    while await look() != {FleetState.UP}:
        assert time.monotonic() < until_at, told
    assert told <= {FleetState.QUEUED, FleetState.STARTING, FleetState.UP}


async def test_what_is_refused_for_good_is_said_in_the_words_of_the_cluster(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    if site.kind.refuse is None:
        pytest.skip(f"{site.kind.name} refuses nobody for good")
    sentence = site.kind.refuse(site.place, monkeypatch)
    with pytest.raises(FleetRefusal, match=sentence):
        await site.fleet.acquire(1)
    assert site.fleet.nodes() == () and await site.fleet.survey() == {}
