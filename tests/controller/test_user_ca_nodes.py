"""Nodes and controllers with certificates of a user's own authority, over real links: who is taken, and who is not."""

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.agent.connection.controller_dialer import BrokenLinkError, ControllerDialer, UnprovenPeerError
from holdfast.cli.launch.enrolment_client import (
    EnrolmentClient,
    EnrolmentError,
    EnrolmentRefusedError,
    LinkClosedError,
    introduce_host,
)
from holdfast.config import Settings
from holdfast.controller.access import caller_admission
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.caller_admission import Caller, PortAccess
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.access.user_ca_nodes import CertificateEnrolment
from holdfast.controller.node_links import NodeLinks
from holdfast.core.decide.decider import Decider
from holdfast.model.decider_events import Begin, Order, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.wire.agent_messages import Welcome
from holdfast.wire.credentials import enrolment, mutual_tls
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, join_ids
from holdfast.wire.credentials.enrolment import CertifiedNode
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.run_and_node_specs import EntryPoint, NodeSpec
from tests.controller.conftest import Open
from tests.wire.given import Organisation
from tests.wire.test_enrolment import TOKEN

LARGE = Job(run_id="r", min_nodes=9, max_nodes=9, can_acquire=False)  # it waits for nodes for as long as the test takes


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Organisation:
    return Organisation(tmp_path_factory.mktemp("ours") / "ca")


class Desk:
    """What a controller answers at its port, to whom."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.decider, self.links = Decider(), NodeLinks(lambda: 1)
        self.said: list[str] = []
        self.decider.step(0.0, Begin(job=LARGE, limits=Limits()))
        self.certificates = NodeCertificates(self.decider.view, lambda node: False, self.said.append)
        self.certified = CertificateEnrolment(folder, "r", AuditLog(folder), self.certificates, self.links)
        self.admit = PortAccess(tuple, "h", self.certified.certificate_refusal)
        self.address = ("", 0)

    @contextlib.asynccontextmanager
    async def open(self, keys: KeyFiles) -> AsyncIterator["Desk"]:
        app = web.Application()
        app.router.add_get(enrolment.PATH, self.certified.challenge_route)
        app.router.add_post(enrolment.PATH, self.certified.enrol_route)
        app.router.add_get("/agent", self._agent)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=mutual_tls.server_tls(keys, strangers=True)).start()
        self.address = runner.addresses[0]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        caller = self.admit(request)
        if not isinstance(caller, Caller):
            return web.Response(status=caller.status, text=caller.why)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        await ws.send_bytes(caller.node.encode())
        return ws

    async def introduce(self, keys: KeyFiles, run_id: str = "") -> CertifiedNode:
        return await asyncio.to_thread(introduce_host, self.address, keys, run_id)

    def dialing(self, keys: KeyFiles, run_id: str) -> ControllerDialer:
        url = f"https://127.0.0.1:{self.address[1]}"
        entry = EntryPoint(argv=("t.py",))
        return ControllerDialer(
            NodeSpec(
                node="n1",
                order=0,
                nproc=1,
                url=url,
                keys=str(keys.key.parent),
                log_dir="",
                entry=entry,
                settings=Settings(),
                run_id=run_id,
            )
        )

    def refusals(self) -> list[str]:
        log = self.folder / "audit.log"
        return [json.loads(line)["refused"] for line in log.read_text().splitlines()] if log.exists() else []


async def linked(dialing: ControllerDialer) -> str:
    """As whom the controller sees us."""
    async with dialing.open_link() as link:
        return (await anext(aiter(link))).decode()


async def test_a_node_is_known_by_its_certificate(ours: Organisation, tmp_path: Path) -> None:
    keys = ours.keys("n1", leads=False)
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        assert await desk.introduce(keys) == CertifiedNode(node="n1", run_id="r")
        assert await desk.introduce(ours.keys("n2", "r"), "r") == CertifiedNode(node="n2", run_id="r")
        assert await linked(desk.dialing(keys, "r")) == "n1"
    assert (tmp_path / "door" / "nodes.json").stat().st_mode & 0o777 == 0o600
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:  # the next controller
        serial = desk.certificates.serial_of("n1")
        assert serial and desk.certificates.serial_of("n2")
        with pytest.raises(EnrolmentRefusedError, match=r" n1, .* certificate$") as refused:
            await desk.introduce(ours.keys("n1"))
        assert refused.value.status == 403 and desk.certificates.serial_of("n1") == serial
        assert await desk.introduce(keys) == CertifiedNode(node="n1", run_id="r")
        desk.links.open_link("n1", desk.links.make_outbox())
        with pytest.raises(EnrolmentRefusedError, match=r" n1$"):
            await desk.introduce(keys)


async def test_a_node_that_was_evicted(ours: Organisation, tmp_path: Path) -> None:
    keys = ours.keys("n1")
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        await desk.introduce(keys)
        desk.decider.step(1.0, Ready(node="n1", host="h", nproc=1))
        desk.decider.step(2.0, Order(verb="evict", who="ann", node="n1"))
        with pytest.raises(EnrolmentRefusedError, match=" n1 "):
            await desk.introduce(keys)
        with pytest.raises(BrokenLinkError, match="403"):
            await linked(desk.dialing(keys, "r"))


async def test_a_certificate_of_another_run(ours: Organisation, tmp_path: Path) -> None:
    keys = ours.keys("n1", "theirs")
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        with pytest.raises(EnrolmentRefusedError, match=r" n1 .* theirs, .* r$"):
            await desk.introduce(keys)
        [told] = desk.refusals()
        assert "theirs" in told
        with pytest.raises(BrokenLinkError, match="403"):
            await linked(desk.dialing(keys, "theirs"))
        assert desk.certificates.serial_of("n1") is None
        with pytest.raises(EnrolmentError, match=r" r, not theirs$"):
            await desk.introduce(ours.keys("n1"), "theirs")


async def test_a_node_that_asks_without_end_is_slowed_and_nobody_else(
    ours: Organisation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_admission, "_NODE_AT_ONCE", 3.0)
    monkeypatch.setattr(caller_admission, "_NODE_A_SECOND", 0.0)
    one, two = ours.keys("n1"), ours.keys("n2")
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        for _ in range(3):
            assert await linked(desk.dialing(one, "r")) == "n1"
        with pytest.raises(BrokenLinkError, match="429"):
            await linked(desk.dialing(one, "r"))
        assert await linked(desk.dialing(two, "r")) == "n2"


async def test_a_certificate_of_another_authority(ours: Organisation, tmp_path: Path) -> None:
    theirs = Organisation(tmp_path / "theirs").keys("n1")
    stranger = KeyFiles(theirs.key, theirs.certificate, ours.keys("n1").authority)
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        with pytest.raises(LinkClosedError, match=r"rejects door\.certificate"):
            await desk.introduce(stranger)
        assert desk.certificates.serial_of("n1") is None
        with pytest.raises(EnrolmentRefusedError, match=r"door\.authority"):
            await asyncio.to_thread(EnrolmentClient, desk.address, TOKEN)
        [told] = desk.refusals()
        assert all(name in told for name in ("door.authority", "door.certificate", "door.key"))


async def test_others_who_play_the_controller(ours: Organisation, tmp_path: Path) -> None:
    """A node of the same authority, somebody else's authority, the controller of another run: all hear nothing."""
    ours_here = ours.keys("n1")
    for keys, why in (
        (ours.keys("thief", leads=False), "is no controller by door.authority: .*controller.holdfast"),
        (
            Organisation(tmp_path / "theirs").keys("n0"),
            "is no controller by door.authority: self-signed certificate in",
        ),
        (ours.keys("n0", "theirs"), "the certificate of the controller at .* is for the run theirs, not r"),
    ):
        async with Desk(tmp_path / "door").open(keys) as desk:
            with pytest.raises(EnrolmentError, match=why):
                await desk.introduce(ours_here, "r")
            assert desk.certificates.serial_of("n1") is None
            with pytest.raises((UnprovenPeerError, BrokenLinkError)):
                await linked(desk.dialing(ours_here, "r"))


async def test_nodes_are_told_whose_certificates_count(desk_of: Open) -> None:
    """By the serial of its certificate, and by name: the user's authority may have signed it another."""
    async with desk_of(LARGE) as desk:
        certificates, links = desk.built.certificates, desk.built.links
        certificates.add_serials({"a": "0A", "b": "0B", "c": "0C"})
        desk.controller.process_event(Ready(node="b", host="h", nproc=1))
        desk.controller.process_event(Order(verb="evict", who="ann", node="b"))
        agent = await desk.link("a")
        await agent.hello()
        welcome = await agent.hear()
        listed = join_ids((certificate_id("a", "0A"), certificate_id("c", "0C")))
        assert isinstance(welcome, Welcome) and welcome.peers == AdmittedPeers(members=listed)
        assert not any(certificates.is_valid(node, "0B") for node in ("a", "b"))
        assert certificates.is_valid("c", "0C")
        assert links.is_linked("a") and not links.is_linked("c")


async def test_a_node_that_fell_silent_may_come_back_where_nobody_else_will(desk_of: Open) -> None:
    async with desk_of(LARGE) as desk:  # whose fleet cannot acquire
        serials = {"silent": "0A", "sick": "0B", "sent away": "0C"}
        desk.built.certificates.add_serials(serials)
        for node in serials:
            desk.controller.process_event(Ready(node=node, host="h", nproc=1))
        desk.controller.process_event(Alarm(kind=Kind.SILENCE, at=1.0, suspects=("silent",), reason="is silent"))
        desk.controller.process_event(Alarm(kind=Kind.HEALTH, at=1.0, suspects=("sick",), reason="is hot", hard=True))
        desk.controller.process_event(Order(verb="evict", who="ann", node="sent away"))
        assert set(desk.controller.view.gone) == set(serials)
        valid = [node for node, serial in serials.items() if desk.built.certificates.is_valid(node, serial)]
        assert valid == ["silent"]


async def test_a_disk_that_is_full_keeps_new_nodes_out_and_no_other(ours: Organisation, tmp_path: Path) -> None:
    known, new = ours.keys("n1"), ours.keys("n2")
    async with Desk(tmp_path / "door").open(ours.keys("n0")) as desk:
        await desk.introduce(known)
        (tmp_path / "door" / "nodes.json").rename(tmp_path / "kept")
        (tmp_path / "door" / "nodes.json").mkdir()  # nothing can be written there now
        with pytest.raises(EnrolmentRefusedError, match=os.strerror(errno.EISDIR)):
            await desk.introduce(new)
        assert await desk.introduce(known) == CertifiedNode(node="n1", run_id="r")
