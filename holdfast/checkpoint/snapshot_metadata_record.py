"""The metadata record of a snapshot: the first record of every image, which can be found without a layout."""

import msgspec

from holdfast.decoding import make_decoder

MAGIC = b"HFTOLD01"
_LENGTH_BYTES = 8
_ALIGN_BYTES, _FIRST_BYTES = 64, 4096  # it starts at some multiple, not far from the start of the image


class ImageMetadataError(Exception):
    """Says in one sentence why an image's metadata cannot be read."""


class GeneratorStates(msgspec.Struct, frozen=True):
    """The states of the global random number generators of python, torch, numpy and CUDA."""

    python: tuple[int, bytes, float | None]
    torch: bytes
    numpy: tuple[str, bytes, int, int, float] | None = None
    cuda: bytes = b""


class ImageMetadata(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    made: int = -1  # steps that the optimizer had made, all in all; -1: not known
    absent: list[str] = []  # keys that are laid out, and for which there was nothing
    generators: GeneratorStates | None = None
    extra: bytes = b""  # of torch.save
    layout: bytes = b""  # of the image itself, where nobody else could tell


_encode = msgspec.msgpack.Encoder().encode
_decode = make_decoder(msgspec.msgpack.Decoder(ImageMetadata))


def pack_metadata(told: ImageMetadata) -> bytes:
    content = _encode(told)
    return MAGIC + len(content).to_bytes(_LENGTH_BYTES, "little") + content


def unpack_metadata(content: memoryview) -> ImageMetadata:
    """Decode metadata from the payload of its record. Raises ImageMetadataError if it is missing or damaged."""
    start = len(MAGIC) + _LENGTH_BYTES
    size = int.from_bytes(content[len(MAGIC) : start], "little")
    if content[: len(MAGIC)] != MAGIC or not 0 < size <= len(content) - start:
        raise ImageMetadataError("this image has no metadata")
    try:
        return _decode(content[start : start + size])
    except msgspec.DecodeError as e:
        raise ImageMetadataError(f"the metadata of this image cannot be read: {e}") from None


def find_metadata(image: memoryview) -> ImageMetadata:
    """Find and decode the metadata of an image of unknown layout. Raises ImageMetadataError if there is none."""
    for at in range(0, min(_FIRST_BYTES, len(image)), _ALIGN_BYTES):
        if image[at : at + len(MAGIC)] == MAGIC:
            return unpack_metadata(image[at:])
    raise ImageMetadataError("this image has no metadata")
