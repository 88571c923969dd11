"""The job as Prometheus metrics, computed from the ledger at each request.

The number of series grows neither with the number of ranks nor with the age of the job."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.controller.control_loop import Controller
from holdfast.core.decide.node_roles import NodeRole
from holdfast.core.detect.link_traffic import pick_job_links
from holdfast.core.record.job_account import UNSETTLED, Account, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.model.detector_alarm import Kind
from holdfast.model.job_phase import Phase
from holdfast.model.observation import LinkTraffic

LINKS = 64  # of a job with more of them, no single link has a series
CAUSES = 64  # of lost time; what is lost to others is added up
RELEASES = 4  # the newest ones: the pace of older ones changes no more
COUNTERS = 32  # of RDMA ports
OTHER_CAUSES = "other causes"
Sample = tuple[str, tuple[str, ...], float]  # the metric's name, the values of its labels, and its value


class MetricRow(NamedTuple):
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "holdfast_job_info": MetricRow("gauge", "1, for its label.", ("run_id",)),
    "holdfast_start_timestamp_seconds": MetricRow("gauge", "When the job began."),
    "holdfast_phase": MetricRow("gauge", "1 for the phase that the job is in, 0 for the others.", ("phase",)),
    "holdfast_ettr_ratio": MetricRow("gauge", "Productive share of the wall time; unknown time is included."),
    "holdfast_last_hour_ettr_ratio": MetricRow("gauge", "Productive share of the last hour."),
    "holdfast_ettr_is_at_most": MetricRow("gauge", "1 if the true ETTR may be lower than the one that is shown."),
    "holdfast_step": MetricRow("gauge", "Newest step that every rank has made."),
    "holdfast_step_timestamp_seconds": MetricRow("gauge", "When a rank last made a step."),
    "holdfast_generation": MetricRow("gauge", "Launches of all ranks so far."),
    "holdfast_release": MetricRow("gauge", "Number of the release that runs."),
    "holdfast_steps_per_second": MetricRow("gauge", "Steady steps by release.", ("release",)),
    "holdfast_tokens_per_second": MetricRow("gauge", "Tokens of steady steps by release.", ("release",)),
    "holdfast_mfu_ratio": MetricRow("gauge", "Model FLOPs utilization by release.", ("release", "flops")),
    "holdfast_tensor_active_ratio": MetricRow("gauge", "Share of the time that tensor cores work.", ("over",)),
    "holdfast_incidents_total": MetricRow("counter", "Incidents that are over, by kind of alarm.", ("kind",)),
    "holdfast_incident_open": MetricRow("gauge", "1 while an incident is open."),
    "holdfast_planned_restarts_total": MetricRow("counter", "Planned restarts that are over."),
    "holdfast_redone_steps_total": MetricRow("counter", "Steps that had been made before."),
    "holdfast_held": MetricRow("gauge", "1 while a person is waited for."),
    "holdfast_spent_seconds_total": MetricRow("counter", "Wall time by use.", ("use",)),
    "holdfast_lost_seconds_total": MetricRow("counter", "Wall time lost by cause.", ("cause",)),
    "holdfast_restart_seconds_total": MetricRow("counter", "Restarts by phase.", ("kind", "phase")),
    "holdfast_nodes": MetricRow("gauge", "Nodes by role.", ("role",)),
    "holdfast_nodes_wanted": MetricRow("gauge", "Nodes that the job should have, by role.", ("role",)),
    "holdfast_copied_step": MetricRow("gauge", "Newest step that outlives the loss of a node."),
    "holdfast_copy_age_steps": MetricRow("gauge", "Steps between that step and the newest snapshot."),
    "holdfast_copies_in_gaps": MetricRow("gauge", "1 if copies go into gaps between collectives."),
    "holdfast_stored_step": MetricRow("gauge", "Step last written to storage."),
    "holdfast_stored_timestamp_seconds": MetricRow("gauge", "When that was written."),
    "holdfast_storage_failing": MetricRow("gauge", "1 while later steps cannot be written."),
    "holdfast_network_bytes_per_second": MetricRow("gauge", "Bytes over the links of all nodes.", ("direction",)),
    "holdfast_network_rdma_events_per_second": MetricRow("gauge", "RoCE counters of all nodes.", ("counter",)),
    "holdfast_link_bytes_per_second": MetricRow("gauge", "Bytes over a link.", ("node", "link", "direction")),
    "holdfast_link_rdma_events_per_second": MetricRow("gauge", "RoCE counters.", ("node", "link", "counter")),
    "holdfast_journal_entries_total": MetricRow("counter", "Entries of the journal."),
    "holdfast_loop_lag_seconds": MetricRow("gauge", "Lag of the controller's event loop."),
}


class JobMetrics:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families in the order of the table; a family without a known value is left out."""
        c = self._controller
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in METRICS}
        for name, labels, value in (*_job_samples(c), *_time_samples(c), *_place_samples(c)):
            found[name].append((labels, value))
        for name, samples in found.items():
            row = METRICS[name]
            made = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = made(name, row.help, labels=row.labels)
            for labels, value in samples:
                family.add_metric(labels, value)
            if samples:
                yield family


def _job_samples(c: Controller) -> Iterator[Sample]:
    """Yield samples about the job's phase, step, releases and incidents."""
    view = c.view
    yield "holdfast_job_info", (view.job.run_id,), 1
    if c.ledger.began_at:
        yield "holdfast_start_timestamp_seconds", (), c.ledger.began_at
    for phase in Phase:
        yield "holdfast_phase", (phase.value,), view.phase is phase
    yield "holdfast_step", (), max(c.reached_step, 0)
    stepped_at = [beat.at for beat in c.registry.beats.values() if beat.step >= 0]
    stepped_at += [c.ledger.newest.at] if c.ledger.newest else []
    if stepped_at:
        yield "holdfast_step_timestamp_seconds", (), max(stepped_at)
    yield "holdfast_generation", (), view.generation
    yield "holdfast_release", (), view.running_release.number
    kinds = [record.kind for record in c.ledger.incidents]
    for kind in Kind:
        yield "holdfast_incidents_total", (kind.value,), kinds.count(kind)
    yield "holdfast_incident_open", (), bool(view.open_incident)
    yield "holdfast_planned_restarts_total", (), len(c.ledger.changes)
    yield "holdfast_redone_steps_total", (), c.ledger.count_redone(c.reached_step)
    yield "holdfast_held", (), bool(view.held_by or view.question)
    yield "holdfast_journal_entries_total", (), c.seq
    yield "holdfast_loop_lag_seconds", (), c.lag_s


def _time_samples(c: Controller) -> Iterator[Sample]:
    """Yield samples about how the job's time was used, and about its pace."""
    account = c.ledger.make_account(c.clock())
    if account.ettr is not None:
        yield "holdfast_ettr_ratio", (), account.ettr
        yield "holdfast_ettr_is_at_most", (), bool(account.at_most)
    if account.hour_ettr is not None:
        yield "holdfast_last_hour_ettr_ratio", (), account.hour_ettr
    settled = c.ledger.settle_account(c.clock())
    for use in TimeUse:
        yield "holdfast_spent_seconds_total", (use.value,), settled.spent_s(use)
    for cause, seconds in limit_causes(settled.lost_s()).items():
        yield "holdfast_lost_seconds_total", (cause,), seconds
    for (kind, phase), seconds in _by_phase(account).items():
        yield "holdfast_restart_seconds_total", (kind, phase), seconds
    for pace in account.paces[-RELEASES:]:
        release = str(pace.release)
        yield "holdfast_steps_per_second", (release,), pace.steps_s
        if pace.tokens_s is not None:
            yield "holdfast_tokens_per_second", (release,), pace.tokens_s
        if pace.mfu is not None:
            yield "holdfast_mfu_ratio", (release, "estimated" if pace.estimated else "told"), pace.mfu


def limit_causes(lost_s: Mapping[str, float]) -> dict[str, float]:
    """Return the lost seconds by cause; causes beyond a maximum are summed under one name. The earliest causes keep
    their names, because a Prometheus counter must not fall."""
    lost: dict[str, float] = {}
    for cause, seconds in lost_s.items():
        if cause != UNSETTLED:
            name = cause if len(lost) < CAUSES else OTHER_CAUSES
            lost[name] = lost.get(name, 0.0) + seconds
    return lost


def _by_phase(account: Account) -> dict[tuple[str, str], float]:
    spent: dict[tuple[str, str], float] = {}
    for restart in report_of(account).restarts:
        kind = "incident" if restart.incident else "planned"
        for phase, seconds in restart.phases_s.items():
            spent[kind, phase] = spent.get((kind, phase), 0.0) + seconds
    return spent


def _place_samples(c: Controller) -> Iterator[Sample]:
    """Yield samples about nodes, about where state lies, and about network traffic."""
    roles = list(c.view.assign_roles(c.ledger.admitting).values())
    for role in NodeRole:
        yield "holdfast_nodes", (role.value,), roles.count(role)
    yield "holdfast_nodes_wanted", (NodeRole.ACTIVE.value,), c.view.job.max_nodes
    yield "holdfast_nodes_wanted", (NodeRole.READY.value,), c.view.job.standbys
    if c.aims.floor.floor >= 0:
        yield "holdfast_copied_step", (), c.aims.floor.floor
        yield "holdfast_copy_age_steps", (), c.aims.floor.age_steps
        yield "holdfast_copies_in_gaps", (), c.aims.floor.pacing == "gaps"
    if storage := c.registry.storage.newest:
        yield "holdfast_stored_step", (), storage.step
        yield "holdfast_stored_timestamp_seconds", (), storage.at
        yield "holdfast_storage_failing", (), storage.missed is not None
    seated = [beat for seat in c.view.seats if (beat := c.registry.beats.get(seat.node))]
    if shares := [beat.tensor_share for beat in seated if beat.tensor_share is not None]:
        yield "holdfast_tensor_active_ratio", ("mean",), sum(shares) / len(shares)
        yield "holdfast_tensor_active_ratio", ("least",), min(shares)
    yield from _traffic_samples(c.detectors.network.list_traffic(c.clock()))


def _traffic_samples(traffic: dict[str, tuple[LinkTraffic, ...]]) -> Iterator[Sample]:
    """Yield the traffic since the last reading: the sum over all machines' links, and each link if there are few."""
    ours = [link for links in traffic.values() for link in pick_job_links(links)]
    if ours:
        yield "holdfast_network_bytes_per_second", ("in",), sum(link.in_bytes_s for link in ours)
        yield "holdfast_network_bytes_per_second", ("out",), sum(link.out_bytes_s for link in ours)
    for counter in sorted({counter for link in ours for counter in link.signs})[:COUNTERS]:
        events_s = sum(link.signs.get(counter, 0.0) for link in ours)
        yield "holdfast_network_rdma_events_per_second", (counter,), events_s
    if sum(map(len, traffic.values())) > LINKS:
        return
    for node, links in traffic.items():
        for link in links:
            yield "holdfast_link_bytes_per_second", (node, link.link, "in"), link.in_bytes_s
            yield "holdfast_link_bytes_per_second", (node, link.link, "out"), link.out_bytes_s
            for counter in sorted(link.signs)[:COUNTERS]:
                yield "holdfast_link_rdma_events_per_second", (node, link.link, counter), link.signs[counter]


def render_metrics(controller: Controller) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobMetrics(controller))
    return generate_latest(registry)
