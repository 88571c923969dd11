"""Locates the records of an image in the parts of a checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.checkpoint.arena_header import PAGE_BYTES
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout, is_empty_chunk, name_of
from holdfast.checkpoint.verified_block_reads import PartPiece

_FILE = re.compile(r"__(\d+)_0\.distcp")


def file_of(rank: int) -> str:
    """Return the name of a rank's data file in a checkpoint. It holds the ranges of the image that this rank owns."""
    return f"__{rank}_0.distcp"


def rank_of(file: str) -> int | None:
    found = _FILE.fullmatch(file)
    return int(found[1]) if found else None


def locate_pieces(metadata: Any, layout: ImageLayout) -> tuple[PartPiece, ...] | None:
    """Return the places of an image's records in the parts of a checkpoint. Return None if the checkpoint lacks one of
    these records, for example because it divides a tensor differently among ranks."""
    known = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
    pieces: list[PartPiece] = []
    for item in layout.items:
        if is_empty_chunk(item.spec):
            continue
        piece = _locate_item(metadata.state_dict_metadata, known, item)
        if piece is None:
            return None
        if pieces and _is_adjacent(pieces[-1], piece):
            last = pieces.pop()
            piece = msgspec.structs.replace(last, bytes=piece.to + piece.bytes - last.to)
        pieces.append(piece)
    return tuple(map(_extend_to_page, pieces, [*(piece.to for piece in pieces[1:]), layout.image_bytes]))


def _locate_item(
    tensors: Mapping[str, Any], known: Mapping[tuple[str, tuple[int, ...]], Any], item: ImageItem
) -> PartPiece | None:
    spec = item.spec
    key = next((key for key in (name_of(spec.key, spec.group), spec.key) if key in tensors), "")
    info = known.get((key, spec.start))
    if info is None or info.length != item.length or (rank := rank_of(info.relative_path)) is None:
        return None
    whole = tensors[key]
    if hasattr(whole, "chunks") != bool(spec.dtype):
        return None
    if spec.dtype:
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in whole.chunks]
        same = str(whole.properties.dtype) == f"torch.{spec.dtype}" and tuple(whole.size) == spec.whole
        if not same or (spec.start, spec.shape) not in chunks:
            return None
    return PartPiece(rank=rank, start=info.offset, bytes=info.length, to=item.offset)


def _is_adjacent(last: PartPiece, piece: PartPiece) -> bool:
    """Return whether two pieces of one part lie as far apart in memory as in the part, so that one read gets both."""
    return last.rank == piece.rank and 0 <= piece.to - last.to == piece.start - last.start


def _extend_to_page(piece: PartPiece, until: int) -> PartPiece:
    """Extend a page-aligned piece to the end of its last page, unless that is beyond `until`, an offset in the target
    memory. Whole pages are read straight into that memory."""
    end = -(-(piece.to + piece.bytes) // PAGE_BYTES) * PAGE_BYTES
    aligned = piece.to % PAGE_BYTES == piece.start % PAGE_BYTES == 0
    return msgspec.structs.replace(piece, bytes=end - piece.to) if aligned and end <= until else piece
