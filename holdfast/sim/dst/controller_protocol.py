"""What a simulated world needs of a controller; whoever starts a simulation brings the real one along."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.config import Settings
from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import Ledger
from holdfast.model.event import Entry, Order
from holdfast.model.topology import Job
from holdfast.ports import Fleet, Journal, Notes, Socket, Store


class ControllerCrashed(BaseException):
    """The controller's process is no more: whatever ran in it ends here."""


class ControllerParts(msgspec.Struct, frozen=True, kw_only=True):
    """The world that one life of a controller sees."""

    journal: Journal
    settings: Settings
    fleet: Fleet
    store: Store
    notes: Notes
    clock: Callable[[float], Callable[[], float]]  # one that does not tell less than this
    on_entry: Callable[[Entry], None]


class DstController(Protocol):
    """One life of a controller."""

    decider: Decider
    ledger: Ledger

    async def run(self, job: Job) -> int: ...

    def give_order(self, order: Order) -> str:
        """A person's word; why it is not taken, if it is not."""

    async def serve_agent(self, socket: Socket) -> None:
        """Talk with one agent for as long as the link lasts."""


BuildController = Callable[[ControllerParts], DstController]
