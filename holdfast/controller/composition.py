"""Builds a controller from its ports. Each part gets the parts that it needs when it is made."""

from typing import NamedTuple

from holdfast.config import Settings
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.actions.action_executor import ActionExecutor
from holdfast.controller.actions.errand_dispatch import ErrandDispatch
from holdfast.controller.actions.node_probing import NodeProbing
from holdfast.controller.actions.release_staging import ReleaseStaging
from holdfast.controller.actions.replay_runs import ReplayRuns
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.controller.control_loop import Controller, JobDetectors
from holdfast.controller.fleet_watch import FleetWatch
from holdfast.controller.job_clock import JobClock
from holdfast.controller.job_progress_watch import StallWatch
from holdfast.controller.network_watch import NetworkWatch
from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.controller.peer_copies_and_aims import SnapshotAims
from holdfast.controller.stack_tracing import StackTracing
from holdfast.controller_interfaces import ControllerPorts
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.job_progress import JobPace
from holdfast.core.detect.replica import ReplicaDetector
from holdfast.core.record.ledger import Ledger
from holdfast.core.snapshots.disk_floor_coordination import DiskFloor
from holdfast.core.snapshots.recovery_floor_coordination import RecoveryFloor


class BuiltController(NamedTuple):
    """A controller, and the parts of it that its process and its API use directly."""

    controller: Controller
    ingest: AgentIngest
    tracing: StackTracing
    links: NodeLinks
    certificates: NodeCertificates


def build_controller(settings: Settings, ports: ControllerPorts) -> BuiltController:
    """Build all parts of a controller, each after the parts that its constructor needs."""
    clock, decider, ledger = JobClock(ports.make_clock), Decider(), Ledger()
    view = decider.view
    links = NodeLinks(lambda: ports.journal.epoch)
    registry = NodeRegistry(settings.silence, view, links)
    certificates = NodeCertificates(view, registry.holds_copies, ports.say)
    replicas = ReplicaDetector(settings.replica)
    floor = RecoveryFloor(settings.backup, replicas.newest_equal_step, DiskFloor(settings.disk))
    aims = SnapshotAims(floor, registry, links, certificates, ports.say)
    tracing = StackTracing(links, clock)
    stalls = StallWatch(settings, view, tracing, clock)
    network = NetworkWatch(settings, view, registry, links=links, tracing=tracing, now=clock)
    detectors = JobDetectors(pace=JobPace(settings.pace), replicas=replicas, stalls=stalls, network=network)
    dispatch = ErrandDispatch(links, registry)
    ask, store = dispatch.ask_nodes, ports.store
    admission = HostAdmission(ports.blocked, settings.block, view, now=clock, say=ports.say)
    executor = ActionExecutor(
        fleet=ports.fleet,
        store=store,
        notes=ports.notes,
        say=ports.say,
        view=view,
        ledger=ledger,
        links=links,
        registry=registry,
        aims=aims,
        dispatch=dispatch,
        probing=NodeProbing(ask, store, registry.hosts, settings.probe, ports.probe_history),
        replaying=ReplayRuns(ask, store, settings.replay, view=view, registry=registry, say=ports.say),
        staging=ReleaseStaging(ask),
        admission=admission,
    )
    controller = Controller(
        settings,
        ports,
        clock=clock,
        decider=decider,
        ledger=ledger,
        links=links,
        registry=registry,
        aims=aims,
        detectors=detectors,
        dispatch=dispatch,
        executor=executor,
        fleet_watch=FleetWatch(ports.fleet, view, registry),
    )
    ingest = AgentIngest(controller, settings.silence.beat_s, tracing, certificates, admission=admission, say=ports.say)
    return BuiltController(controller, ingest, tracing, links, certificates)
