"""The links of one simulated keeper: to the ranks of its machine, and to keepers of other machines."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.peer_server import PeerShelf
from holdfast.checkpoint.peer_transport import PeerRefusal, PeerRequest, TransportError, cut_chunks
from holdfast.model.observation import Reach
from holdfast.model.state_copy import Address
from holdfast.sim.dst.real_program_protocols import AgentCrashed
from holdfast.sim.dst.simulated_machine import SimMachine
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.rank_keeper_messages import AnswerRank, FromKeeper

_PORT = 1
_BREAKS = 0.05  # of copies, after their first part


class SimKeeperLinks:
    """The links of one keeper. Bytes arrive at once, in the sending thread, if both machines are connected."""

    def __init__(self, machine: SimMachine, machines: dict[str, SimMachine], check_alive: Callable[[], None]) -> None:
        self.address: Address = ("", 0)
        self.shelf: PeerShelf | None = None
        self._machine, self._machines = machine, machines
        self._check_alive = check_alive
        self._answer: AnswerRank
        self._asked: dict[asyncio.Task[FromKeeper], None] = {}  # in the order in which they came

    async def serve(self, answer_rank: AnswerRank, shelf: PeerShelf) -> None:
        self._answer, self.shelf, self.address = answer_rank, shelf, (self._machine.name, _PORT)
        await asyncio.Event().wait()

    def admit_peers(self, peers: AdmittedPeers) -> None:
        raise AssertionError("no simulated node has a certificate")

    def break_all(self) -> None:
        """Cancel all open requests of ranks, because their keeper has died."""
        for asked in self._asked:
            asked.cancel()

    async def ask_keeper(self, line: bytes) -> FromKeeper | None:
        """Return the keeper's answer to a rank; None if the keeper does not listen or the link breaks."""
        if self.shelf is None:
            return None
        asked = asyncio.create_task(self._answer(line))
        self._asked[asked] = None
        await asyncio.wait([asked])
        del self._asked[asked]
        if asked.cancelled() or isinstance(asked.exception(), AgentCrashed | OSError | ValueError):
            return None
        return asked.result()

    async def try_peers(self, peers: dict[str, Address]) -> Reach:
        """Return which of these machines this one can reach."""
        self._check_alive()
        there = {peer: self._machines.get(peer) for peer in peers}
        reached = [peer for peer, one in there.items() if one and one.is_connected and self._machine.is_connected]
        missed = tuple(peer for peer in peers if peer not in reached)
        return Reach(node=self._machine.name, reached=tuple(reached), missed=missed)

    # --- keepers of other machines -----------------------------------------------------------------------------

    def push_state(self, to: Address, ask: PeerRequest, views: Sequence[memoryview], pacer: BytePacer) -> int:
        target = self._reach_shelf(to).receive_push(ask, self._machine.name)
        if isinstance(target, PeerRefusal):
            raise TransportError(f"the keeper refused: {target.text}", target.code)
        ours, theirs = cut_chunks(views), cut_chunks(target.views)
        breaks = self._machine.scene.rng.random() < _BREAKS
        for number in range(target.first_missing(len(ours)), len(ours)):
            if number and breaks:
                raise TransportError("the link broke while sending")
            pacer.spend_bytes(len(ours[number]))
            theirs[number][:] = ours[number]
            target.on_chunk(number)
        target.finish_once()
        return sum(map(len, ours))

    def pull_state(self, at: Address, ask: PeerRequest, views: Sequence[memoryview]) -> int:
        content = self.fetch_content(at, ask)
        if len(content) != sum(map(len, views)):
            raise TransportError(f"the keeper has {len(content)} bytes instead of the {sum(map(len, views))} requested")
        start = 0
        for part in views:
            part[:] = content[start : start + len(part)]
            start += len(part)
        return len(content)

    def fetch_content(self, at: Address, ask: PeerRequest) -> bytes:
        given = self._reach_shelf(at).serve_pull(ask)
        if isinstance(given, PeerRefusal):
            raise TransportError(f"the keeper refused: {given.text}", given.code)
        views, release = given
        content = b"".join(views)
        release()
        return content

    def _reach_shelf(self, at: Address) -> PeerShelf:
        self._check_alive()
        there = self._machines.get(at[0])
        links = there.agent.links if there and there.agent and there.is_connected else None
        if not (links and links.shelf and self._machine.is_connected):
            raise TransportError(f"the keeper at {at[0]} cannot be reached")
        return links.shelf


def run_at_once(making: Coroutine[Any, Any, str], loop: asyncio.AbstractEventLoop) -> str:
    """Run a coroutine that never waits, and return its result. Simulated threads run in the event loop, so they cannot
    wait."""
    try:
        making.send(None)
    except StopIteration as done:
        return str(done.value)
    raise AssertionError("a simulated holder makes arenas without a wait")
