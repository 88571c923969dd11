"""The fence against seals: once a rank is told to leave its generation, none of its snapshots becomes whole any more.

An abort ends a sum of gradients early, and the GPU goes on with what is queued behind it: the optimizer's step, on
gradients that were never summed, and the copies of that state, which seal themselves. So the fence takes the word that
seals from each queued snapshot before the abort. A snapshot whose copies have begun by then was not queued behind an
unfinished sum; it is whole, and counts.
"""

import threading
import weakref
from typing import Protocol


class SealSource(Protocol):
    """What holds the words by which queued snapshots are sealed."""

    def void_seals(self) -> None:
        """Have snapshots that no GPU has begun to copy stay unsealed."""


class SealFence:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while a seal is written, by whoever writes it
        self.armed = False  # this process may be told to leave a generation
        self._up = False
        self._era = 0  # fences that were raised before
        self._sources: weakref.WeakSet[SealSource] = weakref.WeakSet()

    def make_pass(self) -> "SealPass":
        """Return the pass of a writer of snapshots that begins now."""
        return SealPass(self, -1 if self._up else self._era)

    def add_source(self, source: SealSource) -> None:
        """Have the next fence void what this source has queued; it must be whole, as any thread may raise the fence."""
        with self.lock:
            self._sources.add(source)

    def is_open(self, era: int) -> bool:
        return not self._up and era == self._era

    def raise_fence(self) -> None:
        """From now on nothing is sealed by writers that began before `lower`; any thread may call this."""
        with self.lock:
            self._up, self._era = True, self._era + 1
            for source in list(self._sources):
                source.void_seals()
            self._sources.clear()

    def lower(self) -> None:
        """Let writers that begin from now on seal: the rank enters its next generation."""
        self._up = False


class SealPass:
    """The right of one writer to seal; it ends with the next fence."""

    def __init__(self, fence: SealFence, era: int) -> None:
        self._fence, self._era = fence, era

    @property
    def lock(self) -> threading.Lock:
        return self._fence.lock

    @property
    def is_valid(self) -> bool:
        """Whether a seal may be written now; to be asked with the lock held."""
        return self._fence.is_open(self._era)


SEAL_FENCE = SealFence()
