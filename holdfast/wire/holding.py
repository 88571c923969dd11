"""What agent and holder say to each other: one message per packet of a unix socket that the agent inherits."""

import socket

import msgspec

from holdfast.core.decoding import decoder
from holdfast.wire.zygote import Fork

PACKET_BYTES = 1 << 18


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag="exec"):
    """Start a rank as a program of its own."""

    key: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    stdin: str = ""  # the note of a process that reads what this one is to read; "": nothing


class Preload(msgspec.Struct, frozen=True, kw_only=True, tag="preload"):
    """Keep a zygote with these modules; one of another key is of no use any more."""

    modules: tuple[str, ...]
    learned: tuple[str, ...] = ()  # the same, but they are done without if a rank could not be forked with them
    env: dict[str, str]
    key: str = ""

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.modules, *self.learned)))


class MakeArena(msgspec.Struct, frozen=True, kw_only=True, tag="make_arena"):
    """Keep memory of this size under this name; it outlives whoever uses it."""

    name: str
    bytes: int


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Signal the process group of a rank, if it has not ended."""

    key: str
    signal: int


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """The exit of this rank is on record elsewhere."""

    key: str


class Sweep(msgspec.Struct, frozen=True, kw_only=True, tag="sweep"):
    """End whatever ranks that are over have left behind, however well it hid."""


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """End everything below the holder, then the holder, with this code."""

    code: int


ToHolder = Exec | Fork | Preload | MakeArena | Kill | Forget | Sweep | Quit


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the holder knows it; code is None while it runs."""

    key: str
    pid: int
    code: int | None = None
    at: float = 0.0


class KeptArena(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the holder keeps; others open it by its path."""

    name: str
    bytes: int
    path: str


class Listing(msgspec.Struct, frozen=True, kw_only=True, tag="listing"):
    """The first thing a new agent hears."""

    ranks: tuple[Held, ...]
    arena: str  # path of the slots' memory
    arenas: tuple[KeptArena, ...]  # of snapshots
    warm: bool
    key: str = ""  # of the zygote
    modules: tuple[str, ...] = ()  # that the newest zygote was asked to have


class Made(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    arena: KeptArena


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    key: str
    pid: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    key: str
    error: str


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """A rank has ended."""

    rank: Held


class Swept(msgspec.Struct, frozen=True, kw_only=True, tag="swept"):
    """Nothing is left of ranks that are over, but for these pids, which do not die."""

    left: tuple[int, ...] = ()


class Warmed(msgspec.Struct, frozen=True, kw_only=True, tag="warmed"):
    """The zygote is ready, or cannot be had (then ranks are executed afresh)."""

    ok: bool
    detail: str = ""
    key: str = ""
    lost: str = ""  # how the one before it ended, if it was not replaced on purpose


ToAgent = Listing | Made | Started | Refused | Over | Swept | Warmed

encode = msgspec.msgpack.Encoder().encode
to_holder = decoder(msgspec.msgpack.Decoder(ToHolder))
to_agent = decoder(msgspec.msgpack.Decoder(ToAgent))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a packet socket with room for a rank's whole environment."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    return ends
