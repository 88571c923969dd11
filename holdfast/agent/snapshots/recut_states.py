"""Answers ranks that ask for a state which another number of ranks has saved: it is cut anew for them, from memory."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.keeper_interfaces import KeeperLinks, KeeperPorts
from holdfast.agent.snapshots.recut_fetch import OwnShelf, RecutFetch
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.image_recut import RecutError
from holdfast.checkpoint.peer_transport import TransportError
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.decoding import from_msgpack
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant, layout_file_name


class FetchPatiently(Protocol):
    """Calls a function in a thread. While no holder of a state can be reached, calls it again for some time."""

    def __call__(self, fetch: Callable[[], tuple[str, ...]]) -> Awaitable[tuple[str, ...]]: ...


class RecutStates:
    """Cuts the state of a launch anew for one rank of this node after another."""

    def __init__(
        self, arenas: ArenaTable, own: OwnShelf, links: KeeperLinks, ports: KeeperPorts, patiently: FetchPatiently
    ) -> None:
        self._arenas, self._own, self._links, self._ports = arenas, own, links, ports
        self._patiently = patiently

    async def find_state(self, launch: KeeperLaunch, rank: int, instead: StateGrant) -> StateGrant | KeeperRefusal:
        """Return where the state lies that was cut anew for this rank. If it cannot be cut for the rank, return the
        grant `instead` with the reason. Refuse if other nodes cannot be reached."""
        restore, began_at = launch.restore, self._ports.clock.monotonic()
        arena = self._arenas.find_arena(rank)
        uncut = partial(msgspec.structs.replace, instead, step=restore.step, cut_from=restore.cut_from)
        if arena is None:
            return uncut(uncut=f"it is not known yet what rank {rank} will have")
        slot = arena.arena.begin_slot(restore.step, restore.maker)
        if slot is None:
            return KeeperRefusal(why=f"no slot is free for the state of rank {rank}")
        try:
            content = await asyncio.to_thread(
                self._own.notes.read_note, layout_file_name(rank, arena.arena.layout.hex())
            )
            fetch = RecutFetch(restore, from_msgpack(content, ImageLayout), self._own, self._links)
            nodes = await self._patiently(partial(fetch.fill_image, slot.image))
        except (RecutError, msgspec.DecodeError) as e:
            return uncut(uncut=str(e))
        except (TransportError, OSError) as e:
            self._ports.say(str(e))
            return KeeperRefusal(why=str(e), unfetched=True)
        slot.seal()
        took_s = self._ports.clock.monotonic() - began_at
        told = f"{_format_size(arena.arena.image_bytes)} of step {restore.step} from {', '.join(nodes)}"
        self._ports.say(
            f"rank {rank} got {told}, cut anew from the states of {restore.cut_from} ranks, in {took_s:.2f} s"
        )
        source = "memory" if set(nodes) <= {self._own.node} else "peer"
        return uncut(source=source, arena=arena.path, slot=slot.index)


def _format_size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count > 1e7 else f"{count / 1e6:.2g} MB"
