"""The interface of an agent that a simulated world needs; the caller of a simulation supplies the real one."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.config import Settings
from holdfast.core.agent_state_machine import AgentProtocol
from holdfast.model.alarm import Alarm
from holdfast.model.signal import Exit
from holdfast.wire.holder_messages import HolderRank

if TYPE_CHECKING:
    from holdfast.sim.dst.simulated_backup import SimBackup
    from holdfast.sim.dst.simulated_errands import SimDiagnosis, SimHealth, SimStaging, SimTracer
    from holdfast.sim.dst.simulated_holder import SimHolder
    from holdfast.sim.dst.simulated_link import SimDialer
    from holdfast.sim.dst.simulated_machine import MachineClock
    from holdfast.sim.dst.simulated_notes import SimNotes


class AgentCrashed(BaseException):
    """Raised inside a simulated agent whose process has died, to end the code that runs in it."""


class AgentNews(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated parts call when they have news for the agent."""

    on_rank_exit: Callable[[HolderRank], None]
    on_copies: Callable[[], None]


class PlayedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the world that one life of an agent is given."""

    clock: "MachineClock"
    dialer: "SimDialer"
    notes: "SimNotes"
    ranks: "SimHolder"
    tracer: "SimTracer"
    keeper: "SimBackup"
    staging: "SimStaging"
    diagnosis: "SimDiagnosis"
    health: "SimHealth"
    judge: Callable[[Exit], Awaitable[Alarm]]
    background: tuple[Callable[[], Coroutine[Any, Any, None]], ...]


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What one life of an agent is made from."""

    node: str
    order: int
    nproc: int
    settings: Settings
    play: Callable[[AgentNews], PlayedParts]


class DstAgent(Protocol):
    """One life of an agent."""

    life: AgentProtocol

    async def run(self) -> None: ...


BuildAgent = Callable[[AgentSetup], DstAgent]
