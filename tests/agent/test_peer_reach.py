"""Whom a node reaches, by real connections on this host and tables that tests write."""

import socket
from pathlib import Path

from holdfast.agent.connection.peer_reach import find_gateway, is_neighbour_known, try_peers

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t00000000\t{gateway}\t0003\t0\t0\t0\t00000000\t0\t0\t0
"""
NEIGHBOURS = """IP address       HW type     Flags       HW address            Mask     Device
192.0.2.1        0x1         {flags}         02:fc:00:00:00:05     *        eth0
"""


def tables(root: Path, gateway: str = "", flags: str = "") -> Path:
    (root / "proc/net").mkdir(parents=True)
    if gateway:
        (root / "proc/net/route").write_text(ROUTES.format(gateway=gateway))
    if flags:
        (root / "proc/net/arp").write_text(NEIGHBOURS.format(flags=flags))
    return root


async def test_who_accepts_or_refuses_is_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()
        closed.close()
        peers = {"b": open_port.getsockname(), "c": refused, "d": ("255.255.255.255", 1)}
        reach = await try_peers("a", peers, tables(tmp_path))
    assert (reach.node, reach.reached, reach.missed, reach.gateway) == ("a", ("b", "c"), ("d",), None)


async def test_what_is_no_address_is_missed(tmp_path: Path) -> None:
    peers = {"b": ("127.0.0.1", 70_000), "c": ("\0", 1), "d": ("x" * 300, 1), "e": ("127.0.0.1", -1)}
    assert (await try_peers("a", peers, tables(tmp_path))).missed == ("b", "c", "d", "e")


async def test_a_gateway_that_refuses_has_answered(tmp_path: Path) -> None:
    assert (await try_peers("a", {}, tables(tmp_path, gateway="0100007F"))).gateway is True  # 127.0.0.1


def test_the_kernels_tables(tmp_path: Path) -> None:
    known = tables(tmp_path / "known", gateway="010200C0", flags="0x2")
    assert find_gateway(known) == "192.0.2.1" and is_neighbour_known("192.0.2.1", known) is True
    lost = tables(tmp_path / "lost", gateway="010200C0", flags="0x0")
    assert is_neighbour_known("192.0.2.1", lost) is False
    assert is_neighbour_known("192.0.2.9", lost) is None
    assert find_gateway(tables(tmp_path / "none")) == ""
    garbled = tables(tmp_path / "garbled", gateway="nonsense", flags="what")
    assert find_gateway(garbled) == "" and is_neighbour_known("192.0.2.1", garbled) is None
