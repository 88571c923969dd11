"""The job as Prometheus metrics, computed from the ledger when asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.controller.control_loop import Controller
from holdfast.core.decide.node_roles import NodeRole
from holdfast.core.record.job_account import UNSETTLED, Account, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.model.observation import LinkTraffic


class JobMetrics:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        c = self._controller
        account, view = c.ledger.make_account(c.clock()), c.view
        if account.ettr is not None:
            yield GaugeMetricFamily(
                "holdfast_ettr", "Productive share of the wall time; unknown time is included.", account.ettr
            )
        if account.hour_ettr is not None:
            yield GaugeMetricFamily("holdfast_ettr_hour", "Productive share of the last hour.", account.hour_ettr)
        yield from _pace_metrics(account)
        yield GaugeMetricFamily("holdfast_step", "Newest step that every rank has made.", max(c.reached_step, 0))
        if storage := c.registry.storage.newest:
            yield GaugeMetricFamily("holdfast_stored_step", "Step last written to storage.", storage.step)
            yield GaugeMetricFamily("holdfast_stored_timestamp_seconds", "When that was written.", storage.at)
            missed = storage.missed is not None
            yield GaugeMetricFamily("holdfast_storage_failing", "1 while later steps cannot be written.", missed)
        yield GaugeMetricFamily("holdfast_generation", "Launches of all ranks so far.", view.generation)
        yield CounterMetricFamily("holdfast_incidents", "Incidents that are over.", len(account.incidents))
        yield CounterMetricFamily("holdfast_changes", "Planned restarts that are over.", len(account.changes))
        redone = c.ledger.count_redone(c.reached_step)
        yield CounterMetricFamily("holdfast_redone_steps", "Steps that had been made before.", redone)
        yield GaugeMetricFamily("holdfast_release", "Number of the release that runs.", view.running_release.number)
        held = bool(view.held_by or view.question)
        yield GaugeMetricFamily("holdfast_held", "1 while a person is waited for.", held)
        yield GaugeMetricFamily("holdfast_loop_lag_seconds", "Lag of the controller's event loop.", c.lag_s)
        settled = c.ledger.settle_account(c.clock())
        spent = CounterMetricFamily("holdfast_spent_seconds", "Wall time by use.", labels=["use"])
        for use in TimeUse:
            spent.add_metric([use.value], settled.spent_s(use))
        yield spent
        lost = CounterMetricFamily("holdfast_lost_seconds", "Wall time lost by cause.", labels=["cause"])
        for cause, seconds in settled.lost_s().items():
            if cause != UNSETTLED:
                lost.add_metric([cause], seconds)
        yield lost
        nodes = GaugeMetricFamily("holdfast_nodes", "Nodes by role.", labels=["role"])
        roles = list(view.assign_roles(c.ledger.admitting).values())
        for role in NodeRole:
            nodes.add_metric([role], roles.count(role))
        yield nodes
        yield from _traffic_metrics(c.detectors.network.list_traffic(c.clock()))
        restarts = CounterMetricFamily("holdfast_restart_seconds", "Restarts by phase.", labels=["kind", "phase"])
        for (kind, phase), seconds in _by_phase(account).items():
            restarts.add_metric([kind, phase], seconds)
        yield restarts


def _pace_metrics(account: Account) -> Iterator[Metric]:
    """Yield the pace of each release in steady training; what is not known has no sample."""
    steps = GaugeMetricFamily("holdfast_steps_per_second", "Steady steps by release.", labels=["release"])
    tokens = GaugeMetricFamily("holdfast_tokens_per_second", "Tokens of steady steps by release.", labels=["release"])
    mfu = GaugeMetricFamily("holdfast_mfu", "Model FLOPs utilization by release.", labels=["release", "flops"])
    for pace in account.paces:
        release = str(pace.release)
        steps.add_metric([release], pace.steps_s)
        if pace.tokens_s is not None:
            tokens.add_metric([release], pace.tokens_s)
        if pace.mfu is not None:
            mfu.add_metric([release, "estimated" if pace.estimated else "told"], pace.mfu)
    yield from (family for family in (steps, tokens, mfu) if family.samples)


def _traffic_metrics(traffic: dict[str, tuple[LinkTraffic, ...]]) -> Iterator[Metric]:
    """Yield what goes over the links of the nodes' machines, since the reading before."""
    flow = GaugeMetricFamily(
        "holdfast_link_bytes_per_second", "Bytes over links.", labels=["node", "link", "direction"]
    )
    signs = GaugeMetricFamily("holdfast_rdma_events_per_second", "RoCE counters.", labels=["node", "link", "counter"])
    for node, links in traffic.items():
        for link in links:
            flow.add_metric([node, link.link, "in"], link.in_bytes_s)
            flow.add_metric([node, link.link, "out"], link.out_bytes_s)
            for counter, rate in link.signs.items():
                signs.add_metric([node, link.link, counter], rate)
    yield from (family for family in (flow, signs) if family.samples)


def _by_phase(account: Account) -> dict[tuple[str, str], float]:
    spent: dict[tuple[str, str], float] = {}
    for restart in report_of(account).restarts:
        kind = "incident" if restart.incident else "planned"
        for phase, seconds in restart.phases_s.items():
            spent[kind, phase] = spent.get((kind, phase), 0.0) + seconds
    return spent


def render_metrics(controller: Controller) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobMetrics(controller))
    return generate_latest(registry)
