"""A simulated rank's snapshot memory, and the state that it resumes from, both granted by its keeper."""

import asyncio

import msgspec

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.keeper_client import make_want
from holdfast.model.state_doubt import Doubt
from holdfast.sim.dst.simulated_machine import SimRank
from holdfast.sim.dst.simulated_state_image import StateTruth, make_layout, read_truths, write_truth
from holdfast.wire import rank_keeper_messages
from holdfast.wire.rank_keeper_messages import ArenaGrant, FromKeeper, KeeperRefusal, StateGrant, StateRequest, ToKeeper

_SLOTS = 4
_AGAIN_S = 0.2  # after a link to the keeper that broke, and for a rank that was stopped


class SimStateError(Exception):
    """Says in one sentence why a rank cannot go on."""


class RankState:
    def __init__(self, held: SimRank, verified: bool) -> None:
        self.held = held
        self.source = "none"
        self.doubts: tuple[Doubt, ...] = ()  # what of storage is not to be taken
        self._verified = verified
        self._arena: Arena | None = None

    async def restore(self) -> StateTruth | None:
        """Return the state that the rank resumes from; None if its keeper has none. Raise SimStateError if the rank
        cannot go on."""
        held = self.held
        plan = make_layout(held.rank, held.world)
        want = msgspec.structs.replace(
            make_want(plan, _SLOTS, "", None), generation=held.generation, verified=self._verified
        )
        try:
            name = rank_keeper_messages.layout_file_name(held.rank, want.layout)
            held.machine.disk.write_note(name, msgspec.msgpack.encode(plan))
        except OSError as e:
            raise SimStateError(str(e)) from None
        granted = await self._ask_keeper(want)
        assert isinstance(granted, ArenaGrant)
        self._arena = Arena.open(granted.path)
        state = await self._ask_keeper(StateRequest(rank=held.rank, generation=held.generation))
        assert isinstance(state, StateGrant)
        self.source, self.doubts = state.source, state.doubts
        if state.source == "none":
            return None
        arena = self._arena if state.arena == granted.path else Arena.open(state.arena)
        if not any((one.slot, one.step) == (state.slot, state.step) for one in arena.list_sealed()):
            raise SimStateError(f"there is no whole snapshot of step {state.step} in slot {state.slot}")
        truths = set(read_truths(arena.slot_image(state.slot)))
        if len(truths) > 1:
            held.machine.scene.report_failure(f"rank {held.rank} gets a state of several: {sorted(truths)}")
        self._arena.drop_after(state.step)
        return truths.pop()

    async def _ask_keeper(self, question: ToKeeper) -> FromKeeper:
        """Return the keeper's answer; if the agent dies, ask the next agent's keeper. Raise SimStateError if the keeper
        refuses or the rank ends meanwhile."""
        held, line = self.held, rank_keeper_messages.encode(question)
        while held.code is None:
            agent = held.machine.agent
            answer = await agent.links.ask_keeper(line) if agent and not held.hung else None
            if isinstance(answer, KeeperRefusal):
                raise SimStateError(answer.why)
            if answer is not None and held.code is None:
                return answer
            await asyncio.sleep(_AGAIN_S)
        raise SimStateError("it has ended")

    def take_snapshot(self, truth: StateTruth) -> None:
        """Write a snapshot to a free slot, if there is one."""
        assert self._arena is not None
        slot = self._arena.begin_slot(truth.step, self.held.generation)
        if slot:
            write_truth(slot.image, truth)
            slot.seal()
