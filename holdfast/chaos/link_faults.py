"""Faults of network links between a lab's hosts: cut, slow and lossy links, and hosts cut off from each other."""

import os
import socket
from pathlib import Path

import msgspec

from holdfast.chaos.injection_records import CannotInject, ForgetEntry, InjectedFault
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.network_switch import LinkFaults, PortFault
from holdfast.decoding import from_json

HOST = "host"  # and the number of its port
_DELAY_S, _LOSS = 0.2, 0.3


def missing_reason() -> str:
    """Return why no lab of several hosts can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if Path("/dev/net/tun").exists() else "this kernel has no /dev/net/tun"


def node_port(node: str) -> int:
    """Return a node's switch port, parsed from its host name; raises CannotInject outside of a lab."""
    name = node.partition("-")[0]
    if not name.startswith(HOST) or not name.removeprefix(HOST).isdecimal():
        raise CannotInject(f"{node} is not a host of a lab")
    return int(name.removeprefix(HOST))


def strike_link(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Damage the link of one node, at its port on the switch."""
    if scene.links is None:
        raise CannotInject("the job's nodes have no separate links; only a job that chaos starts with hosts has them")
    status = scene.read_status()
    away = [n.node for n in status.active if node_port(n.node) != 0]  # the first one carries the controller
    if fault.node == "" and fault.rank is None and not away:
        raise CannotInject("no rank runs on a host other than the controller's")
    node = scene.choose_node(fault, status).node if fault.node or fault.rank is not None else scene.dice.choice(away)
    port = node_port(node)
    if fault.kind == "partition" and port == 0:
        raise CannotInject(
            f"{node} is on the controller's host, which always reaches itself; name a node of another host"
        )
    delay_s, loss = fault.delay_s or _DELAY_S, fault.share or _LOSS
    match fault.kind:
        case "link.cut":
            links, what = _port_fault(port, PortFault(loss=1.0)), f"the link of {node} was cut"
        case "link.slow":
            links, what = _port_fault(port, PortFault(delay_s=delay_s)), f"the link of {node} takes {delay_s:g} s more"
        case "link.lossy":
            links, what = _port_fault(port, PortFault(loss=loss)), f"the link of {node} loses {loss:.0%} of all frames"
        case _:
            links, what = LinkFaults(apart=((0, port),)), f"{node} and the controller's host do not reach each other"
    faults = from_json(scene.links.read_bytes(), dict[str, LinkFaults])
    scene.keep_undo(ForgetEntry(str(scene.links), str(scene.id)))
    part = scene.links.with_suffix(".part")
    part.write_bytes(msgspec.json.encode({**faults, str(scene.id): links}))
    part.replace(scene.links)
    return InjectionReport(what=what, fault=msgspec.structs.replace(fault, node=node), nodes=(node,))


def _port_fault(port: int, link: PortFault) -> LinkFaults:
    return LinkFaults(ports={str(port): link})


def name_host(port: int) -> None:
    """Name this host after its switch port; call it in a separate UTS namespace."""
    socket.sethostname(f"{HOST}{port}")
