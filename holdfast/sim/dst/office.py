"""The controller's process: it is started, killed at any point, and started again by its front."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING

from holdfast.model.event import Entry, Order, Phase
from holdfast.sim.dst.brain import Brain, Build, Crashed, Parts
from holdfast.sim.dst.disk import Disk, DiskJournal, DiskNotes
from holdfast.sim.dst.fleet import SimFleet, SimStore
from holdfast.sim.dst.link import Link

if TYPE_CHECKING:
    from holdfast.sim.dst.world import World


_FORGETS = 0.5


class Life:
    """One process; once it is dead nothing that still runs of it has an effect."""

    def __init__(self, office: "Office") -> None:
        self.office = office
        self.dead = False
        self.links: list[Link] = []
        world = office.world
        self.tasks: list[asyncio.Task[None]] = []
        self.brain: Brain = office.build(
            Parts(
                journal=DiskJournal(office.disk, self.strike),
                settings=world.setup.settings,
                fleet=SimFleet(world, self.strike),
                store=SimStore(),
                notes=DiskNotes(office.disk, self.strike),
                clock=office.clock,
                on_entry=self._entry,
            )
        )

    def strike(self, point: str) -> None:
        """Somebody in this process is about to change the world: the last moment to die before that."""
        if self.dead:
            raise Crashed
        if self.office.armed == point:
            self.office.crash(f"at '{point}'")
            raise Crashed

    def _entry(self, entry: Entry) -> None:
        world = self.office.world
        world.note(f"{entry.seq} {type(entry.event).__name__} -> {entry.decision.phase}: {entry.decision.reason}")
        for action in entry.decision.actions:
            world.note(f"    {action}")
        world.truth.entry(entry, self.brain.decider)


class Office:
    def __init__(self, world: "World", build: Build) -> None:
        self.world = world
        self.build = build
        self.disk = Disk()
        self.life: Life | None = None
        self.armed = ""  # where it will die
        self.lives = 0
        self.ended = False
        self._chance = Random(f"loss {world.setup.seed}")  # of its own: seeds without it are played as before

    @property
    def brain(self) -> Brain | None:
        return self.life.brain if self.life else None

    def clock(self, not_before: float) -> Callable[[], float]:
        loop, first = self.world.loop, max(self.world.loop.time(), not_before)
        began_at = loop.time()
        return lambda: first + loop.time() - began_at

    def start(self) -> None:
        if self.life or self.ended or self.world.over:
            return
        self.lives += 1
        if self.world.setup.forgets and self.disk.entries and self._chance.random() < _FORGETS:
            kept = self._chance.randrange(len(self.disk.entries))
            self.world.note(f"the journal has lost its entries after {kept}, of {len(self.disk.entries)}")
            self.disk.forget(kept)
        self.world.truth.restarts()
        self.life = Life(self)
        self.world.note(f"the controller starts, for the {self.lives}. time")
        self._spawn(self.life, self._run(self.life))

    def _spawn(self, life: Life, work: Coroutine[None, None, None]) -> None:
        life.tasks.append(self.world.loop.create_task(work))

    async def _run(self, life: Life) -> None:
        try:
            await life.brain.run(self.world.setup.job)
        except BaseException as e:
            if not life.dead:
                self.world.fail(f"the controller fails: {_words(e)}")
            return
        if not life.dead:
            self.ended = True
            self.world.note("the controller has ended")
            self.crash("for good")

    def accept(self, link: Link) -> bool:
        """An agent dials."""
        life = self.life
        if life is None or life.brain.decider.phase is Phase.NEW:
            return False
        link.strike = life.strike
        life.links.append(link)
        self._spawn(life, self._attend(life, link))
        return True

    async def _attend(self, life: Life, link: Link) -> None:
        try:
            await life.brain.attend(link)
        except BaseException as e:
            if not life.dead:
                self.world.fail(f"the controller fails at a link: {_words(e)}")

    def fences(self, node: str) -> bool:
        """Whether nothing is launched since this node's ranks may live."""
        return self.brain is not None and node in self.brain.decider.fence.nodes

    def order(self, order: Order) -> None:
        """A person's word, through the API."""
        if self.life and self.life.brain.decider.phase is not Phase.NEW:
            with contextlib.suppress(Crashed):
                refused = self.life.brain.order(order)
                self.world.note(f"{order.who} orders {order.verb} {order.node}: {refused or 'taken'}")

    def crash(self, how: str) -> None:
        """Killed. Nothing in memory is left, and agents notice as their links break."""
        life, self.life, self.armed = self.life, None, ""
        if life is None:
            return
        self.world.note(f"the controller is gone, {how}")
        life.dead = True
        for link in life.links:
            link.kill(self.world.rng.uniform(0.0, 1.0), 0.0)
        for task in life.tasks:
            task.cancel()
        if not self.ended:
            self.world.later(self.world.rng.choice((0.3, 1.0, 3.0, 8.0)), self.start)


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_words(e) for e in error.exceptions)
    return f"{type(error).__name__}: {error}"
