"""Who hears which certificates are revoked, and that one is valid again."""

import asyncio

from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.snapshot_aims import SnapshotAims
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.snapshots.disk_floor import DiskFloor, DiskLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits, RecoveryFloor
from holdfast.model.action import Launch, Stop
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Begin, Event, Limits, Outcome, Ready
from holdfast.model.job_and_seats import Job
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import AimMessage


def test_keepers_accept_a_node_that_is_back_before_its_ranks_start() -> None:
    decider, links, outbox = Decider(), NodeLinks(lambda: 1), asyncio.Queue[bytes]()
    links.open_link("a", outbox)
    certificates = NodeCertificates(decider.view)
    certificates.add_serials({"a": "0A", "b": "0B"})
    floor = RecoveryFloor(BackupLimits(), lambda: None, DiskFloor(DiskLimits()))
    registry = NodeRegistry(SilenceLimits(), decider.view, links)
    aims = SnapshotAims(floor, registry, links, certificates, list[str]().append)
    told: list[tuple[str, ...]] = []

    def play(*events: Event) -> None:
        """Carry out what is decided, at once."""
        for event in events:
            for action in decider.step(float(len(told)), event).actions:
                if isinstance(action, Launch):
                    aims.place_copies(action.generation, action.seats, decider.view.mesh)
                if isinstance(action, Launch | Stop):
                    play(Outcome(action=action.id, ok=True))
        while not outbox.empty():
            message = agent_messages.decode_from_controller(outbox.get_nowait())
            assert isinstance(message, AimMessage)
            told.append(message.revoked)

    ready = [Ready(node=node, host=node, nproc=1) for node in "ab"]
    play(Begin(job=Job(run_id="r", min_nodes=1, max_nodes=2, can_acquire=False), limits=Limits()), *ready)
    assert not told, "nobody has left yet"
    play(Alarm(kind=Kind.SILENCE, at=1.0, suspects=("b",), reason="is silent", generation=1))
    assert [*told[-1]] == ["0B", "holdfast:node:b"]
    play(ready[1], Alarm(kind=Kind.CRASH, at=2.0, suspects=(), reason="exited", generation=2))
    assert decider.view.generation == 3 and not told[-1]
