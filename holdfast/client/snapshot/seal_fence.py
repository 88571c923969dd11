"""The seal fence: once a rank is told to leave its generation, no snapshot of the rank is sealed any more.

A seal marks a snapshot as whole. An abort ends a sum of gradients early, but the GPU goes on with what is queued behind
the sum. It makes the optimizer's step with wrong gradients, copies the resulting state and seals the copy. So before
the abort, the fence changes every queued header, and the copies stay without a seal. If the GPU has already begun to
copy a snapshot, no unfinished sum was before it; the snapshot is valid and may be sealed.
"""

import threading
import weakref
from typing import Protocol


class SealSource(Protocol):
    """An object that holds the headers by which queued snapshots would be sealed."""

    def void_seals(self) -> None:
        """Void the seals of snapshots that no GPU has begun to copy."""


class SealFence:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while a seal is written, by whoever writes it
        self.armed = False  # this process may be told to leave a generation
        self._up = False
        self._era = 0  # fences that were raised before
        self._sources: weakref.WeakSet[SealSource] = weakref.WeakSet()

    def make_pass(self) -> "SealPass":
        """Return the right to seal for a writer that begins a snapshot now."""
        return SealPass(self, -1 if self._up else self._era)

    def add_source(self, source: SealSource) -> None:
        """Add a source whose queued seals are voided when the fence is raised. Any thread may raise it from now on, so
        the source must already be complete."""
        with self.lock:
            self._sources.add(source)

    def is_open(self, era: int) -> bool:
        return not self._up and era == self._era

    def raise_fence(self) -> None:
        """Refuse all seals until `lower` is called, and then those of earlier writers. Any thread may call this."""
        with self.lock:
            self._up, self._era = True, self._era + 1
            for source in list(self._sources):
                source.void_seals()
            self._sources.clear()

    def lower(self) -> None:
        """Allow seals by writers that begin from now on. Called when the rank enters its next generation."""
        self._up = False


class SealPass:
    """The right of one writer to seal snapshots. It ends when the seal fence is raised."""

    def __init__(self, fence: SealFence, era: int) -> None:
        self._fence, self._era = fence, era

    @property
    def lock(self) -> threading.Lock:
        return self._fence.lock

    @property
    def is_valid(self) -> bool:
        """Return whether a seal may be written now. The caller must hold the lock."""
        return self._fence.is_open(self._era)


SEAL_FENCE = SealFence()
