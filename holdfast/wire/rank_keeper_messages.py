"""Messages between ranks and the keeper of their node: JSON, one message per line of a unix socket."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from holdfast.decoding import make_decoder
from holdfast.model.state_copy import KEPT_DIGITS
from holdfast.model.state_doubt import Doubt

MAX_BYTES = 1 << 22  # of one message


def layout_file_name(rank: int, layout: str) -> str:
    """Return the name of the file with a rank's layout, in the same folder as the keeper's socket."""
    return f"plan-{rank}-{layout[:KEPT_DIGITS]}"


def step_metadata_path(metadata_path: str, step: int) -> str:
    """Return the path of DCP's metadata for one step. It is there if the lengths of values differ from step to step."""
    return f"{metadata_path}-{step}"


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Where checkpoints go, how often a snapshot is written as one, and how many are kept."""

    url: str  # a folder, or any fsspec URL
    every_steps: int = 0  # 0: not by steps
    every_s: float = 0.0  # 0: not by time
    keep: int = 3  # newest that are kept; 0: all
    keep_every: int = 0  # and every so many steps for good; 0: none


class ArenaRequest(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """A rank's request for its snapshot arena; a rank with an unchanged layout gets the same arena again."""

    rank: int
    world: int
    generation: int
    layout: str  # hex of the layout's hash
    image_bytes: int
    slots: int
    share: tuple[tuple[int, int], ...]  # byte ranges of the image that this rank backs up and persists for all replicas
    metadata_path: str = ""  # rank 0: a file with DCP's metadata for this layout
    verified: bool = False  # one slot is for a snapshot that was found good
    storage: CheckpointPolicy | None = None


class StateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """A rank's request for its state; the keeper answers once it has fetched the state."""

    rank: int
    generation: int


ToKeeper = ArenaRequest | StateRequest


class ArenaGrant(msgspec.Struct, frozen=True, kw_only=True, tag="arena"):
    path: str


class StateGrant(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The location of the verified state from which a rank continues; all ranks of a generation get the same step."""

    source: str  # "memory", "peer", "disk", "storage", "none"; "replica": another rank has it
    step: int = 0
    arena: str = ""  # memory, peer and disk
    slot: int = 0
    url: str = ""  # storage: the checkpoint's folder
    run: str = ""  # none: the run's id, and
    doubts: tuple[Doubt, ...] = ()  # what of its checkpoints is not to be taken
    stored: int = -1  # none: the step of a checkpoint that must be on storage; -1: there may be none
    doubted: int = -1  # none: the newest state that is in doubt, of any place; -1: none is, or step 0 will do
    replicated: bool = False  # memory and replica: it is the whole state, perhaps laid out for another number of ranks
    cut_from: int = 0  # as many ranks saved the state, which is cut anew for the ranks of this generation; 0: it is not
    uncut: str = ""  # none: why the state cannot be cut anew for this rank


class KeeperRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """The keeper refuses a request; `why` is one sentence."""

    why: str
    unfetched: bool = False  # a state that other nodes hold could not be fetched from them


FromKeeper = ArenaGrant | StateGrant | KeeperRefusal
AnswerRank = Callable[[bytes], Coroutine[Any, Any, FromKeeper]]  # to one line

encode = msgspec.json.Encoder().encode
to_keeper = make_decoder(msgspec.json.Decoder(ToKeeper))
from_keeper = make_decoder(msgspec.json.Decoder(FromKeeper))
