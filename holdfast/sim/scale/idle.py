"""Standbys that fail while they wait."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.alarm import Alarm
from holdfast.sim.scale import defects
from holdfast.sim.scale.beside import Places

if TYPE_CHECKING:
    from holdfast.sim.scale.ours import Ours
    from holdfast.sim.scale.weather import Strike


class Idle:
    def __init__(self, world: "Ours") -> None:
        self.world = world

    def strike(self, strike: "Strike") -> None:
        """One falls silent, or reads as bad: it is given back, and another one asked for."""
        world, fault = self.world, strike.fault
        waiting = sorted(world.decider.pool.keys() & world.nodes - world.dead)
        if not waiting or (fault.shows == "health" and "health" in world.setup.off):
            return
        node = waiting[int(strike.luck * len(waiting))]
        world.tally.standbys_lost += 1
        if fault.shows == "silence":
            world.dead.add(node)
        else:
            world.defects[node] = defects.draw(fault, world.rng)
        sign = world.signs.of(fault, Places(node=node, other=node), world.rng, None)
        world.later(sign.after_s, self._tell, sign.alarm)

    def _tell(self, alarm: Alarm) -> None:
        """Where it has been given a seat meanwhile, that is a failure like any other."""
        world = self.world
        if not world.nodes.isdisjoint(alarm.suspects):
            world.tell(msgspec.structs.replace(alarm, at=world.now, generation=world.decider.generation))
