"""The page of a job on another host: its facts come from the controller's port, for whoever has a token."""

import asyncio

import pytest

from holdfast.cli.page.page_sources import ControllerSource
from holdfast.cli.run_dirs.distant_controller import DistantController
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
