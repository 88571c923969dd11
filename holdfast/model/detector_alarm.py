"""The alarm: a detector's claim that something is wrong at one instant."""

from enum import StrEnum

import msgspec

from holdfast.model.loss_response import LossResponse, parse_response
from holdfast.model.message_bounds import Number
from holdfast.model.rank_traces import StackRow

LEFT = "left without a controller"  # the signature of an alarm about a node that said how far its ranks had come
UNNAMED = "hang, nobody named"  # the signature of a hang for which no rank stands out
NO_STEP = "no step"  # the signature of an alarm that only says that the job stands
GPU_HANG = "hang of a GPU"  # how the signature of a hang begins in which GPUs keep the others waiting
SWITCH = "links lost together"  # the signature of an alarm about machines that a switch has cut off
MACHINE_LOST = "machine lost"  # the signature of an alarm about a node whose machine failed, as its fleet says
AGENT_LOST = "agent lost"  # the signature of an alarm about a node whose agent died, and has a successor
OPINION = "opinion"  # the signature of an alarm that says what a failure may have been, and no more


class Kind(StrEnum):
    CRASH = "crash"
    SILENCE = "silence"
    LOSS = "loss"
    HANG = "hang"
    SLOW = "slow"
    HEALTH = "health"
    LINES = "lines"
    REPLICA = "replica"
    REDONE = "redone"  # a step that was made again has another loss than before


class Stance(StrEnum):
    """The most that an alarm of a detector may lead to."""

    OBSERVE = "observe"  # the journal alone
    NOTIFY = "notify"  # a person is told
    ACT = "act"


class Alarm(msgspec.Struct, frozen=True, kw_only=True, tag="alarm"):
    """A detector's claim that something was wrong at one instant, and which nodes may be at fault."""

    kind: Kind
    at: float  # when it happened, on the controller's clock
    suspects: tuple[str, ...]
    reason: str
    generation: Number = 0
    ranks: tuple[Number, ...] = ()
    code: Number | None = None  # exit code, negative for a signal
    raised: str = ""  # type of the Python exception that ended the rank
    alone: bool = False  # the rank's log shows this exception and no other, and no sign of another failure before it
    own: bool = False  # so it is, the script's own code raised it, and its words tell of nothing outside this rank
    pressed: str = ""  # a killed rank: the sign that memory was scarce, where the kernel does not count its kills
    full_disk: str = ""  # a path on the full disk that explains it; "": none is known to
    klass: str = ""  # class of the failure taxonomy
    title: str = ""  # the class in words; "": they are those of its name
    group: str = ""  # whose fault, in the taxonomy's words
    action: str = ""  # what to do next, in the taxonomy's words
    confidence: float = 0.0  # of the class, 0 to 1; 0: nobody says
    hint: str = ""  # what a person can do about it
    signature: str = ""  # equal for failures that look the same
    evidence: tuple[str, ...] = ()
    stacks: tuple[StackRow, ...] = ()  # where all ranks were, if the alarm was raised for that; never from a node
    stance: Stance = Stance.ACT
    over: bool = False  # what was told under this signature is over, and this alarm only says so
    hard: bool = False  # the evidence names its suspects beyond doubt
    policy: str = ""  # what the user wants done about a loss that stands out, as the text of a LossResponse
    not_after: Number | None = None  # the last step known good, where later states are not to be trusted
    good_count: Number | None = None  # the same where steps have no numbers: how many since the launch were good

    @property
    def response(self) -> LossResponse | None:
        """Return the user's chosen response to a loss that stands out; None for every other alarm."""
        return parse_response(self.policy)
