"""Links from a sysfs that tests write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.sources import SourceAbsent
from holdfast.agent.sources.network import NetworkSource
from holdfast.core.detect.health import HealthDetector, HealthLimits
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.observation import Gauge


def link(root: Path, name: str, carrier: int = 1, *, virtual: bool = False) -> Path:
    folder = root / "sys/class/net" / name
    (folder / "statistics").mkdir(parents=True)
    if not virtual:
        (folder / "device").mkdir()
    (folder / "carrier").write_text(f"{carrier}\n")
    (folder / "carrier_down_count").write_text("4\n")
    for counter in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"):
        (folder / "statistics" / counter).write_text("7\n")
    return folder


def port(root: Path) -> Path:
    folder = root / "sys/class/infiniband/mlx5_0/ports/1"
    (folder / "counters").mkdir(parents=True)
    (folder / "state").write_text("4: ACTIVE\n")
    for counter in ("link_downed", "symbol_error", "port_rcv_errors"):
        (folder / "counters" / counter).write_text("0\n")
    return folder


def source(root: Path, now: Callable[[], float] = lambda: 0.0) -> NetworkSource:
    return NetworkSource(now, root / "note", root)


def numbers(source: NetworkSource) -> dict[tuple[str, str], float]:
    return {(s.of, s.name): s.value for s in source.read() if isinstance(s, Gauge)}


def test_real_links_that_were_up(tmp_path: Path) -> None:
    link(tmp_path, "eth0")
    link(tmp_path, "eth1", carrier=0)
    link(tmp_path, "docker0", virtual=True)
    port(tmp_path)
    read = numbers(source(tmp_path))
    assert {of for of, _ in read} == {"eth0", "mlx5_0 port 1"}
    assert (read["eth0", "net.errors"], read["eth0", "net.flaps"], read["eth0", "net.down"]) == (14, 4, 0)
    assert (read["mlx5_0 port 1", "rdma.down"], read["mlx5_0 port 1", "rdma.errors"]) == (0, 0)


def test_bytes_and_signs_of_congestion(tmp_path: Path) -> None:
    statistics, ib = link(tmp_path, "eth0") / "statistics", port(tmp_path)
    (statistics / "rx_bytes").write_text("500\n")
    (statistics / "tx_bytes").write_text("700\n")
    (ib / "counters/port_rcv_data").write_text("1000\n")
    (ib / "counters/port_xmit_data").write_text("2000\n")
    (ib / "hw_counters").mkdir()
    (ib / "hw_counters/np_cnp_sent").write_text("3\n")
    read = numbers(source(tmp_path))
    assert (read["eth0", "net.in_bytes"], read["eth0", "net.out_bytes"]) == (500, 700)
    rdma = {name: value for (of, name), value in read.items() if of == "mlx5_0 port 1"}
    assert (rdma["rdma.in_bytes"], rdma["rdma.out_bytes"]) == (4000, 8000), "they count in words of four bytes"
    assert rdma["rdma.sign.np_cnp_sent"] == 3
    assert "rdma.sign.out_of_sequence" not in rdma, "what a driver does not tell is not known"


def test_acknowledgements_that_time_out(tmp_path: Path) -> None:
    counters = port(tmp_path) / "hw_counters"
    counters.mkdir()
    (counters / "local_ack_timeout_err").write_text("5000\n")  # before the job: nobody cares
    watched = Watched(tmp_path)
    (counters / "local_ack_timeout_err").write_text("5050\n")
    assert watched.read() == []
    (counters / "local_ack_timeout_err").write_text("5100\n")
    [alarm] = watched.read()
    assert not alarm.hard and alarm.stance is Stance.NOTIFY and "mlx5_0 port 1" in alarm.reason


def test_a_machine_without_links(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent):
        source(tmp_path)


def test_the_next_agent_watches_what_the_last_one_did(tmp_path: Path) -> None:
    """A link that is down when an agent starts again is the job's all the same."""
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("first\n")
    folder, spare, ib = link(tmp_path, "eth0"), link(tmp_path, "eth1", carrier=0), port(tmp_path)
    source(tmp_path)
    (folder / "carrier").write_text("0\n")
    (ib / "state").write_text("1: DOWN\n")
    for _ in range(2):  # nor does the third forget it
        read = numbers(source(tmp_path))
        assert (read["eth0", "net.down"], read["mlx5_0 port 1", "rdma.down"]) == (1, 1)
        assert ("eth1", "net.down") not in read, "nobody has seen it up"
    (spare / "carrier").write_text("1\n")
    boot.write_text("second\n")  # names may be others by now
    assert {of for of, _ in numbers(source(tmp_path))} == {"eth1"}
    (tmp_path / "note").write_bytes(b"{broken")
    assert {of for of, _ in numbers(source(tmp_path))} == {"eth1"}


class Watched:
    """A source and its detector, one reading every 30 s."""

    def __init__(self, root: Path) -> None:
        self.now = 0.0
        self.source = source(root, lambda: self.now)
        self.health = HealthDetector(HealthLimits(), catalog_files.load_health())
        self.read()

    def read(self, after_s: float = 30.0) -> list[Alarm]:
        self.now += after_s
        found = [self.health.on_gauge(signal, ("n1",)) for signal in self.source.read() if isinstance(signal, Gauge)]
        return [alarm for alarm in found if alarm]


def test_one_flap_is_forgiven_two_within_five_minutes_are_not(tmp_path: Path) -> None:
    folder = link(tmp_path, "eth0")
    watched = Watched(tmp_path)
    (folder / "carrier_down_count").write_text("5\n")
    assert watched.read() == []
    assert watched.read(400.0) == []
    (folder / "carrier_down_count").write_text("6\n")
    assert watched.read() == [], "the first is long ago"
    (folder / "carrier_down_count").write_text("7\n")
    [alarm] = watched.read(200.0)
    assert alarm.hard and alarm.reason == "lost the link of eth0 twice within five minutes"


def test_two_flaps_between_two_readings_count_as_two(tmp_path: Path) -> None:
    folder = port(tmp_path)
    watched = Watched(tmp_path)
    (folder / "counters/link_downed").write_text("2\n")
    [alarm] = watched.read()
    assert alarm.hard and alarm.klass == "ib_rdma_error"


def test_a_link_that_stays_down(tmp_path: Path) -> None:
    folder = link(tmp_path, "eth0")
    watched = Watched(tmp_path)
    (folder / "carrier").unlink()  # reading it fails while the interface is set down
    assert watched.read() == []
    [alarm] = watched.read()
    assert alarm.hard and alarm.reason == "has no link at eth0"
