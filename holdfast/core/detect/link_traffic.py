"""Link traffic: turns counters of network links into rates, and finds a job whose links have all gone quiet.

Quiet links prove nothing against a node, because ranks may compute, read data or compile. They are a reason to look at
all ranks. The detector reports only that the links are quiet.
"""

from collections.abc import Collection, Iterable, Mapping

from holdfast.model.observation import Gauge, LinkTraffic

IN, OUT, SIGN = "in_bytes", "out_bytes", "sign."  # the last part of a gauge's name: net.in_bytes, rdma.sign.np_cnp_sent
_RDMA = "rdma."
_QUIET_RDMA = 1e3  # bytes per second: less than any collective makes
_QUIET_NET = 64e3  # beats and ssh go by it, too


class TrafficMeter:
    """Computes rates of one machine's links from two readings of their counters."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Gauge] = {}

    def on_gauges(self, gauges: Iterable[Gauge]) -> tuple[LinkTraffic, ...]:
        """Record one reading of the counters and return the rates since the last one; a new link has none yet."""
        rates: dict[tuple[str, bool], dict[str, float]] = {}
        for gauge in gauges:
            family, _, what = gauge.name.partition(".")
            if what not in (IN, OUT) and not what.startswith(SIGN):
                continue
            last = self._last.get((gauge.name, gauge.of))
            self._last[gauge.name, gauge.of] = gauge
            if last is not None and gauge.at > last.at and gauge.value >= last.value:  # less: it was reset
                rate = (gauge.value - last.value) / (gauge.at - last.at)
                rates.setdefault((gauge.of, f"{family}." == _RDMA), {})[what] = rate
        return tuple(_make_traffic(of, rdma, found) for (of, rdma), found in rates.items() if {IN, OUT} <= found.keys())


def _make_traffic(of: str, rdma: bool, rates: Mapping[str, float]) -> LinkTraffic:
    signs = {what.removeprefix(SIGN): rate for what, rate in rates.items() if what.startswith(SIGN)}
    return LinkTraffic(link=of, rdma=rdma, in_bytes_s=rates[IN], out_bytes_s=rates[OUT], signs=signs)


def pick_job_links(links: Collection[LinkTraffic]) -> list[LinkTraffic]:
    """Return the links by which ranks talk: RDMA ports where a machine has any, else its network interfaces."""
    return [link for link in links if link.rdma] or list(links)


class QuietLinks:
    """Watches whether the links of all machines of a job are quiet for long."""

    def __init__(self, quiet_s: float, stale_s: float) -> None:
        """The links of a job count as quiet after `quiet_s` seconds of hardly any traffic and no step; 0 turns this
        off. The links of a machine count as unknown after `stale_s` seconds without a report from the machine."""
        self._quiet_s, self._stale_s = quiet_s, stale_s
        self._since: dict[str, float] = {}  # machine -> since when its links are quiet
        self._heard_at: dict[str, float] = {}
        self._looked_at = 0.0

    def on_launch(self, now: float) -> None:
        self._since.clear()
        self._looked_at = now

    def on_traffic(self, now: float, host: str, links: Collection[LinkTraffic]) -> None:
        self._heard_at[host] = now
        if links and all(_is_quiet(link) for link in pick_job_links(links)):
            self._since.setdefault(host, now)
        else:
            self._since.pop(host, None)

    def quiet_s(self, now: float, hosts: Collection[str], stepped_at: float) -> float:
        """Return for how many seconds the links of all these hosts have been quiet without a step. Return 0 if that is
        too short, if reports of a host are missing, if there is only one host, or if ranks were inspected recently."""
        fresh = all(now <= self._heard_at.get(host, -self._stale_s) + self._stale_s for host in hosts)
        if not self._quiet_s or len(hosts) < 2 or not fresh or any(host not in self._since for host in hosts):
            return 0.0
        lasts_s = now - max(stepped_at, *(self._since[host] for host in hosts))
        return lasts_s if lasts_s >= self._quiet_s and now >= self._looked_at + self._quiet_s else 0.0

    def on_look(self, now: float) -> None:
        self._looked_at = now


def _is_quiet(link: LinkTraffic) -> bool:
    return link.in_bytes_s + link.out_bytes_s < (_QUIET_RDMA if link.rdma else _QUIET_NET)
