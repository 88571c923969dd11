"""Messages between holder and zygote: one per packet of a unix socket that the zygote inherits."""

import msgspec

from holdfast.decoding import make_decoder

PACKET_BYTES = 1 << 18  # a rank's whole environment fits


class ForkRank(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Start a rank; argv is the script, or the name of a module, followed by its arguments."""

    key: str
    argv: tuple[str, ...]
    module: bool
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    stdin: str = ""  # the note of a process that reads what this one is to read; "": nothing
    path: str = ""  # of a module: what comes first in sys.path; "": the working directory
    root: str = ""  # the user's tree, and its copy, from which is imported what lies in it
    staged: str = ""


class RankForked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """The rank runs and is the holder's child."""

    key: str
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fork_failed"):
    """No rank was started."""

    key: str
    error: str


class ZygoteReady(msgspec.Struct, frozen=True, kw_only=True, tag="warm"):
    """The zygote is ready. It could not import the modules in `skipped`. A fork is safe only if `threads` is 1."""

    modules: int
    threads: int
    skipped: tuple[str, ...]


FromZygote = RankForked | ForkFailed | ZygoteReady

encode = msgspec.msgpack.Encoder().encode
to_zygote = make_decoder(msgspec.msgpack.Decoder(ForkRank))
from_zygote = make_decoder(msgspec.msgpack.Decoder(FromZygote))
