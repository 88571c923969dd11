"""The controller's port and its links to agents: whatever is said there, it answers, and goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import WSMessage, WSMsgType
from aiohttp.test_utils import TestServer
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.config import Settings
from holdfast.controller.api import TraceBody, make_app, status_of
from holdfast.controller.enrolling import Enrolling
from holdfast.controller.ingest import Ingest
from holdfast.controller.loop import Controller
from holdfast.controller.orders import VERBS, OrderBody
from holdfast.core.node import Post
from holdfast.core.report import report_of
from holdfast.model.signal import Beat
from holdfast.model.topology import Job
from holdfast.wire import messages
from holdfast.wire.authority import Authority
from holdfast.wire.enrolment import Enrol
from holdfast.wire.messages import Hello
from tests.controller.conftest import TOKEN, admit, make
from tests.controller.fakes import FakeFleet
from tests.fuzz.making import FLOATS, INTS, JSON, PLAIN, hostile, mutated, values

JOB = Job(run_id="r", min_nodes=2, max_nodes=2, standbys=1, can_acquire=False)
_NODES = st.sampled_from(("a", "b", "c"))
_SMALL = st.one_of(st.integers(-1, 3), INTS)
_GIVEN = {**PLAIN, str: st.one_of(_NODES, PLAIN[str]), int: _SMALL, float: st.one_of(st.floats(0, 3), FLOATS)}


class Wire:
    """A controller's end of a link: it hears these packets, and what it says is dropped."""

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = packets
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[WSMessage]:
        for packet in self.packets:
            yield WSMessage(WSMsgType.BINARY, packet, None)
            await asyncio.sleep(0)

    async def send_bytes(self, data: bytes) -> None:
        messages.decode_from_controller(data)

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool:
        self.closed = code
        return True


@contextlib.asynccontextmanager
async def _running(folder: Path, job: Job = JOB) -> AsyncIterator[Controller]:
    (folder / "journal.db").unlink(missing_ok=True)
    controller = make(folder, Settings(), FakeFleet(can_acquire=job.can_acquire))
    controller.hands.say = lambda text: None
    running = asyncio.create_task(controller.run(job))
    await asyncio.sleep(0)
    yield controller
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    controller.journal.close()


def _trained(node: str, order: int) -> list[bytes]:
    """How a node of the first generation begins."""
    said = [Hello(node=node, host="h", nproc=2, order=order, generation=0, ready=True)]
    return [messages.encode(one) for one in said]


_SAID = st.one_of(
    values(messages.FromAgent, _GIVEN),
    values(Beat, {**_GIVEN, str: _NODES}),
    values(Post, {**_GIVEN, str: _NODES}),
    values(Hello, {**_GIVEN, str: _NODES}),
)


async def _heard(folder: Path, said: list[tuple[str, Any]]) -> None:
    async with _running(folder) as controller:
        ingest: Ingest = controller.ingest
        links = {node: asyncio.Queue[bytes](64) for node in "abc"}
        for order, node in enumerate("ab"):
            for packet in _trained(node, order):
                ingest._heard(messages.decode_from_agent(packet), links[node], "")
        await _settled()
        for id in range(1, 9):  # whatever was asked is done
            for node in "ab":
                done = messages.decode_from_agent(messages.encode(_done(id, node)))
                ingest._heard(done, links[node], node)
        await _settled()
        for node in "ab":
            ingest._heard(Beat(node=node, generation=1, step=1, at=1.0, first_step=1), links[node], node)
        for node, message in said:
            packet = messages.encode(message)
            await ingest.attend(Wire([*_trained(node, 0), packet]), node)
            await _settled()
            ingest.tick()
        assert not controller._stepping
        msgspec.json.encode(status_of(controller))
        msgspec.json.encode(report_of(controller.ledger.account(controller.clock())))


def _done(id: int, node: str) -> Post:
    from holdfast.model.errand import Done

    return Post(seq=id, body=Done(id=id, node=node, ok=True))


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(said=st.lists(st.tuples(_NODES, _SAID), min_size=1, max_size=6))
def test_anything_that_a_node_may_say(said: list[tuple[str, Any]], tmp_path: Path) -> None:
    asyncio.run(_heard(tmp_path, said))


@given(packets=st.lists(st.one_of(st.binary(max_size=64), mutated(_SAID.map(messages.encode))), max_size=4))
@example(packets=[b"\x82\xa4type\xa6notice\xa4node\xa2\xff\xff"])
@example(packets=[b"\x81\xa1x" + b"\x91" * 9_000])
def test_any_bytes_on_a_link(packets: list[bytes], tmp_path: Path) -> None:
    async def heard() -> None:
        async with _running(tmp_path) as controller:
            await controller.ingest.attend(Wire(packets))
            await _settled()
            assert not controller._stepping

    asyncio.run(heard())
