"""Logs of any size, read in large pieces: what may say something is kept, the rest only counted."""

from collections.abc import Callable
from typing import BinaryIO

from holdfast.core.words.rows import Catalog
from holdfast.core.words.sieve import WHOLE, Sieve, sifted

_CHUNK = 4 << 20
_LINE = 16 << 20  # a line longer than this is cut


def read(file: BinaryIO, catalog: Catalog, progress: Callable[[int], None] | None = None) -> list[tuple[int, str]]:
    """The telling lines of a log, each with its number; of a short log all of them."""
    first = file.read(WHOLE + 1)
    if len(first) <= WHOLE:
        return sifted(first, catalog)
    sieve = Sieve(catalog)
    rest, seen = first, len(first)
    while chunk := file.read(_CHUNK):
        seen += len(chunk)
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if not end and len(rest) < _LINE:
            continue
        end = end or len(rest)
        sieve.feed(rest[: end - 1] if rest[end - 1 : end] == b"\n" else rest[:end])
        rest = rest[end:]
        if progress:
            progress(seen)
    if rest:
        sieve.feed(rest)
    return sieve.kept()
