"""Reads network links from sysfs: carriers, flaps, errors, drops and bytes of real interfaces and RDMA ports."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.agent.sources import Signal, SourceAbsent, read_number
from holdfast.core.detect.link_traffic import IN, OUT, SIGN
from holdfast.model.observation import Gauge
from holdfast.wire import run_and_node_specs

_ERRORS = ("rx_errors", "tx_errors")
_DROPS = ("rx_dropped", "tx_dropped")
_RDMA_ERRORS = ("symbol_error", "port_rcv_errors", "link_error_recovery", "port_xmit_discards")
_RDMA_WORD = 4  # bytes: port_rcv_data and port_xmit_data count in these
# Of RoCE: what was sent again or came in disorder, and notifications of congestion, as far as the driver has them.
_SIGNS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
    "rx_icrc_encapsulated",
    "roce_adp_retrans",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
)


class WatchedLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the links that an agent watches; valid until the next boot, which may rename links."""

    boot: str
    links: tuple[str, ...]
    ports: tuple[str, ...]


class NetworkSource:
    """Watches the links that are up at the start or that an earlier agent noted. The job should use no others.

    Bridges and other interfaces without a device are left out, since they come and go with containers.
    """

    def __init__(self, clock: Callable[[], float], note: Path, root: Path = Path("/")) -> None:
        """`note` is a file that tells later agents of the run on this machine which links to watch."""
        self._clock = clock
        nets, rdma = root / "sys/class/net", root / "sys/class/infiniband"
        known = _read_note(note, _read_boot(root))
        up = {str(p) for p in nets.glob("*") if (p / "device").exists() and read_number(p / "carrier") == 1}
        active = {str(p) for p in rdma.glob("*/ports/*") if _is_active(p)}
        links, ports = (tuple(map(Path, sorted(found))) for found in (up.union(known.links), active.union(known.ports)))
        with contextlib.suppress(OSError):  # a full disk costs no more than that the next agent does not know
            told = WatchedLinks(boot=known.boot, links=tuple(map(str, links)), ports=tuple(map(str, ports)))
            run_and_node_specs.publish_file(note, msgspec.json.encode(told))
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
            yield f"net.{IN}", of, read_number(path / "statistics/rx_bytes")
            yield f"net.{OUT}", of, read_number(path / "statistics/tx_bytes")

    def _read_rdma(self) -> Iterator[tuple[str, str, float | None]]:
        for path, of in self._ports.items():
            yield "rdma.down", of, float(not _is_active(path))
            yield "rdma.flaps", of, read_number(path / "counters/link_downed")
            yield "rdma.errors", of, _sum_counters(path / "counters", _RDMA_ERRORS)
            yield f"rdma.{IN}", of, _read_words(path / "counters/port_rcv_data")
            yield f"rdma.{OUT}", of, _read_words(path / "counters/port_xmit_data")
            for name in _SIGNS:
                yield f"rdma.{SIGN}{name}", of, read_number(path / "hw_counters" / name)


def _read_boot(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_note(note: Path, boot: str) -> WatchedLinks:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = run_and_node_specs.read_json(note, WatchedLinks)
        if known.boot == boot:
            return known
    return WatchedLinks(boot=boot, links=(), ports=())


def _is_active(port: Path) -> bool:
    try:
        return (port / "state").read_text().partition(":")[2].strip() == "ACTIVE"
    except OSError:
        return False


def _read_words(path: Path) -> float | None:
    words = read_number(path)
    return None if words is None else _RDMA_WORD * words


def _sum_counters(folder: Path, names: tuple[str, ...]) -> float | None:
    values = [value for name in names if (value := read_number(folder / name)) is not None]
    return sum(values) if values else None
