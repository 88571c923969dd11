"""Reads network links from sysfs: carriers, flaps, errors and drops of real interfaces, and of RDMA ports if any."""

from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.agent.sources import Signal, SourceAbsent, read_number
from holdfast.model.observation import Gauge

_ERRORS = ("rx_errors", "tx_errors")
_DROPS = ("rx_dropped", "tx_dropped")
_RDMA_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "port_xmit_discards")


class NetworkSource:
    """Watches the links that are up at the start; it assumes that the job does not use links that are down then.

    Bridges and other interfaces without a device are left out, since they come and go with containers.
    """

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock = clock
        nets, rdma = root / "sys/class/net", root / "sys/class/infiniband"
        links = sorted(p for p in nets.glob("*") if (p / "device").exists() and read_number(p / "carrier") == 1)
        ports = sorted(p for p in rdma.glob("*/ports/*") if _is_active(p))
        self._links = {path: path.name for path in links}
        self._ports = {path: f"{path.parents[1].name} port {path.name}" for path in ports}
        if not self._links and not self._ports:
            raise SourceAbsent("no physical network link is up")

    def read(self) -> list[Signal]:
        now = self._clock()
        read = [*self._read_links(), *self._read_rdma()]
        return [Gauge(name=name, of=of, value=value, at=now) for name, of, value in read if value is not None]

    def _read_links(self) -> Iterator[tuple[str, str, float | None]]:
        for path, of in self._links.items():
            yield "net.down", of, float(read_number(path / "carrier") != 1)  # unreadable while it is set down, or gone
            yield "net.flaps", of, read_number(path / "carrier_down_count")
            yield "net.errors", of, _sum_counters(path / "statistics", _ERRORS)
            yield "net.drops", of, _sum_counters(path / "statistics", _DROPS)

    def _read_rdma(self) -> Iterator[tuple[str, str, float | None]]:
        for path, of in self._ports.items():
            yield "rdma.down", of, float(not _is_active(path))
            yield "rdma.flaps", of, read_number(path / "counters/link_downed")
            yield "rdma.errors", of, _sum_counters(path / "counters", _RDMA_ERRORS)


def _is_active(port: Path) -> bool:
    try:
        return (port / "state").read_text().partition(":")[2].strip() == "ACTIVE"
    except OSError:
        return False


def _sum_counters(folder: Path, names: tuple[str, ...]) -> float | None:
    values = [value for name in names if (value := read_number(folder / name)) is not None]
    return sum(values) if values else None
