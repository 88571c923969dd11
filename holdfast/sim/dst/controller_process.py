"""The controller's process in the simulation: it can be killed at any point, and is restarted after a while."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

from holdfast.controller_interfaces import ControllerPorts
from holdfast.core.decide.job_view import JobView
from holdfast.model.decider_events import Order
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.dst.controller_disk import DiskJournal, DiskNotes, EmptyBlockList, SimDisk
from holdfast.sim.dst.real_program_protocols import BuildController, ControllerCrashed, DstController
from holdfast.sim.dst.seed_scene import SeedScene
from holdfast.sim.dst.simulated_fleet import MachinePool, SimFleet, SimStore
from holdfast.sim.dst.simulated_link import ControllerEnd, SimLink
from holdfast.sim.dst.truth_checks import TruthChecks
from holdfast.sim.dst.virtual_loop import describe_error

_FORGETS = 0.5
_NO_FILES = Path("/nonexistent")  # nobody asks for archives of releases


class ControllerLife:
    """One process of the controller. Code that still runs after the process has died has no effect."""

    def __init__(self, office: "ControllerProcess") -> None:
        self.office = office
        self.dead = False
        self.links: list[SimLink] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.brain: DstController = office.build(
            office.scene.setup.settings,
            ControllerPorts(
                journal=DiskJournal(office.disk, self.strike_point),
                fleet=SimFleet(office.cloud, self.strike_point),
                store=SimStore(),
                notes=DiskNotes(office.disk, self.strike_point),
                checkpoints=None,
                archives=_NO_FILES,
                blocked=EmptyBlockList(),
                probe_history=None,
                make_clock=office.make_clock,
                say=lambda text: None,  # nobody reads it
                on_entry=self._on_entry,
                on_replayed=lambda entry, view: None,  # the world has seen it
            ),
        )

    def strike_point(self, point: str) -> None:
        """Raise ControllerCrashed if this process is dead or dies now; called just before it changes the world."""
        if self.dead:
            raise ControllerCrashed
        if self.office.armed == point:
            self.office.crash_controller(f"at '{point}'")
            raise ControllerCrashed

    def _on_entry(self, entry: Entry, view: JobView) -> None:
        scene = self.office.scene
        scene.log_line(f"{entry.seq} {type(entry.event).__name__} -> {entry.decision.phase}: {entry.decision.reason}")
        for action in entry.decision.actions:
            scene.log_line(f"    {action}")
        self.office.truth.on_entry(entry, view)


class ControllerProcess:
    def __init__(
        self, scene: SeedScene, build: BuildController, disk: SimDisk, truth: TruthChecks, cloud: MachinePool
    ) -> None:
        self.scene = scene
        self.build = build
        self.disk = disk
        self.truth = truth
        self.cloud = cloud
        self.life: ControllerLife | None = None
        self.armed = ""  # where it will die
        self.lives = 0
        self.ended = False
        self._chance = Random(f"loss {scene.setup.seed}")  # of its own: seeds without it are played as before

    @property
    def brain(self) -> DstController | None:
        return self.life.brain if self.life else None

    def make_clock(self, not_before: float) -> Callable[[], float]:
        loop, first = self.scene.loop, max(self.scene.loop.time(), not_before)
        began_at = loop.time()
        return lambda: first + loop.time() - began_at

    def start(self) -> None:
        if self.life or self.ended or self.scene.over:
            return
        self.lives += 1
        if self.scene.setup.forgets and self.disk.entries and self._chance.random() < _FORGETS:
            kept = self._chance.randrange(len(self.disk.entries))
            self.scene.log_line(f"the journal has lost its entries after {kept}, of {len(self.disk.entries)}")
            self.disk.lose_entries(kept)
        self.truth.on_restart()
        self.life = ControllerLife(self)
        self.scene.log_line(f"the controller starts, for the {self.lives}. time")
        self._spawn_task(self.life, self._run_life(self.life))

    def _spawn_task(self, life: ControllerLife, work: Coroutine[None, None, None]) -> None:
        life.tasks.append(self.scene.loop.create_task(work))

    async def _run_life(self, life: ControllerLife) -> None:
        try:
            await life.brain.run(self.scene.setup.job)
        except BaseException as e:
            if not life.dead:
                self.scene.report_failure(f"the controller fails: {describe_error(e)}")
            return
        if not life.dead:
            self.ended = True
            self.scene.log_line("the controller has ended")
            self.crash_controller("for good")

    def accept_link(self, link: SimLink) -> bool:
        """Accept an agent's link. Return False if no controller is ready to serve the agent."""
        life = self.life
        if life is None or life.brain.view.phase is Phase.NEW:
            return False
        life.links.append(link)
        self._spawn_task(life, self._serve_link(life, ControllerEnd(link, life.strike_point)))
        return True

    async def _serve_link(self, life: ControllerLife, end: ControllerEnd) -> None:
        try:
            await life.brain.serve_agent(end)
        except BaseException as e:
            if not life.dead:
                self.scene.report_failure(f"the controller fails at a link: {describe_error(e)}")

    def is_fenced(self, node: str) -> bool:
        """Return whether launches must wait because old ranks may still live on this node."""
        return self.brain is not None and node in self.brain.view.fenced

    def give_order(self, order: Order) -> None:
        """Pass a person's order to the controller, as the API does; dropped if no controller runs."""
        if self.life and self.life.brain.view.phase is not Phase.NEW:
            with contextlib.suppress(ControllerCrashed):
                refused = self.life.brain.give_order(order)
                self.scene.log_line(f"{order.who} orders {order.verb} {order.node}: {refused or 'taken'}")

    def crash_controller(self, how: str) -> None:
        """Kill the controller: its memory is lost and its links to agents break. It is restarted later."""
        life, self.life, self.armed = self.life, None, ""
        if life is None:
            return
        self.scene.log_line(f"the controller is gone, {how}")
        life.dead = True
        for link in life.links:
            link.break_link(self.scene.rng.uniform(0.0, 1.0), 0.0)
        for task in life.tasks:
            task.cancel()
        if not self.ended:
            self.scene.call_later(self.scene.rng.choice((0.3, 1.0, 3.0, 8.0)), self.start)
