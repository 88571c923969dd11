"""Rates from counters, and links that have gone quiet."""

import pytest

from holdfast.core.detect.link_traffic import QuietLinks, TrafficMeter, pick_job_links
from holdfast.model.observation import Gauge, LinkTraffic


def reading(at: float, of: str = "mlx5_0 port 1", **values: float) -> list[Gauge]:
    return [Gauge(name=name.replace("__", "."), of=of, value=value, at=at) for name, value in values.items()]


def test_rates_are_differences_over_time() -> None:
    meter = TrafficMeter()
    assert meter.on_gauges(reading(0.0, rdma__in_bytes=1e9, rdma__out_bytes=5e9, rdma__sign__np_cnp_sent=7)) == ()
    [link] = meter.on_gauges(reading(30.0, rdma__in_bytes=4e9, rdma__out_bytes=5e9, rdma__sign__np_cnp_sent=67))
    assert link == LinkTraffic(
        link="mlx5_0 port 1", rdma=True, in_bytes_s=1e8, out_bytes_s=0.0, signs={"np_cnp_sent": 2.0}
    )


def test_a_counter_that_was_reset_gives_no_rate() -> None:
    meter = TrafficMeter()
    meter.on_gauges(reading(0.0, "eth0", net__in_bytes=1e9, net__out_bytes=1e9))
    assert meter.on_gauges(reading(30.0, "eth0", net__in_bytes=5.0, net__out_bytes=5.0)) == ()
    [link] = meter.on_gauges(reading(60.0, "eth0", net__in_bytes=35.0, net__out_bytes=65.0))
    assert (link.rdma, link.in_bytes_s, link.out_bytes_s) == (False, 1.0, 2.0)


def test_other_gauges_are_no_traffic() -> None:
    meter = TrafficMeter()
    for at in (0.0, 30.0):
        assert meter.on_gauges(reading(at, "eth0", net__errors=at, net__down=0.0)) == ()


def flow(bytes_s: float, *, rdma: bool = True) -> LinkTraffic:
    return LinkTraffic(link="ib" if rdma else "eth0", rdma=rdma, in_bytes_s=bytes_s, out_bytes_s=0.0)


def test_the_job_talks_by_rdma_where_there_is_any() -> None:
    assert pick_job_links((flow(5.0, rdma=False), flow(7.0))) == [flow(7.0)]
    assert pick_job_links((flow(5.0, rdma=False),)) == [flow(5.0, rdma=False)]


class Hosts:
    """Two hosts that report every half minute."""

    def __init__(self, quiet_s: float = 600.0) -> None:
        self.quiet, self.now, self.stepped_at = QuietLinks(quiet_s, 90.0), 0.0, 0.0
        self.quiet.on_launch(0.0)

    def go_on(self, seconds: float, **flows: LinkTraffic) -> float:
        until = self.now + seconds
        while self.now < until:
            self.now += 30.0
            for host, link in flows.items():
                # ssh and beats go by the ethernet, whatever the ranks do
                self.quiet.on_traffic(self.now, host, (link, flow(3e4, rdma=False)))
        return self.quiet.quiet_s(self.now, ("a", "b"), self.stepped_at)


def test_quiet_on_all_hosts_for_long_is_a_reason_to_look() -> None:
    hosts = Hosts()
    assert hosts.go_on(300, a=flow(1e9), b=flow(1e9)) == 0
    assert hosts.go_on(570, a=flow(0.0), b=flow(0.0)) == 0
    assert hosts.go_on(60, a=flow(0.0), b=flow(0.0)) == pytest.approx(600)
    hosts.quiet.on_look(hosts.now)
    assert hosts.go_on(570, a=flow(0.0), b=flow(0.0)) == 0, "one look is enough for a while"
    assert hosts.go_on(30, a=flow(0.0), b=flow(0.0)) == pytest.approx(1200)


def test_one_host_that_talks_or_is_not_heard_of_is_enough_to_wait() -> None:
    assert Hosts().go_on(3000, a=flow(0.0), b=flow(1e6)) == 0
    assert Hosts().go_on(3000, a=flow(0.0)) == 0
    hosts = Hosts()
    assert hosts.go_on(3000, a=flow(0.0), b=flow(0.0)) > 0
    assert hosts.go_on(120, a=flow(0.0)) == 0, "b has gone silent: nothing is known of it"


def test_steps_a_launch_and_a_single_host_are_no_reason() -> None:
    hosts = Hosts()
    hosts.stepped_at = 2900.0
    assert hosts.go_on(3000, a=flow(0.0), b=flow(0.0)) == 0, "local steps need no links"
    hosts.stepped_at = 0.0
    assert hosts.go_on(30, a=flow(0.0), b=flow(0.0)) > 0
    assert hosts.quiet.quiet_s(hosts.now, ("a",), 0.0) == 0
    hosts.quiet.on_launch(hosts.now)
    assert hosts.go_on(30, a=flow(0.0), b=flow(0.0)) == 0
    assert Hosts(quiet_s=0.0).go_on(3000, a=flow(0.0), b=flow(0.0)) == 0
