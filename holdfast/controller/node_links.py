"""Links to nodes: one outbox for each linked node, and every message that the controller sends."""

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.controller_interfaces import Socket
from holdfast.model.copy_aim import Aim
from holdfast.model.node_errands import Errand
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Ack, AimMessage, ControllerPacket, ErrandMessage, PeersMessage, Welcome
from holdfast.wire.credentials.admitted_peers import AdmittedPeers

_OUTBOX = 64
_HANG_UP = b""

Outbox = asyncio.Queue[bytes]


class NodeLinks:
    """Owns the outbox of every linked node. A node's newer link replaces its older one.

    A send never waits for a slow node. It returns False if the node is not linked or its outbox is full.
    """

    def __init__(self, epoch: Callable[[], int]) -> None:
        """`epoch` returns the number of this controller, which every message carries. It is asked before every message,
        and raises if another controller acts by now."""
        self._epoch = epoch
        self._outboxes: dict[str, Outbox] = {}
        self._opened: dict[Outbox, int] = {}  # in which order links were opened
        self._newest: dict[str, int] = {}  # the newest that each node has spoken on, whether or not it is still there
        self._links = 0  # opened so far
        self._told_peers: dict[Outbox, AdmittedPeers] = {}  # whose certificates count, as was said on each link
        self._told_all: AdmittedPeers | None = None  # what was said on all of them
        self._acks: list[tuple[Outbox, Ack]] = []  # of posts that the journal may not have on disk yet

    @property
    def epoch(self) -> int:
        return self._epoch()

    @property
    def linked_nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._outboxes))

    def is_linked(self, node: str) -> bool:
        return node in self._outboxes

    def is_newest(self, node: str, outbox: Outbox) -> bool:
        """Return whether this outbox belongs to the node's newest link."""
        return self._outboxes.get(node) is outbox

    def has_newer_link(self, node: str, outbox: Outbox) -> bool:
        """Return whether the node has opened a newer link than this one, even if the newer link is already closed."""
        return self._opened.get(outbox, 0) < self._newest.get(node, 0)

    def make_outbox(self) -> Outbox:
        """Make the outbox of a link that was just opened. `open_link` later tells whose link it is."""
        outbox: Outbox = asyncio.Queue(_OUTBOX)
        self._links += 1
        self._opened[outbox] = self._links
        return outbox

    def open_link(self, node: str, outbox: Outbox) -> bool:
        """Send the node's messages through this outbox from now on. Return False if it was in use for them before."""
        is_new = not self.is_newest(node, outbox)
        self._outboxes[node] = outbox
        self._told_all = None
        self._newest[node] = max(self._newest.get(node, 0), self._opened.get(outbox, 0))
        return is_new

    def close_link(self, node: str, outbox: Outbox) -> None:
        """Forget a link that has ended. A newer link of the same node stays."""
        self._opened.pop(outbox, None)
        self._told_peers.pop(outbox, None)
        if self.is_newest(node, outbox):
            del self._outboxes[node]

    def hang_up(self, node: str) -> None:
        """Close a node's link; a node that is alive connects again and reports what it holds."""
        outbox = self._outboxes.pop(node, None)
        if outbox is not None:
            while not outbox.empty():
                outbox.get_nowait()
            outbox.put_nowait(_HANG_UP)

    def send_errand(self, node: str, errand: Errand) -> bool:
        return self.send_message(node, ErrandMessage(errand=errand))

    def send_aim(self, node: str, aim: Aim) -> bool:
        return self.send_message(node, AimMessage(aim=aim))

    def send_peers(self, peers: AdmittedPeers) -> None:
        """Tell every linked node whose certificates count, unless it was told so on this link already. What does not
        fit into a node's outbox is sent when this is called again."""
        if peers is self._told_all:  # as nearly always
            return
        for node, outbox in self._outboxes.items():
            if self._told_peers.get(outbox) != peers and self.send_message(node, PeersMessage(peers=peers)):
                self._told_peers[outbox] = peers
        self._told_all = peers if all(self._told_peers.get(one) == peers for one in self._outboxes.values()) else None

    def send_welcome(self, node: str, welcome: Welcome) -> None:
        if self.send_message(node, welcome) and welcome.peers:
            self._told_peers[self._outboxes[node]] = welcome.peers

    def send_message(self, node: str, message: agent_messages.FromController) -> bool:
        self._epoch()
        outbox = self._outboxes.get(node)
        return outbox is not None and self._put_message(outbox, message)

    def hold_ack(self, outbox: Outbox, seq: int) -> None:
        """Keep a post's acknowledgement; `send_acks` sends it through the link on which the post came."""
        self._acks.append((outbox, Ack(seq=seq)))

    def send_acks(self) -> None:
        """Acknowledge posts whose events the journal now has on disk, so agents stop repeating them."""
        for outbox, ack in self._acks:
            self._put_message(outbox, ack)
        self._acks.clear()

    def _put_message(self, outbox: Outbox, message: agent_messages.FromController) -> bool:
        with contextlib.suppress(asyncio.QueueFull):
            outbox.put_nowait(agent_messages.encode(ControllerPacket(self.epoch, message)))
            return True
        return False


async def send_packets(ws: Socket, outbox: Outbox) -> None:
    """Send the packets of the outbox until the link breaks or `hang_up` ends it."""
    with contextlib.suppress(ConnectionError):
        while (packet := await outbox.get()) is not _HANG_UP:
            await ws.send_bytes(packet)
        await ws.close()
