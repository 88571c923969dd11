"""Sends shares of pinned snapshots, or halves of shares, to keepers of other nodes, each in its own thread."""

import asyncio
from collections.abc import Sequence

from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.copy_pacer import CancelablePacer, CopyPacer
from holdfast.agent.snapshots.keeper_interfaces import KeeperLinks, KeeperNotes
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.parity_image import half_of
from holdfast.checkpoint.peer_transport import PeerRequest, RefusalCode, TransportError
from holdfast.core.snapshots.floor_pins_and_copies import CopyParcel
from holdfast.model.state_copy import Address
from holdfast.wire.rank_keeper_messages import ArenaRequest, layout_file_name


class ParcelTransport:
    def __init__(self, arenas: ArenaTable, notes: KeeperNotes, links: KeeperLinks, pacer: CopyPacer) -> None:
        self._arenas = arenas
        self._notes = notes
        self._links = links
        self.pacer = pacer  # of all copies that this node sends

    async def send_parcel(self, parcel: CopyParcel, want: ArenaRequest, pacer: CancelablePacer) -> str:
        """Send a rank's share, or half of it. Return an error, or "" once the receiver has this step or a later one. If
        the pacer's run is cancelled, return soon, even in the middle of the transfer."""
        one = parcel.snapshot
        image = self._arenas.read_pinned(one)
        views = [image[start:end] for start, end in parcel_ranges(parcel, want)]
        ask = PeerRequest(
            verb="push",
            rank=one.rank,
            world=want.world,
            step=one.step,
            generation=one.generation,
            layout=want.layout,
            floor=parcel.floor,
            bytes=sum(map(len, views)),
            pair=parcel.pair,
        )
        return await asyncio.to_thread(self._push_views, parcel.at, ask, views, pacer)

    def _push_views(self, to: Address, ask: PeerRequest, views: list[memoryview], pacer: BytePacer) -> str:
        try:
            try:
                self._links.push_state(to, ask, views, pacer)
            except TransportError as e:
                if e.code is not RefusalCode.NO_LAYOUT:
                    raise
                self._send_layout(to, ask)
                self._links.push_state(to, ask, views, pacer)
        except OSError as e:
            return str(e)
        except TransportError as e:
            if e.code is not RefusalCode.SUPERSEDED:
                return str(e)
            # Another rank has gone on to a later step. The controller hears that from its node, and aims anew.
        return ""

    def _send_layout(self, to: Address, ask: PeerRequest) -> None:
        try:
            content = self._notes.read_note(layout_file_name(ask.rank, ask.layout))
        except FileNotFoundError:
            raise OSError(f"rank {ask.rank} could not write its layout: see its output, and the node's disk") from None
        plan = PeerRequest(verb="tell", rank=ask.rank, layout=ask.layout, generation=ask.generation, bytes=len(content))
        self._links.push_state(to, plan, [memoryview(content)], BytePacer(0))


def parcel_ranges(parcel: CopyParcel, want: ArenaRequest) -> Sequence[tuple[int, int]]:
    """Return the ranges of a rank's image that go to a node: the rank's share, or with parity half of it."""
    return want.share if parcel.half < 0 else half_of(want.share, parcel.half)
