"""Messages between an agent and ranks that survive: JSON, one message per line of a unix socket."""

import msgspec

from holdfast.decoding import make_decoder
from holdfast.model.action import HandOver

SOCKET = "survivors.sock"  # in the node's folder
MAX_BYTES = 1 << 20  # of one message


class SurvivorState(msgspec.Struct, frozen=True, kw_only=True, tag="survivor"):
    """A rank says that it can survive, or that it has left its generation and is parked."""

    rank: int
    generation: int
    parked: bool


class PartOrder(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """The generation is over: leave it, and wait."""

    generation: int
    hand_over: HandOver | None = None  # but do this first


class RejoinOrder(msgspec.Struct, frozen=True, kw_only=True, tag="rejoin"):
    """Join the next generation, with this environment."""

    env: dict[str, str]


SurvivorOrder = PartOrder | RejoinOrder

encode = msgspec.json.Encoder().encode
to_agent = make_decoder(msgspec.json.Decoder(SurvivorState))
to_rank = make_decoder(msgspec.json.Decoder(SurvivorOrder))
