"""What ranks and the keeper of their node say to each other: JSON, one message per line of a unix socket."""

import msgspec

from holdfast.core.decoding import make_decoder
from holdfast.model.state_copy import KEPT_DIGITS, Doubt

KEEPER = "HOLDFAST_KEEPER"  # in a rank's environment: path of the socket
MAX_BYTES = 1 << 22  # of one message


def layout_file_name(rank: int, layout: str) -> str:
    """The file with the layout of a rank's image, which lies beside the socket."""
    return f"plan-{rank}-{layout[:KEPT_DIGITS]}"


class CheckpointPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how often snapshots become checkpoints."""

    url: str  # a folder, or any fsspec URL
    every_steps: int = 0  # 0: not by steps
    every_s: float = 0.0  # 0: not by time
    keep: int = 3  # newest that are kept; 0: all
    keep_every: int = 0  # and every so many steps for good; 0: none


class ArenaRequest(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """A rank asks for the arena of its snapshots; the same one as before if the layout is the same."""

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
    """A rank asks for its state; the answer may take as long as it takes to fetch."""

    rank: int
    generation: int


ToKeeper = ArenaRequest | StateRequest


class ArenaGrant(msgspec.Struct, frozen=True, kw_only=True, tag="arena"):
    path: str


class StateGrant(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Where the state to go on from lies, verified; every rank of a generation is told the same step."""

    source: str  # "memory", "peer", "storage", "none"
    step: int = 0
    arena: str = ""  # memory and peer
    slot: int = 0
    url: str = ""  # storage: the checkpoint's folder
    run: str = ""  # none: the run's id, and
    doubts: tuple[Doubt, ...] = ()  # what of its checkpoints is not to be taken


class KeeperRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="denied"):
    """One sentence: why not."""

    why: str


FromKeeper = ArenaGrant | StateGrant | KeeperRefusal

encode = msgspec.json.Encoder().encode
to_keeper = make_decoder(msgspec.json.Decoder(ToKeeper))
from_keeper = make_decoder(msgspec.json.Decoder(FromKeeper))
