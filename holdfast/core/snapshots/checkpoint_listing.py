"""What rank 0's node sees at a storage after it has published there: every checkpoint, as one message tells them."""

from typing import Annotated

import msgspec

from holdfast.model.message_bounds import MOST, Instant, Number

MOST_LISTED = 300  # with texts of these lengths a message stays below its limit
_TEXT_CHARS, _PLACE_CHARS = 256, 4096
ShortText = Annotated[str, msgspec.Meta(max_length=_TEXT_CHARS)]
Place = Annotated[str, msgspec.Meta(max_length=_PLACE_CHARS)]


class ListedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that is published on storage, with what its manifest says."""

    name: ShortText  # of its folder
    step: Number
    at: Instant = 0.0  # when it was published
    generation: Number = 0
    run: ShortText = ""  # which wrote it
    world: Number = 0
    bytes: Number = 0
    doubted: bool = False  # no run resumes from it
    why: ShortText = ""  # nor from this one, for this reason


class CheckpointListing(msgspec.Struct, frozen=True, kw_only=True, tag="listed"):
    """All checkpoints at one storage, or the newest ones, as its writer saw them just after it had published one,
    removed old ones or marked some as doubted. It is sent again on the next link."""

    generation: Number  # of the node that tells
    base: Place  # the folder or URL that they are in
    checkpoints: Annotated[tuple[ListedCheckpoint, ...], msgspec.Meta(max_length=MOST_LISTED)] = ()
    since: Number = 0  # of older steps it tells nothing


def make_listing(generation: int, base: str, found: tuple[ListedCheckpoint, ...]) -> CheckpointListing:
    """Return a listing of these checkpoints, newest first, that fits into a message."""
    told, rest = found[:MOST_LISTED], found[MOST_LISTED:]
    since = told[-1].step + 1 if rest else 0  # others of the very last step may be left out
    return CheckpointListing(
        generation=generation,
        base=fit_text(base, _PLACE_CHARS),
        checkpoints=tuple(one for one in told if one.step >= since),
        since=since,
    )


def fit_text(text: str, chars: int = _TEXT_CHARS) -> str:
    """Return the beginning of a text that may come from a stranger's file, without what no message or table takes."""
    return text[:chars].encode("utf-8", "replace").decode().replace("\0", "?")


def fit_number(number: int) -> int:
    return max(-MOST, min(number, MOST))
