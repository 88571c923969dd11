"""Errors of storage and of its writers; each says in one sentence what failed."""

from collections.abc import Sequence


class StorageError(Exception):
    """Says in one sentence what the storage failed to do."""


class WriteGivenUpError(StorageError):
    """Another thread gave this write up, because it made no progress."""


class TakenOverError(StorageError):
    """Another author owns this storage now, so this one may not publish."""


class PartsMissingError(StorageError):
    """Some ranks have not written their parts of a checkpoint; `ranks` names them."""

    def __init__(self, why: str, ranks: Sequence[int] = ()) -> None:  # pickle needs the default
        super().__init__(why)
        self.ranks = tuple(ranks)


class PartFailedError(StorageError):
    """A rank reports that it could not write its part of a checkpoint."""

    def __init__(self, why: str, rank: int = -1) -> None:  # pickle needs the default
        super().__init__(why)
        self.rank = rank


class CorruptError(StorageError):
    """Says in one sentence which file, and which block if known, differs from what was written."""
