"""Messages between agents and the controller: msgpack over one WebSocket, bounded in size.

Every message of a controller carries that controller's epoch. An agent looks at it before anything else.
"""

import re
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec

from holdfast.core.agent_state_machine import Post
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.decoding import make_decoder
from holdfast.model.code_release import Release
from holdfast.model.copy_aim import Aim
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import HostIdentity
from holdfast.model.message_bounds import MOST_S, Name, Number
from holdfast.model.node_errands import Errand
from holdfast.model.observation import Beat, LinkTraffic, Mark, Reach
from holdfast.model.rank_traces import Trace
from holdfast.model.state_copy import Address, Copy
from holdfast.wire.credentials.admitted_peers import AdmittedPeers

MAX_BYTES = 1 << 20  # of one message
TOKEN_HEADER = "X-Holdfast-Token"
# What a node says of itself is believed as far as it can be so: numbers that follow from these must not run over.
MOST_EPOCHS = 1_000_000
Epoch = Annotated[int, msgspec.Meta(ge=0, le=MOST_EPOCHS)]
LiveEpoch = Annotated[int, msgspec.Meta(ge=1, le=MOST_EPOCHS)]  # of a controller that runs
Generation = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
RankCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]  # of one node
_MODULE, _NAME_CHARS, _MODULES = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", 200, 4096
ModuleName = Annotated[str, msgspec.Meta(pattern=_MODULE, max_length=_NAME_CHARS)]
ModuleNames = Annotated[tuple[ModuleName, ...], msgspec.Meta(max_length=_MODULES)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Introduces a node to the controller; sent on every new link, and again when the node becomes ready."""

    node: Name
    host: Name
    nproc: RankCount
    order: Number
    generation: Generation  # whose ranks run here, 0: none
    ready: bool  # checks passed, zygote warm
    copies: tuple[Copy, ...] = ()  # snapshots that it holds
    keeper: Address = ("", 0)  # where other nodes reach its keeper
    epoch: Epoch = 0  # newest controller that it has heard
    identity: HostIdentity = HostIdentity()


class NodeNotice(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """One sentence from a node for the person at the console; it may be lost."""

    node: str
    text: str


class EndWarning(msgspec.Struct, frozen=True, kw_only=True, tag="warned"):
    """The cluster has warned a node that it will end it: the fleet can say when. A lost warning is not sent again,
    because surveys go on."""

    node: str


class HashReport(msgspec.Struct, frozen=True, kw_only=True, tag="marked"):
    """Hashes of the state that this node's ranks share with others; a lost report is not sent again."""

    node: str
    generation: Number
    marks: tuple[Mark, ...]


class TraceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """A node's answer to a TraceRequest; a lost answer is not sent again."""

    id: Number
    trace: Trace


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True, tag="traffic"):
    """Traffic of the links of a node's machine; a lost report is not sent again."""

    node: str
    links: tuple[LinkTraffic, ...]


class ScriptImports(msgspec.Struct, frozen=True, kw_only=True, tag="imports"):
    """The script's modules that the zygote of rank 0's node has imported. The controller sends them to nodes without
    ranks. A lost message is sent again only on the next link."""

    generation: Generation
    modules: ModuleNames


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    at: float  # the controller's clock
    ahead_s: float | None = None  # how far it is ahead of the monotonic clock of its machine
    beat_s: float
    releases: tuple[Release, ...] = ()  # that the node is to have before it is ready
    peers: AdmittedPeers | None = None  # whose certificates count; None: all nodes are on this host and have none
    run: str = ""  # the job's name and mark: states on disk of no other run count


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    seq: int


class ErrandMessage(msgspec.Struct, frozen=True, kw_only=True, tag="tell"):
    errand: Errand


class AimMessage(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Tells a node which snapshots the job counts on; a lost message does no harm, because it is repeated."""

    aim: Aim


class PeersMessage(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """Tells a node whose certificates count from now on; a lost message is sent again."""

    peers: AdmittedPeers


class IncidentNote(msgspec.Struct, frozen=True, kw_only=True):
    """A closed incident of the job, in one sentence."""

    number: int
    text: str


class JobFigures(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """The job's incidents, restarts and ETTR, for nodes whose ranks log to W&B, MLflow or TensorBoard; a lost message
    does no harm, because newer ones follow."""

    generation: int
    incidents: int
    restarts: int
    lost_s: float
    ettr: float | None  # None: no step was ever seen
    notes: tuple[IncidentNote, ...] = ()  # on incidents after which this generation made its first step
    open: bool = False  # there is an incident that will have a note once this generation has made a step


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Asks a node for the stacks of all training processes. At the deadline the node sends those that it has."""

    id: int
    deadline_s: float
    native: bool = False


class ReachRequest(msgspec.Struct, frozen=True, kw_only=True, tag="try"):
    """Asks a node which of these other nodes it can connect to, and whether its gateway answers."""

    peers: dict[str, Address]


FromAgent = (
    Hello
    | Beat
    | Post
    | NodeNotice
    | EndWarning
    | HashReport
    | TraceAnswer
    | TrafficReport
    | Reach
    | ScriptImports
    | CheckpointListing
)
FromController = (
    Welcome | Ack | ErrandMessage | AimMessage | PeersMessage | TraceRequest | ReachRequest | ScriptImports | JobFigures
)


class ControllerPacket(msgspec.Struct, frozen=True, array_like=True):
    """One packet of a controller: its epoch, and what it says."""

    epoch: LiveEpoch
    message: FromController


encode = msgspec.msgpack.Encoder().encode
_decode_message = make_decoder(msgspec.msgpack.Decoder(FromAgent))


def decode_from_agent(content: bytes) -> FromAgent:
    """Decode an agent's message. Raise DecodeError if it is malformed, or if it is an alarm with an impossible time or
    confidence. Alarm's type has no such bounds, because alarms in old journals may have any values."""
    message: FromAgent = _decode_message(content)
    alarm = message.body if isinstance(message, Post) else None
    if isinstance(alarm, Alarm) and not (abs(alarm.at) <= MOST_S and 0.0 <= alarm.confidence <= 1.0):
        raise msgspec.DecodeError("an alarm with an absurd time or confidence")
    return message


decode_from_controller: Callable[[bytes], ControllerPacket] = make_decoder(msgspec.msgpack.Decoder(ControllerPacket))


def make_script_imports(generation: int, names: Iterable[str]) -> ScriptImports:
    """Return a message with these module names, without invalid ones and without those beyond the message's limit."""
    fit = [name for name in names if len(name) <= _NAME_CHARS and re.search(_MODULE, name)]
    return ScriptImports(generation=generation, modules=tuple(fit[:_MODULES]))
