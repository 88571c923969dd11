"""Puts a rank's image together from the states of another number of ranks, which this node and others hold."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.agent.snapshots.keeper_interfaces import KeeperLinks, KeeperNotes
from holdfast.agent.snapshots.parity_decoder import KeeperSource, ParityDecoder
from holdfast.agent.snapshots.state_fetch import try_each_holder
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout
from holdfast.checkpoint.image_recut import (
    ImageRecut,
    RecutError,
    RecutPiece,
    covering_range,
    differing_piece,
    is_run,
    pack_recut_extra,
    place_extra,
    place_piece,
    place_value,
)
from holdfast.checkpoint.peer_server import PeerShelf
from holdfast.checkpoint.peer_transport import LinkError, PeerRefusal, PeerRequest, TransportError
from holdfast.checkpoint.snapshot_metadata_record import ImageMetadata, ImageMetadataError, unpack_metadata
from holdfast.decoding import from_msgpack
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import CopySummary
from holdfast.wire.rank_keeper_messages import layout_file_name

T = TypeVar("T")
_MOST_RANGES = 512  # in one request
_ASIDE_BYTES = 64 << 20  # that are fetched before they are put into their places
_MOVE_BYTES = 4 << 20  # copied at once


class OwnShelf(NamedTuple):
    """What the fetching node itself holds: its name, its shelf, and its notes, with the layouts of its ranks."""

    node: str
    shelf: PeerShelf
    notes: KeeperNotes


class _Read(NamedTuple):
    """One piece to read: where the old record lies in its image, and the memory to read into."""

    piece: RecutPiece
    old: ImageItem
    start: int
    view: memoryview
    is_placed: bool  # it is read into its place


class RecutFetch:
    """Fetches what one new image needs of the old states that a Restore lists. Methods raise TransportError if nobody
    has it, LinkError if somebody may have it later, and RecutError if the old states cannot be cut for this image."""

    def __init__(self, restore: Restore, wanted: ImageLayout, own: OwnShelf, links: KeeperLinks) -> None:
        self._restore = restore
        self._wanted = wanted
        self._own = own
        self._links = links
        self._layouts: dict[int, ImageLayout] = {}  # of the old ranks whose states are held
        self._nodes: dict[str, None] = {}  # from which something came

    def fill_image(self, image: memoryview) -> tuple[str, ...]:
        """Fill the payloads of the image; return the names of the nodes that they came from."""
        plan = ImageRecut(self._wanted)
        for rank in sorted({kept.rank for kept in self._restore.kept}):
            layout = self._layouts[rank] = self._find_layout(rank)
            copies = self._copies_of(rank)
            near = any(kept.node == self._own.node and kept.half < 0 for kept in copies)
            plan.add_layout(layout, whole=any(kept.whole for kept in copies), near=near)
        pieces = list(plan.list_pieces())
        asked = self._read_pieces([piece for piece in pieces if not piece.compared], image)
        asked |= self._read_pieces([piece for piece in pieces if piece.compared], image)
        place_extra(image, plan.extra, self._gather_extras(plan, asked))
        return tuple(self._nodes)

    # --- layouts and extras ------------------------------------------------------------------------------------

    def _find_layout(self, rank: int) -> ImageLayout:
        def read(kept: CopySummary) -> ImageLayout:
            if kept.node == self._own.node:
                try:
                    content = self._own.notes.read_note(layout_file_name(rank, kept.layout))
                except OSError as e:
                    raise TransportError(f"cannot read the layout of rank {rank}: {e.strerror}") from None
            else:
                ask = PeerRequest(verb="plan", rank=rank, layout=kept.layout)
                content = self._links.fetch_content(self._restore.keepers[kept.node], ask)
            try:
                found = from_msgpack(content, ImageLayout)
            except msgspec.DecodeError as e:
                raise TransportError(f"cannot decode the layout of rank {rank}: {e}") from None
            if found.rank != rank or not found.digest.hex().startswith(kept.layout):
                raise TransportError(f"it has another layout of rank {rank}")
            return found

        return self._try_each(rank, self._copies_of(rank), read)

    def _gather_extras(self, plan: ImageRecut, asked: set[int]) -> bytes:
        """Return the new extra record: the extras of the first old rank, without anything that some old rank lacked."""
        first, absent = min(plan.extras), set[str]()
        told = {rank: self._read_extra(rank, plan.extras[rank]) for rank in sorted(asked | {first})}
        for one in told.values():
            absent.update(one.absent)
        return pack_recut_extra(self._restore.step, told[first], absent)

    def _read_extra(self, rank: int, item: ImageItem) -> ImageMetadata:
        content = memoryview(bytearray(item.spec.bytes))
        self._read_ranges(rank, [(item.payload, item.payload + len(content))], [content])
        try:
            told = unpack_metadata(content)
        except ImageMetadataError as e:
            raise RecutError(f"what rank {rank} had cannot be read: {e}") from None
        if told.step != self._restore.step:
            raise RecutError(f"what rank {rank} had is of step {told.step}")
        return told

    # --- pieces ------------------------------------------------------------------------------------------------

    def _read_pieces(self, pieces: Iterable[RecutPiece], image: memoryview) -> set[int]:
        """Read all pieces, each from the first of its holders that has it; return the old ranks that were asked."""
        left, asked, error = [(piece, 0) for piece in pieces], set[int](), TransportError("no node has it")
        while left:
            by_rank: dict[tuple[int, bool], list[tuple[RecutPiece, int]]] = {}  # a backup has only what its rank owns
            for piece, turn in left:
                if turn == len(piece.holders):
                    raise error
                rank, item = piece.holders[turn]
                by_rank.setdefault((rank, item.owner == rank), []).append((piece, turn))
            left = []
            for (rank, _), mine in by_rank.items():
                asked.add(rank)
                if failed := self._read_from(rank, mine, image):
                    error = failed if isinstance(failed, LinkError) or not isinstance(error, LinkError) else error
                    left += [(piece, turn + 1) for piece, turn in mine]
        return asked

    def _read_from(self, rank: int, pieces: list[tuple[RecutPiece, int]], image: memoryview) -> TransportError | None:
        """Read pieces of one old rank's image; return the error if they cannot be read there."""
        try:
            for batch in _batch_reads(pieces, image):
                self._read_batch(rank, batch, image)
        except TransportError as e:
            return e
        return None

    def _read_batch(self, rank: int, batch: Sequence[_Read], image: memoryview) -> None:
        ranges = [(read.start, read.start + len(read.view)) for read in batch]
        self._read_ranges(rank, ranges, [read.view for read in batch])
        for piece, old, _, came, is_placed in batch:
            if piece.compared:
                if differing_piece(image, piece, old, came):
                    raise RecutError(f"several groups of ranks had different tensors named {piece.item.spec.key}")
            elif not piece.item.spec.dtype:
                place_value(image, piece.item, came)
            elif not is_placed:
                place_piece(image, piece, old, came)

    def _read_ranges(self, rank: int, ranges: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """Read ranges of an old rank's image from this node, or else from another one, or else by parity."""
        copies = self._copies_of(rank)
        plain = [kept for kept in copies if kept.half < 0]
        if plain:
            self._try_each(rank, plain, lambda kept: self._read_copy(kept, ranges, views))
            return
        together, at = memoryview(bytearray(sum(map(len, views)))), 0
        runs = []
        for start, end in ranges:
            runs.append((start, end, at))
            at += end - start
        for half in (0, 1):
            halves = [kept for kept in copies if kept.half == half]
            self._try_each(rank, halves, lambda kept: self._decode_half(kept, together, runs))
        for wanted, (start, end, at) in zip(views, runs, strict=True):
            wanted[:] = together[at : at + end - start]

    def _read_copy(self, kept: CopySummary, ranges: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        ask = self._request_for(kept)
        if kept.node != self._own.node:
            self._source_for(kept).pull_ranges(ranges, views)
        else:
            given = self._own.shelf.serve_pull(msgspec.structs.replace(ask, ranges=tuple(ranges)))
            if isinstance(given, PeerRefusal):
                raise TransportError(given.text)
            found, release = given
            try:
                for view, content in zip(views, found, strict=True):
                    _copy_bytes(view, content)
            finally:
                release()
        self._nodes[kept.node] = None

    def _decode_half(self, kept: CopySummary, together: memoryview, runs: Sequence[tuple[int, int, int]]) -> None:
        """Decode the parts of the ranges that lie in one half of a share, from its parity and the paired rank's state.
        Both are asked for over links, also if this node has one of them."""

        def with_other(other: CopySummary) -> None:
            theirs, beside = self._layouts[kept.rank], self._find_layout(other.rank)
            ParityDecoder(self._source_for(kept), self._source_for(other), theirs, beside).decode_runs(together, runs)
            self._nodes.update(dict.fromkeys((kept.node, other.node)))

        self._try_each(kept.rank, [other for other in self._copies_of(kept.beside) if other.whole], with_other)

    def _source_for(self, kept: CopySummary) -> KeeperSource:
        return KeeperSource(self._links, self._restore.keepers[kept.node], self._request_for(kept))

    def _request_for(self, kept: CopySummary) -> PeerRequest:
        pair = None
        if kept.half >= 0:
            pair = (kept.rank, kept.beside) if kept.half == 0 else (kept.beside, kept.rank)
        ask = PeerRequest(verb="pull", rank=kept.rank, layout=kept.layout, step=self._restore.step, pair=pair)
        return msgspec.structs.replace(ask, generation=kept.generation)

    def _copies_of(self, rank: int) -> list[CopySummary]:
        """Return the copies of an old rank's state that can be asked for: this node's first, then whole ones."""
        own = self._own.node
        found = [k for k in self._restore.kept if k.rank == rank and (k.node in self._restore.keepers or k.node == own)]
        return sorted(found, key=lambda kept: (kept.node != own, not kept.whole, kept.node))

    def _try_each(self, rank: int, holders: list[CopySummary], do: Callable[[CopySummary], T]) -> T:
        return try_each_holder(holders, do, f"what rank {rank} had at step {self._restore.step}")


def _batch_reads(pieces: Iterable[tuple[RecutPiece, int]], image: memoryview) -> Iterator[list[_Read]]:
    """Yield what to read for these pieces, in batches that take a limited number of ranges and of bytes aside."""
    batch: list[_Read] = []
    aside = 0
    for piece, turn in pieces:
        old = piece.holders[turn].item
        start, end = covering_range(old, piece.box)
        tensor = bool(piece.item.spec.dtype) and not piece.compared
        if placed := tensor and is_run(old, piece.box) and is_run(piece.item, piece.box):
            to, until = covering_range(piece.item, piece.box)
            view = image[to:until]
        else:
            view = memoryview(bytearray(end - start))
            aside += len(view)
        batch.append(_Read(piece, old, start, view, placed))
        if aside >= _ASIDE_BYTES or len(batch) == _MOST_RANGES:
            yield batch
            batch, aside = [], 0
    if batch:
        yield batch


def _copy_bytes(to: memoryview, content: memoryview) -> None:
    """Copy memory; if possible, without the interpreter's lock."""
    if content.readonly or not len(to):
        to[:] = content
        return
    here = ctypes.addressof(ctypes.c_char.from_buffer(to))
    there = ctypes.addressof(ctypes.c_char.from_buffer(content))
    for at in range(0, len(to), _MOVE_BYTES):
        ctypes.memmove(here + at, there + at, min(_MOVE_BYTES, len(to) - at))
