"""Restores a state that every rank holds whole, as with DDP. The number of ranks may have changed since it was saved.

If another number of ranks saved a snapshot, its image has a layout of its own and is read by this layout. A rank whose
node has no snapshot receives the image of another rank through the process group.
"""

from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.checkpoint.state_image import StateError, StateImage
from holdfast.client.checkpointing.pickle_free_collectives import broadcast_bytes
from holdfast.client.training.progress import here
from holdfast.decoding import from_msgpack
from holdfast.wire.rank_keeper_messages import layout_file_name

_CHUNK_BYTES = 64 << 20
_MOST_EXTRA_BYTES = 1 << 32


class WorldSizes:
    """Holds what the script of this process says: whether it can go on with any number of ranks."""

    any = False


def is_replicated(layout: ImageLayout) -> bool:
    """Return whether every rank holds all of the state that this layout describes."""
    everyone = tuple(range(layout.world))
    return all(item.spec.replicas == everyone for item in layout.items if item.spec.key != EXTRA)


def announce_sizes(layout: ImageLayout, say: Callable[[str], None]) -> None:
    """If every rank has the whole state, note in the progress slot that any number of ranks can restore it. If the
    script can go on with another number of ranks, note this too; if only the state prevents it, `say` so."""
    if (slot := here.find_slot()) is None:
        return
    whole = is_replicated(layout)
    if whole and layout.world > 1:
        slot.mark_replicated()
    if WorldSizes.any and whole:
        slot.mark_resizes()
    elif WorldSizes.any:
        say("the number of ranks cannot change while they go on: their states differ")


def extra_index(layout: ImageLayout) -> int:
    return next(index for index, item in enumerate(layout.items) if item.spec.key == EXTRA)


def open_image(arena: Arena, slot: int, folder: Path) -> StateImage:
    """Return the image in this slot. Its layout is read from the keeper's `folder`. Raises StateError."""
    path = folder / layout_file_name(arena.rank, arena.layout.hex())
    try:
        layout = from_msgpack(path.read_bytes(), ImageLayout)
    except (OSError, msgspec.DecodeError) as e:
        raise StateError(f"the layout of a snapshot of {arena.world} ranks cannot be read: {e}") from None
    if layout.digest != arena.layout:
        raise StateError(f"{path} is of another snapshot")
    return StateImage(layout, arena.slot_image(slot))


def sign_items(layout: ImageLayout) -> str:
    """Return a hash of the list of the image's items. Ranks whose images hold the same items get the same hash."""
    told = [(i.spec.key, i.spec.start, i.spec.shape, i.length) for i in layout.items if i.spec.key != EXTRA]
    return blake2b(msgspec.msgpack.encode(told), digest_size=16).hexdigest()


def spread_image(image: StateImage, *, source: int, lacks: bool) -> bytes:
    """Copy the image of rank `source` to the ranks that lack it, and return the extra state of `source`. This is a
    collective of all ranks. Their images hold the same items, but maybe at different offsets."""
    sends = dist.get_rank() == source
    gloo = "gloo" in str(dist.get_backend())
    device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
    own = bytes(image.payload_bytes(extra_index(image.layout))) if sends else b""
    extra = broadcast_bytes(own, source, _MOST_EXTRA_BYTES)
    for pieces in _list_pieces(image):
        sizes = [piece.numel() for piece in pieces]
        moved = torch.cat(pieces).to(device) if sends else torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(moved, src=source)
        if lacks:
            for piece, came in zip(pieces, moved.cpu().split(sizes), strict=True):
                piece.copy_(came)
    return extra


def _list_pieces(image: StateImage) -> Iterator[list[torch.Tensor]]:
    """Yield the memory of all items but the extra state, in order, as lists of pieces of bounded size."""
    found: list[torch.Tensor] = []
    room = _CHUNK_BYTES
    for item in image.layout.items:
        at = item.offset if item.spec.key != EXTRA else item.end
        while at < item.end:
            size = min(room, item.end - at)
            found.append(torch.frombuffer(image.memory[at : at + size], dtype=torch.uint8))
            at, room = at + size, room - size
            if not room:
                yield found
                found, room = [], _CHUNK_BYTES
    if found:
        yield found
