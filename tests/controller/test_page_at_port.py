"""The page of a job on another host: its facts come from the controller's port, for whoever has a token."""

import asyncio

import msgspec
import pytest

from holdfast.cli.page.page_sources import ControllerSource
from holdfast.cli.run_dirs.distant_controller import DistantController
from holdfast.controller.access.caller_admission import PortAccess, Right, make_user_token
from holdfast.controller.order_admission import NO_SUCH_ORDER, describe_effect
from holdfast.dash.page_feed import PageFeed
from holdfast.dash.page_source import SourceError
from holdfast.model.decider_events import Order
from tests.controller.conftest import HEADERS, Open


async def test_a_page_reads_a_controller_at_its_port(desk_of: Open) -> None:
    async with desk_of() as desk:
        await desk.train()
        address = f"http://127.0.0.1:{desk.client.port}"
        source = ControllerSource(DistantController(address, next(iter(HEADERS.values())), None))
        feed = PageFeed(source)
        await asyncio.to_thread(feed.refresh_view)
        assert b'"phase":"training"' in feed.whole and b'"watched":true' in feed.whole
        seq = desk.controller.seq
        said = await asyncio.to_thread(source.ask_controller, "/api/v1/orders/preview", {"verb": "hold"})
        hold = Order(verb="hold", who="")
        assert said["next"] == describe_effect(desk.controller.view, hold) and desk.controller.seq == seq
        with pytest.raises(SourceError, match=NO_SUCH_ORDER):
            await asyncio.to_thread(source.ask_controller, "/api/v1/orders", {"verb": "dance"})
        stranger = ControllerSource(DistantController(address, "guess", None))
        with pytest.raises(SourceError, match="X-Holdfast-Token"):
            await asyncio.to_thread(lambda: list(stranger.read_entries(0)))


async def test_a_page_offers_orders_only_to_who_may_give_them(desk_of: Open) -> None:
    badges = tuple(make_user_token(right.name, right, f"token-{right.name}") for right in Right)
    async with desk_of(port=PortAccess(lambda: badges, "controller.test")) as desk:
        address = f"http://127.0.0.1:{desk.client.port}"
        for right in Right:
            source = ControllerSource(DistantController(address, f"token-{right.name}", None))
            seen = await asyncio.to_thread(source.look_at_job)
            assert seen.is_watched and seen.may_order is (right is not Right.VIEW), right
            feed = PageFeed(source)
            await asyncio.to_thread(feed.refresh_view)
            assert msgspec.json.decode(feed.whole)["sections"]["orders_taken"] is seen.may_order
            assert feed.is_watched, "what is new is shown soon to everybody"
        stranger = ControllerSource(DistantController(address, "guess", None))
        seen = await asyncio.to_thread(stranger.look_at_job)
        assert not seen.is_watched and not seen.may_order
