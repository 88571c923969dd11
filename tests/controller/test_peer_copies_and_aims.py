"""Who hears whose certificates count, and that one is valid again."""

import asyncio

from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.peer_copies_and_aims import SnapshotAims
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.snapshots.disk_floor_coordination import DiskFloor, DiskLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits, RecoveryFloor
from holdfast.model.action import Launch, Stop
from holdfast.model.decider_events import Begin, Event, Outcome, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Job
from holdfast.model.state_copy import Copy
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import PeersMessage
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, join_ids

READY = [Ready(node=node, host=node, nproc=1) for node in "ab"]
BEGIN = Begin(job=Job(run_id="r", min_nodes=1, max_nodes=2, can_acquire=False), limits=Limits())
A, B = certificate_id("a", "0A"), certificate_id("b", "0B")
BOTH, ONE = AdmittedPeers(members=join_ids((A, B))), AdmittedPeers(members=A)


class PlayedJob:
    """A job of two nodes, in which what is decided is done at once; it keeps what node a is told of certificates."""

    def __init__(self) -> None:
        self.decider, links, self._outbox = Decider(), NodeLinks(lambda: 1), asyncio.Queue[bytes]()
        links.open_link("a", self._outbox)
        self.registry = NodeRegistry(SilenceLimits(), self.decider.view, links)
        certificates = NodeCertificates(self.decider.view, self.registry.holds_copies, list[str]().append)
        certificates.add_serials({"a": "0A", "b": "0B"})
        floor = RecoveryFloor(BackupLimits(), lambda: None, DiskFloor(DiskLimits()))
        self.aims = SnapshotAims(floor, self.registry, links, certificates, list[str]().append)
        self.told: list[AdmittedPeers] = []
        self.play(BEGIN, *READY)

    def play(self, *events: Event) -> None:
        for event in events:
            for action in self.decider.step(float(len(self.told)), event).actions:
                if isinstance(action, Launch):
                    self.aims.place_copies(action.generation, action.seats, self.decider.view.mesh)
                if isinstance(action, Launch | Stop):
                    self.play(Outcome(action=action.id, ok=True))
        while not self._outbox.empty():
            message = agent_messages.decode_from_controller(self._outbox.get_nowait()).message
            if isinstance(message, PeersMessage):
                self.told.append(message.peers)

    def lose(self, node: str) -> None:
        self.play(Alarm(kind=Kind.SILENCE, at=1.0, suspects=(node,), reason="is silent", generation=1))


def test_keepers_accept_a_node_that_is_back_before_its_ranks_start() -> None:
    job = PlayedJob()
    assert job.told == [BOTH]
    job.lose("b")
    assert job.told == [BOTH, ONE], "told with the launch of the generation that goes on without it"
    job.play(READY[1], Alarm(kind=Kind.CRASH, at=2.0, suspects=(), reason="exited", generation=2))
    assert job.decider.view.generation == 3 and job.told[-1] == BOTH


def test_a_node_that_leaves_is_accepted_until_others_have_restored_its_copies() -> None:
    job = PlayedJob()
    job.registry.record_copies("b", (Copy(rank=1, step=7, node="b", layout="l", world=2, whole=True),))
    job.lose("b")
    assert job.told[-1] == AdmittedPeers(members=A, leaving=B), "others may restore from it"
    job.registry.record_departure("b")
    job.aims.on_departure("b")
    job.play()
    assert job.told[-1] == ONE
