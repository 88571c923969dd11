"""The interface of an agent that a simulated world needs; the caller of a simulation supplies the real one."""

from typing import Protocol

from holdfast.core.agent_state_machine import AgentProtocol


class AgentCrashed(BaseException):
    """Raised inside a simulated agent whose process has died, to end the code that runs in it."""


class DstAgent(Protocol):
    """One life of an agent."""

    life: AgentProtocol

    async def run(self) -> None: ...
