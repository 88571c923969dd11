"""Collectives of values of declared types. Unlike torch's of objects they unpickle nothing, so that whoever takes a
rank's place at an unprotected connection gets no code of his executed here.

Values are sent as MessagePack in tensors of bytes. Sizes go first, and are bounded.
"""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from holdfast.checkpoint.state_image import bytes_of
from holdfast.core.terminal_sanitizer import plain_line, with_text
from holdfast.decoding import from_msgpack

T = TypeVar("T")
MOST_BYTES = 64 << 20  # of one value
_SHOWN = 200  # characters of what is wrong with a value


class PeerValueError(dist.DistError):
    """Raised on a rank if what came in another rank's name is no value of the declared type."""


def gather_values(value: T, kind: type[T]) -> list[T]:
    """Return the values of all ranks, in rank order. All ranks call this together."""
    device, content = find_device(), _encode(value)
    sizes = _gather_sizes(len(content), MOST_BYTES, device)
    padded = _padded(content, max(sizes), device)
    into = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(into, padded)
    return _decode_all(into, sizes, kind)


def gather_to_first(value: T, kind: type[T], most: int = MOST_BYTES) -> list[T] | None:
    """Return the values of all ranks on rank 0; None on the others. All ranks call this together."""
    device, content = find_device(), _encode(value)
    sizes = _gather_sizes(len(content), most, device)
    padded = _padded(content, max(sizes), device)
    if dist.get_rank():
        dist.gather(padded, None, dst=0)
        return None
    into = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, into, dst=0)
    return _decode_all(into, sizes, kind)


def broadcast_value(value: T, kind: type[T], source: int = 0) -> T:
    """Return the value of rank `source`. All ranks call this together."""
    sends = dist.get_rank() == source
    content = broadcast_bytes(_encode(value) if sends else b"", source)
    return value if sends else _decode(content, kind, source)


def broadcast_bytes(content: bytes, source: int, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of rank `source`. All ranks call this together."""
    device, sends = find_device(), dist.get_rank() == source
    told = torch.tensor([len(content) if sends else 0], dtype=torch.int64, device=device)
    dist.broadcast(told, src=source)
    size = _check_size(int(told.item()), most, source)
    moved = _padded(content if sends else b"", size, device)
    dist.broadcast(moved, src=source)
    return content if sends else bytes(bytes_of(moved.cpu())[:size])


def find_device() -> torch.device:
    """Return the device that torch's own collectives of objects would use: the host if the default group can send from
    it, else what the group's first backend sends from."""
    kinds = [device.type for device in dist.group.WORLD._device_types] if dist.group.WORLD else []
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kinds[0] == "cuda" else torch.device(kinds[0])


def _decode_all(came: list[torch.Tensor], sizes: list[int], kind: type[T]) -> list[T]:
    contents = [bytes(bytes_of(one.cpu())[:size]) for one, size in zip(came, sizes, strict=True)]
    return [_decode(content, kind, rank) for rank, content in enumerate(contents)]


def _gather_sizes(size: int, most: int, device: torch.device) -> list[int]:
    told = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(told, torch.tensor([size], dtype=torch.int64, device=device))
    return [_check_size(int(one.item()), most, rank) for rank, one in enumerate(told)]


def _check_size(size: int, most: int, rank: int) -> int:
    """Return the size; raise PeerValueError if it is out of bounds. All ranks see the same one, so all raise."""
    if not 0 <= size <= most:
        raise PeerValueError(f"a value of {size} bytes came in the name of rank {rank}; it may have {most}")
    return size


def _padded(content: bytes, size: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of `size` bytes, and at least one, that begins with this content."""
    tensor = torch.zeros(max(1, size), dtype=torch.uint8)
    if content:
        bytes_of(tensor)[: len(content)] = content
    return tensor.to(device)


def _encode(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeError:  # a path in it has bytes that are no text; the other ranks wait, so something must be sent
        return msgspec.msgpack.encode(with_text(msgspec.to_builtins(value)))


def _decode(content: bytes, kind: type[T], rank: int) -> T:
    try:
        return from_msgpack(content, kind)
    except msgspec.DecodeError as e:
        what = plain_line(str(e))[:_SHOWN]
        raise PeerValueError(f"what came in the name of rank {rank} is no value that ranks send: {what}") from None
