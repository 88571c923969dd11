"""Interfaces of the real agent and controller, which the caller passes to the simulated world."""

from collections.abc import Callable
from typing import Protocol

from holdfast.config import Settings
from holdfast.controller_interfaces import ControllerPorts, Socket
from holdfast.core.agent_state_machine import AgentProtocol
from holdfast.core.decide.job_view import JobView
from holdfast.core.record.ledger import Ledger
from holdfast.model.decider_events import Order
from holdfast.model.job_and_seats import Job


class AgentCrashed(BaseException):
    """Raised inside a simulated agent whose process has died, to end the code that runs in it."""


class DstAgent(Protocol):
    """One process of the real agent."""

    life: AgentProtocol

    async def run(self) -> None: ...


class ControllerCrashed(BaseException):
    """Raised inside a simulated controller whose process has died, to end the code that runs in it."""


class DstController(Protocol):
    """One life of a controller."""

    view: JobView
    ledger: Ledger

    async def run(self, job: Job) -> int: ...

    def give_order(self, order: Order) -> str:
        """Give a person's order; return why it is refused, empty if it is accepted."""

    async def serve_agent(self, socket: Socket) -> None:
        """Talk with one agent for as long as the link lasts."""


BuildController = Callable[[Settings, ControllerPorts], DstController]
