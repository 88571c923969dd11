"""Checkpoints for tests: small ones, of bytes that differ from step to step and from rank to rank."""

import mmap
import random
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.manifest import Author

ME = Author(1)
METADATA = b"what torch would say of it"


def content(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def in_pages(content: bytes) -> memoryview:
    """As an arena has it: page-aligned."""
    memory = mmap.mmap(-1, max(1, len(content)))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


def save(base: Path | str, step: int, sizes: Sequence[int] = (1000,), author: Author = ME) -> str:
    folder = staging_folder(str(base), step, author)
    parts = [write_part(folder, rank, [in_pages(content(size, 1000 * step + rank))]) for rank, size in enumerate(sizes)]
    return publish_checkpoint(str(base), step, parts, METADATA, author=author)
