"""Skips batches that the controller lists: `holdfast.skip(step)` and `holdfast.batches(loader)`.

Step n is the step after which the script calls `holdfast.step(n)` or `Checkpointer.save(n)`. If `skip(n)` is true, the
script drops that step's batch, takes the next one for step n + 1, and never reports n.
"""

import os

from holdfast.client.training.progress import RankProgress, here
from holdfast.client.training.stderr_sentence import say
from holdfast.wire.skip_ease_environment import SKIP, parse_skips

TYPE_CHECKING = False  # importing typing would take longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from holdfast.wire.skip_ease_environment import Span


class BatchSkips:
    """The batches that this rank skips, and how many it has skipped."""

    def __init__(self, progress: RankProgress) -> None:
        self.batches = self.samples = 0  # left out up to now
        self._progress = progress
        self._spans: tuple[Span, ...] | None = None  # the environment is looked at once
        self._last = -1  # step that was left out
        self._since: tuple[int, int, int] | None = None  # its first step and what was left out before it, until told

    def skip(self, step: int) -> bool:
        """Return whether to skip the batch of this step. Call it in the training loop, on every rank alike."""
        try:
            spans = self._read_spans() if self._spans is None else self._spans
            self._progress.announce_step(step)
            if not spans:
                return False
            if not any(first <= step <= last for first, last in spans):
                self.report_skips()
                return False
            if step > self._last:  # who asks twice leaves it out once
                self._leave_out(step)
            return True
        except Exception:
            return False  # whatever was passed, training goes on

    def count_samples(self, samples: int) -> None:
        """Add the number of samples in the batch that was just skipped."""
        self.samples += samples
        if (slot := self._progress.find_slot()) is not None:
            slot.note_skip(self._last, self.batches, self.samples)

    def report_skips(self) -> None:
        """Print which steps were skipped, once a series of skipped steps is over; only rank 0 prints."""
        since, self._since = self._since, None
        if since is None or os.environ.get("RANK", "0") != "0":
            return
        first, batches, samples = since
        steps = f"step {first}" if first == self._last else f"steps {first}-{self._last}"
        counted = f", with {self.samples - samples} samples on this rank" if self.samples > samples else ""
        left_out = self.batches - batches
        what = f"{left_out} batch{'es' if left_out > 1 else ''}{counted}"
        say(f"{steps} left out: {what}")

    def _read_spans(self) -> "tuple[Span, ...]":
        self._spans = ()
        try:
            self._spans = parse_skips(os.environ.get(SKIP, ""))
        except ValueError as e:
            say(f"no batch is left out, because {SKIP} is invalid: {e}")
        if (slot := self._progress.find_slot()) is not None:
            slot.mark_skippable()
        return self._spans

    def _leave_out(self, step: int) -> None:
        if self._since is None:
            self._since = step, self.batches, self.samples
        self._last = step
        self.batches += 1
        self.count_samples(0)


class Batches:
    """The batches of a loader with their step numbers, without the skipped ones.

    The count goes on when the loader is iterated again, as in the next epoch. `step` is the number of the loader's
    newest batch, skipped or not. Nothing is read ahead, so a loader whose state is saved with `step` resumes from
    there.
    """

    def __init__(self, loader: "Iterable[Any]", first: int) -> None:
        if type(first) is not int or first < 0:
            raise ValueError(f"first must be the step of the next batch, a whole number from 0 on, not {first!r}")
        self.loader = loader
        self.step = first - 1

    @property
    def skipped(self) -> int:
        """The number of batches that this rank has skipped."""
        return _this.batches

    @property
    def skipped_samples(self) -> int:
        return _this.samples

    def __iter__(self) -> "Iterator[tuple[int, Any]]":
        for batch in self.loader:
            self.step += 1
            if _this.skip(self.step):
                _this.count_samples(_count_batch(batch))
            else:
                yield self.step, batch
        _this.report_skips()


def batches(loader: "Iterable[Any]", first: int = 1) -> Batches:
    """Yield (step, batch) for the batches of this loader; the first of them belongs to step `first`.

    >>> list(holdfast.batches(["a", "b"], first=5))
    [(5, 'a'), (6, 'b')]
    """
    return Batches(loader, first)


def skip(step: int) -> bool:
    """Return whether to skip the batch of this step. If so, take the next batch and do not report this step.

    >>> [step for step in range(1, 4) if not holdfast.skip(step)]
    [1, 2, 3]
    """
    return _this.skip(step)


def _count_batch(batch: object) -> int:
    """Return the number of samples in a batch, from its first tensor or as a list's length; 0 if unknown."""
    if isinstance(batch, dict):
        return _count_batch(next(iter(batch.values()), None))
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):  # torch's are, too
        return int(shape[0]) if shape else 1
    if not isinstance(batch, list | tuple):
        return 0
    is_list_of_samples = not batch or (not hasattr(batch[0], "shape") and len(set(map(type, batch))) == 1)
    return len(batch) if is_list_of_samples else _count_batch(batch[0])


_this = BatchSkips(here)
