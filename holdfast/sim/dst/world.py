"""Everything that one seed plays with, and the clock that moves it."""

import asyncio
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

from holdfast.core.detect.crash import Catalog
from holdfast.model.event import Order
from holdfast.sim.dst.agent import Agent
from holdfast.sim.dst.brain import Build
from holdfast.sim.dst.faults import Faults
from holdfast.sim.dst.fleet import Cloud
from holdfast.sim.dst.link import Link
from holdfast.sim.dst.loop import VirtualLoop
from holdfast.sim.dst.machine import Machine
from holdfast.sim.dst.office import Office
from holdfast.sim.dst.setup import Setup
from holdfast.sim.dst.teams import Storage, Teams
from holdfast.sim.dst.truth import Truth


class World:
    def __init__(self, setup: Setup, build: Build, catalog: Catalog, say: Callable[[str], None] | None) -> None:
        self.setup = setup
        self.catalog = catalog
        self.loop = VirtualLoop()
        self.rng = Random(setup.seed)
        self.machines: dict[str, Machine] = {}
        self.teams = Teams(self)
        self.storage = Storage()
        self.faults = Faults(self)
        self.cloud = Cloud(self)
        self.office = Office(self, build)
        self.truth = Truth(self, self.office.disk)
        self.over = False  # the job is
        self.failure = ""  # the first promise that was broken
        self._say = say
        self._closed = False
        self.loop.set_exception_handler(self._failed)

    def _failed(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        error = what.get("exception")
        where = traceback.extract_tb(error.__traceback__)[-1] if error else None
        self.fail(f"{what['message']}: {error!r} at {where}")

    def now(self) -> float:
        return self.loop.at

    def note(self, text: str) -> None:
        if self._say:
            self._say(f"{self.loop.at:9.3f} {text}")

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, call, *args)

    def fail(self, what: str) -> None:
        if not self.failure and not self._closed:
            self.failure = f"at {self.loop.at:.3f}: {what}"
            self.note(f"BROKEN: {what}")
            if self.loop.is_running():
                self.loop.stop()

    def run(self, until: float) -> None:
        """Until then, or until a promise is broken."""
        if not self.failure:
            end = self.loop.call_at(until, self.loop.stop)
            self.loop.run_forever()
            end.cancel()

    def dial(self, agent: Agent) -> Link | None:
        if agent.machine.cut or agent.machine.apart:
            return None
        link = Link(self.loop, self.rng, agent)
        return link if self.office.accept(link) else None

    def world_of(self, generation: int) -> int:
        return self.teams.all[generation].size

    def begin(self) -> None:
        """The controller, the machines of a fleet that brings none, and the faults."""
        self.office.start()
        if not self.setup.job.can_acquire:
            for _ in range(self.setup.machines):
                self.cloud.make()
        self.faults.begin()
        if self.setup.stop_s:
            self.later(self.setup.stop_s, self.office.order, Order(verb="stop", who="somebody"))

    def close(self) -> None:
        """Whatever still waits in this loop is ended with it."""
        self.over = self._closed = self.office.ended = True
        for machine in self.machines.values():
            if machine.agent:
                machine.agent.alive = False
        self.office.crash("with the simulation")
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        self.loop.close()
