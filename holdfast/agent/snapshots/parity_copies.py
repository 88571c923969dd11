"""Parities that this node keeps for pairs of ranks: each takes half the memory of a copy of one rank.

Like a copy, a parity has two slots: the job's floor, which is pinned, and the next step, which is being made. A parity
is sealed when both halves of a step have come. A half of a later step discards a parity that is not yet sealed.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import msgspec

from holdfast.agent.snapshots.keeper_interfaces import KeeperNotes
from holdfast.agent.snapshots.parity_encoder import SUPERSEDED, ParityEncoder, ParityPair
from holdfast.agent.snapshots.peer_arenas import PREFIX, PeerArena, PeerLayouts, PeerMemory
from holdfast.checkpoint.arena import POISONED, VERIFIED, Arena, ArenaError
from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.parity_image import ParityLayout, make_parity_layout
from holdfast.checkpoint.peer_server import PushTarget
from holdfast.checkpoint.peer_transport import PeerRefusal, PeerRequest, TransportError
from holdfast.core.snapshots.copy_intake import Intake, judge_half, refuse_generation
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.decoding import from_json
from holdfast.model.state_copy import Copy

_MEET_S = 10.0  # for the other rank of a pair, without which nobody knows how much memory it takes
Ranks = tuple[int, int]


class ParityCopies:
    def __init__(
        self, notes: KeeperNotes, plans: PeerLayouts, memory: PeerMemory, report_progress: Callable[[], None]
    ) -> None:
        self._report_progress = report_progress
        self._notes = notes
        self._plans = plans
        self._memory = memory
        self._kept: dict[Ranks, tuple[ParityPair, PeerArena]] = {}
        self._mixing: dict[Ranks, ParityEncoder] = {}
        self._met: dict[Ranks, dict[int, str]] = {}  # layouts of those who came in this generation
        self._generation = 0
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._making = threading.Lock()  # memory for a pair is made once, whoever of it comes first

    def adopt_arena(self, name: str, arena: Arena) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            pair = from_json(self._notes.read_note(_note_name(name)), ParityPair)
            if pair.digest == arena.layout:
                self._kept[pair.ranks] = (pair, PeerArena(arena))

    def begin_launch(self, launch: KeeperLaunch) -> None:
        with self._news:
            self._generation = launch.generation
            self._met.clear()
            for mixing in self._mixing.values():
                mixing.cancel()
            self._mixing.clear()
            for _, backup in self._kept.values():
                backup.forget_left(launch)
            self._news.notify_all()

    def pin_floor(self, floor: int) -> list[str]:
        """Pin the parities of step `floor`. Forget idle arenas that have none, and return the arenas' names to free."""
        with self._lock:
            left = []
            for ranks, (pair, backup) in list(self._kept.items()):
                if not backup.pin_step(floor) and ranks not in self._mixing:
                    backup.unpin()
                    del self._kept[ranks]
                    left.append(f"{PREFIX}{pair.name}")
            return left

    def newest_step(self, count: int) -> int:
        """Return the newest step that every pair has sealed; -1 if none, or if there are fewer than `count` pairs."""
        with self._lock:
            met = [ranks for ranks, layouts in self._met.items() if len(layouts) == len(ranks) and ranks in self._kept]
            steps = [self._newest_sealed(self._kept[ranks][1]) for ranks in met]
            return min(steps) if 0 < count <= len(steps) else -1

    def _newest_sealed(self, backup: PeerArena) -> int:
        ours = (one.step for one in backup.arena.list_sealed() if one.generation == self._generation)
        return max(ours, default=-1)

    def list_copies(self, node: str) -> Iterator[Copy]:
        """Yield every sealed parity twice: as half a copy of its first rank's state, and of its second rank's."""
        with self._lock:
            found = [
                (pair, backup.arena, one) for pair, backup in self._kept.values() for one in backup.arena.list_sealed()
            ]
        for (pair, arena, one), half in product(found, (0, 1)):
            yield Copy(
                rank=pair.ranks[half],
                step=one.step,
                node=node,
                layout=pair.layouts[half],
                world=arena.world,
                whole=False,
                half=half,
                beside=pair.ranks[1 - half],
                verified=bool(one.flags & VERIFIED),
                poisoned=bool(one.flags & POISONED),
                generation=one.generation,
            )

    def find_arenas(self, ask: PeerRequest) -> list[Arena]:
        """Return the arena of the parity that holds a half of this rank, in a list; empty if there is none."""
        with self._lock:
            pair, backup = self._kept.get(ask.pair or (-1, -1), (None, None))
        if pair is None or backup is None or ask.rank not in pair.ranks:
            return []
        return [backup.arena] * pair.layouts[pair.ranks.index(ask.rank)].startswith(ask.layout)

    # --- halves come in ----------------------------------------------------------------------------------------

    def receive_half(self, ask: PeerRequest, plan: ImageLayout) -> PushTarget | PeerRefusal:
        ranks = ask.pair
        if ranks is None or ask.rank not in ranks or ranks[0] == ranks[1]:
            return PeerRefusal(f"rank {ask.rank} is not in the pair {ranks}")
        half = ranks.index(ask.rank)
        layout = self._await_partner(ask, ranks, ranks[1 - half])
        other = self._plans.get(ranks[1 - half], layout)
        if other is None:
            return PeerRefusal(f"rank {ranks[1 - half]}, which has the other half, has not sent its layout yet")
        shape = make_parity_layout(*((plan, other) if half == 0 else (other, plan)))
        if shape.starts[half][-1] != ask.bytes:
            return PeerRefusal(f"a half has {shape.starts[half][-1]} bytes by its layout, not {ask.bytes}")
        pair = ParityPair(ranks=ranks, layouts=(ask.layout, layout) if half == 0 else (layout, ask.layout))
        try:
            backup = self._fit_arena(pair, ask, shape.image_bytes)
        except (OSError, ArenaError, TimeoutError) as e:
            return PeerRefusal(f"no memory for the parity of ranks {pair.name}: {e}")
        with self._lock:
            if why := refuse_generation(ask.generation, self._generation):
                return PeerRefusal(why)
            if self._kept.get(ranks) != (pair, backup):
                return PeerRefusal(f"the layout of the pair {pair.name} has just changed")
            return self._half_target(backup, ask, shape)

    def _await_partner(self, ask: PeerRequest, ranks: Ranks, other: int) -> str:
        """Note this rank's layout; wait for that of the pair's other rank and return it, empty if it does not come."""
        with self._news:
            if ask.generation == self._generation:
                self._met.setdefault(ranks, {})[ask.rank] = ask.layout
                self._news.notify_all()
            self._news.wait_for(lambda: ask.generation != self._generation or other in self._met[ranks], _MEET_S)
            return self._met.get(ranks, {}).get(other, "")

    def _fit_arena(self, pair: ParityPair, ask: PeerRequest, image_bytes: int) -> PeerArena:
        with self._making:
            before = self._kept.get(pair.ranks)
            found = before[1] if before and before[0] == pair else None
            backup = self._memory.fit_arena(found, pair.name, pair.digest, ask, image_bytes)
            if backup is not found:
                self._notes.write_note(_note_name(pair.name), msgspec.json.encode(pair))
            with self._lock:
                self._kept[pair.ranks] = (pair, backup)
                if backup is not found and (mixing := self._mixing.pop(pair.ranks, None)):
                    mixing.cancel()
            return backup

    def _half_target(self, backup: PeerArena, ask: PeerRequest, shape: ParityLayout) -> PushTarget | PeerRefusal:
        assert ask.pair is not None
        half = ask.pair.index(ask.rank)
        if ask.floor >= 0:
            backup.pin_step(ask.floor)
        mixing = self._mixing.get(ask.pair)
        intake = judge_half(ask.step, mixing.step if mixing else -1, self._newest_sealed(backup))
        if intake is Intake.HELD:
            return PushTarget([], len(shape.chunks[half]), _do_nothing)
        if intake is Intake.SUPERSEDED:
            return SUPERSEDED
        if mixing is None or intake is Intake.BEGIN:
            if mixing:
                mixing.cancel()
            slot = backup.arena.begin_slot(ask.step, ask.generation)
            if slot is None:
                return PeerRefusal(f"all slots for the parity of the pair {ask.pair} are in use")
            mixing = self._mixing[ask.pair] = ParityEncoder(slot, shape, partial(self._seal_parity, ask.pair, backup))
        return mixing.half_target(half)

    def _seal_parity(self, ranks: Ranks, backup: PeerArena, mixing: ParityEncoder) -> None:
        """Seal the parity once both halves are complete. Raises TransportError if a later parity has replaced it."""
        if not mixing.is_complete():
            return
        with self._lock:
            if self._mixing.get(ranks) is mixing:
                mixing.slot.seal()
                mixing.sealed = True
                del self._mixing[ranks]
            if not mixing.sealed:
                raise TransportError(*SUPERSEDED)
        backup.arena.write_checksums(mixing.slot.index)
        self._memory.call_soon(self._report_progress)


def _note_name(pair: str) -> str:
    return f"pair-{pair}.json"


def _do_nothing() -> None:
    pass
