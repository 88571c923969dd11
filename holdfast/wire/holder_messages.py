"""Messages between agent and holder: one per packet of a unix socket that the agent inherits."""

import socket
from typing import NamedTuple

import msgspec

from holdfast.decoding import make_decoder
from holdfast.wire.holder_zygote_messages import ForkRank

PACKET_BYTES = 1 << 18


class RankKey(NamedTuple):
    """The name of a rank of one generation; the holder stores it as text and never parses it."""

    generation: int
    rank: int

    @classmethod
    def parse_text(cls, text: str) -> "RankKey":
        generation, rank = text.split(":")
        return cls(int(generation), int(rank))

    def __str__(self) -> str:
        return f"{self.generation}:{self.rank}"


class ExecRank(msgspec.Struct, frozen=True, kw_only=True, tag="exec"):
    """Start a rank as a new program, without a zygote."""

    key: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    stdin: str = ""  # the note of a process that reads what this one is to read; "": nothing


class PreloadZygote(msgspec.Struct, frozen=True, kw_only=True, tag="preload"):
    """Asks the holder for a zygote that has imported these modules. A warm zygote with the same `key` stays in use
    until the new one is warm; any other zygote ends at once. `key` stands for the environment, `env`."""

    modules: tuple[str, ...]
    learned: tuple[str, ...] = ()  # the same, but they are done without if a rank could not be forked with them
    env: dict[str, str]
    key: str = ""
    ranks: int = 0  # of the node: the zygote has as many forks ready

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.modules, *self.learned)))


class MakeArena(msgspec.Struct, frozen=True, kw_only=True, tag="make_arena"):
    """Make shared memory of this size and keep it under this name; it outlives the processes that use it."""

    name: str
    bytes: int


class KillRank(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Send a signal to the process group of a rank, if the rank has not ended."""

    key: str
    signal: int


class RekeyRank(msgspec.Struct, frozen=True, kw_only=True, tag="rekey"):
    """Register a surviving or spare rank under the key of the generation that it joins. The holder answers with
    RankStarted or StartRefused."""

    key: str  # the new one
    old: str


class ForgetRank(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Forget this rank, which has ended; the agent sends this when it launches a newer generation."""

    key: str


class SweepLeftovers(msgspec.Struct, frozen=True, kw_only=True, tag="sweep"):
    """Kill all processes that ended ranks have left behind, even those with another session or parent."""


class QuitHolder(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """End every process below the holder, then the holder itself with this exit code."""

    code: int


ToHolder = (
    ExecRank | ForkRank | PreloadZygote | MakeArena | KillRank | RekeyRank | ForgetRank | SweepLeftovers | QuitHolder
)


class HolderRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the holder knows it; `code` is None while the rank runs."""

    key: str
    pid: int
    code: int | None = None
    at: float = 0.0

    @property
    def rank_key(self) -> RankKey:
        return RankKey.parse_text(self.key)


class KeptArena(msgspec.Struct, frozen=True, kw_only=True):
    """Shared memory that the holder keeps; other processes open it by its path."""

    name: str
    bytes: int
    path: str


class HolderListing(msgspec.Struct, frozen=True, kw_only=True, tag="listing"):
    """The ranks, arenas and zygote that the holder keeps; the first message that a new agent gets."""

    ranks: tuple[HolderRank, ...]
    arena: str  # path of the slots' memory
    arenas: tuple[KeptArena, ...]  # of snapshots
    warm: bool
    key: str = ""  # of the zygote
    modules: tuple[str, ...] = ()  # that the newest zygote was asked to have
    lost: str = ""  # how the agent before this one ended, in words; "": there was none


class ArenaMade(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    arena: KeptArena


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    key: str
    pid: int


class StartRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    key: str
    error: str


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """A rank has ended."""

    rank: HolderRank


class SweepDone(msgspec.Struct, frozen=True, kw_only=True, tag="swept"):
    """All leftovers of ended ranks are gone, except for processes that do not die, whose pids are in `left`."""

    left: tuple[int, ...] = ()


class ZygoteWarmed(msgspec.Struct, frozen=True, kw_only=True, tag="warmed"):
    """The zygote is ready, or there is none (`ok` is false); without a zygote each rank starts as a new program."""

    ok: bool
    detail: str = ""
    key: str = ""
    lost: str = ""  # how the one before it ended, if it was not replaced on purpose
    learned: tuple[str, ...] = ()  # those of PreloadZygote.learned that it has: ranks can be forked with them


ToAgent = HolderListing | ArenaMade | RankStarted | StartRefused | RankEnded | SweepDone | ZygoteWarmed

encode = msgspec.msgpack.Encoder().encode
to_holder = make_decoder(msgspec.msgpack.Decoder(ToHolder))
to_agent = make_decoder(msgspec.msgpack.Decoder(ToAgent))


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a packet socket that has room for a rank's whole environment."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    return ends
