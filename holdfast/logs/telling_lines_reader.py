"""Reads logs of any size in large chunks and keeps only the telling lines: those that may help a diagnosis."""

from collections.abc import Callable
from typing import BinaryIO

from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.log_sieve import WHOLE, LineSieve, sift_log

_CHUNK = 4 << 20
_LINE = 16 << 20  # a line longer than this is cut


def read_telling_lines(
    file: BinaryIO, catalog: FailureCatalog, progress: Callable[[int], None] | None = None
) -> list[tuple[int, str]]:
    """Return the telling lines of a log, with their numbers. `progress` is called with the count of bytes read."""
    first = file.read(WHOLE + 1)
    if len(first) <= WHOLE:
        return sift_log(first, catalog)
    sieve = LineSieve(catalog)
    rest, seen = first, len(first)
    while chunk := file.read(_CHUNK):
        seen += len(chunk)
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if not end and len(rest) < _LINE:
            continue
        end = end or len(rest)
        sieve.feed_chunk(rest[: end - 1] if rest[end - 1 : end] == b"\n" else rest[:end])
        rest = rest[end:]
        if progress:
            progress(seen)
    if rest:
        sieve.feed_chunk(rest)
    return sieve.kept_lines()
