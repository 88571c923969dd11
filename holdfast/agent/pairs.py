"""What this node keeps for pairs of ranks: the parity of their halves, half the memory of a copy of each.

Like a copy it has two slots: the job's floor, which is held, and the next, which is being made. It is sealed when both
ranks have given their halves of the same step; one that goes on to a later step takes the other's half with it.
"""

import contextlib
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec

from holdfast.agent.backup import PREFIX, Backup, Memory, Plans
from holdfast.agent.mixing import LATER, Mixing, Pair
from holdfast.checkpoint.arena import POISONED, VERIFIED, Arena, ArenaError
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.parity import Parity, parity_of
from holdfast.checkpoint.serving import Holding
from holdfast.checkpoint.transport import Ask, TransportError
from holdfast.model.copy import Copy
from holdfast.wire import spec

_MEET_S = 10.0  # for the other rank of a pair, without which nobody knows how much memory it takes
Ranks = tuple[int, int]


class Pairs:
    def __init__(self, notes: Path, plans: Plans, memory: Memory) -> None:
        self.told = _nothing  # the controller should hear how far we are
        self._notes = notes
        self._plans = plans
        self._memory = memory
        self._kept: dict[Ranks, tuple[Pair, Backup]] = {}
        self._mixing: dict[Ranks, Mixing] = {}
        self._met: dict[Ranks, dict[int, str]] = {}  # layouts of those who came in this generation
        self._generation = 0
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._making = threading.Lock()  # memory for a pair is made once, whoever of it comes first

    def recall(self, name: str, arena: Arena) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            pair = spec.read(self._note(name), Pair)
            if pair.digest == arena.layout:
                self._kept[pair.ranks] = (pair, Backup(arena))

    def launched(self, generation: int, step: int) -> None:
        with self._news:
            self._generation = generation
            self._met.clear()
            for mixing in self._mixing.values():
                mixing.end()
            self._mixing.clear()
            for _, backup in self._kept.values():
                backup.forget_after(step)
            self._news.notify_all()

    def hold(self, floor: int) -> list[str]:
        """As of copies: names of memory that nobody needs any more."""
        with self._lock:
            left = []
            for ranks, (pair, backup) in list(self._kept.items()):
                if not backup.hold(floor) and ranks not in self._mixing:
                    backup.release()
                    del self._kept[ranks]
                    left.append(f"{PREFIX}{pair.name}")
            return left

    def newest(self, count: int) -> int:
        """The newest step of which as many pairs as this node keeps for are sealed; -1: there is none."""
        with self._lock:
            met = [ranks for ranks, layouts in self._met.items() if len(layouts) == len(ranks) and ranks in self._kept]
            steps = [self._newest(self._kept[ranks][1]) for ranks in met]
            return min(steps) if 0 < count <= len(steps) else -1

    def _newest(self, backup: Backup) -> int:
        ours = (one.step for one in backup.arena.sealed() if one.generation == self._generation)
        return max(ours, default=-1)

    def copies(self, node: str) -> Iterator[Copy]:
        """Every parity counts as a half of either rank."""
        with self._lock:
            found = [(pair, backup.arena, one) for pair, backup in self._kept.values() for one in backup.arena.sealed()]
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
            )

    def arena(self, ask: Ask) -> list[Arena]:
        """Where a half of this rank is."""
        with self._lock:
            pair, backup = self._kept.get(ask.pair or (-1, -1), (None, None))
        if pair is None or backup is None or ask.rank not in pair.ranks:
            return []
        return [backup.arena] * pair.layouts[pair.ranks.index(ask.rank)].startswith(ask.layout)

    # --- halves come in ----------------------------------------------------------------------------------------

    def take(self, ask: Ask, plan: Layout) -> Holding | str:
        ranks = ask.pair
        if ranks is None or ask.rank not in ranks or ranks[0] == ranks[1]:
            return f"rank {ask.rank} is not of the pair {ranks}"
        half = ranks.index(ask.rank)
        layout = self._meet(ask, ranks, ranks[1 - half])
        other = self._plans.get(ranks[1 - half], layout)
        if other is None:
            return f"rank {ranks[1 - half]} has not come yet, whose half goes with it"
        shape = parity_of(*((plan, other) if half == 0 else (other, plan)))
        if shape.starts[half][-1] != ask.bytes:
            return f"a half has {shape.starts[half][-1]} bytes by its layout, not {ask.bytes}"
        pair = Pair(ranks=ranks, layouts=(ask.layout, layout) if half == 0 else (layout, ask.layout))
        try:
            backup = self._fit(pair, ask, shape.image_bytes)
        except (OSError, ArenaError, TimeoutError) as e:
            return f"no memory for parity: {e}"
        with self._lock:
            if ask.generation != self._generation:
                return f"generation {ask.generation} is over; this node is in {self._generation}"
            if self._kept.get(ranks) != (pair, backup):
                return "the pair is laid out anew"
            return self._half(backup, ask, shape)

    def _meet(self, ask: Ask, ranks: Ranks, other: int) -> str:
        """The layout of the other rank, once it has come."""
        with self._news:
            if ask.generation == self._generation:
                self._met.setdefault(ranks, {})[ask.rank] = ask.layout
                self._news.notify_all()
            self._news.wait_for(lambda: ask.generation != self._generation or other in self._met[ranks], _MEET_S)
            return self._met.get(ranks, {}).get(other, "")

    def _fit(self, pair: Pair, ask: Ask, image_bytes: int) -> Backup:
        with self._making:
            before = self._kept.get(pair.ranks)
            found = before[1] if before and before[0] == pair else None
            backup = self._memory.fit(found, pair.name, pair.digest, ask, image_bytes)
            if backup is not found:
                spec.write(self._note(pair.name), pair)
            with self._lock:
                self._kept[pair.ranks] = (pair, backup)
                if backup is not found and (mixing := self._mixing.pop(pair.ranks, None)):
                    mixing.end()
            return backup

    def _half(self, backup: Backup, ask: Ask, shape: Parity) -> Holding | str:
        assert ask.pair is not None
        half = ask.pair.index(ask.rank)
        if ask.floor >= 0:
            backup.hold(ask.floor)
        newest, mixing = self._newest(backup), self._mixing.get(ask.pair)
        if newest == ask.step:  # the answer to the last chunk was lost
            return Holding([], len(shape.chunks[half]), _nothing)
        if max(newest, mixing.step if mixing else -1) > ask.step:
            return LATER
        if mixing is None or mixing.step < ask.step:
            if mixing:
                mixing.end()
            slot = backup.arena.begin(ask.step, ask.generation)
            if slot is None:
                return "all memory for this parity is in use"
            mixing = self._mixing[ask.pair] = Mixing(slot, shape)
            mixing.finish = lambda mixing: self._seal(ask.pair, backup, mixing)
        return mixing.half(half)

    def _seal(self, ranks: Ranks | None, backup: Backup, mixing: Mixing) -> None:
        """A half is all in; with the other one it is a parity."""
        if not mixing.whole():
            return
        with self._lock:
            if ranks and self._mixing.get(ranks) is mixing:
                mixing.slot.seal()
                mixing.sealed = True
                del self._mixing[ranks]
            if not mixing.sealed:
                raise TransportError(LATER)
        backup.arena.check(mixing.slot.index)
        self._memory.soon(self.told)

    def _note(self, name: str) -> Path:
        return self._notes / f"pair-{name}.json"


def _nothing() -> None:
    pass
