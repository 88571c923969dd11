"""Watches a job that answers: whether it stands, and who makes the others wait."""

from collections.abc import Callable, Coroutine

from holdfast.config import Settings
from holdfast.controller.tracing import Tracing
from holdfast.core.decider import Decider
from holdfast.core.detect.ending import Ending
from holdfast.core.detect.hang import Hang
from holdfast.core.detect.slow import Slow
from holdfast.core.diagnose.stacks import name
from holdfast.model.action import Launch
from holdfast.model.alarm import Alarm
from holdfast.model.event import Ended, Phase
from holdfast.model.signal import Beat
from holdfast.model.topology import Dims

_LOOK_S = 2.0  # for all nodes to look at their processes


class Watching:
    def __init__(
        self, settings: Settings, decider: Decider, tracing: Tracing, cry: Callable[[Alarm | Ended], None]
    ) -> None:
        self.hang, self.ending = Hang(settings.hang), Ending(settings.hang)
        self.slow = Slow(settings.slow)
        self.spawn: Callable[[Coroutine[None, None, None]], None] = lambda work: work.close()
        self.now: Callable[[], float] = lambda: 0.0
        self.mesh: Dims = ()
        self._decider = decider
        self._tracing = tracing
        self._cry = cry
        self._looking = False

    def launched(self, now: float, launch: Launch) -> None:
        self.hang.launched(now, launch.generation, tuple(seat.node for seat in launch.seats))
        self.slow.launched(now, launch.generation)
        self.ending.launched(launch.generation)

    def heard(self, now: float, beat: Beat) -> None:
        self.hang.heard(now, beat)
        alarm = self.slow.heard(now, beat, beat.arrivals)
        if alarm and self._is_under_way() and not self._decider.nodes.ended:
            self._cry(alarm)

    def tick(self, now: float) -> None:
        if self.hang.suspicious(now) and self._is_under_way() and not self._looking:
            self._looking = True
            self.spawn(self._look())

    def _is_under_way(self) -> bool:
        return self._decider.phase in (Phase.STARTING, Phase.TRAINING)

    async def _look(self) -> None:
        generation, seats = self._decider.generation, self._decider.seats
        try:
            there = tuple(seat.node for seat in seats if seat.node not in self._decider.nodes.ended)
            traces = await self._tracing.take(_LOOK_S, nodes=there)
            if self._decider.generation != generation or not self._is_under_way():
                return
            alarm = self.hang.looked(self.now(), traces, name(traces, seats, self.mesh))
            over, found = self.ending.looked(self.now(), traces, seats)
            # At the end ranks wait for each other, and nobody is named for that.
            named = (alarm,) if alarm and not over and not self._decider.nodes.ended else ()
            for news in (*named, *found):
                if self._is_under_way():
                    self._cry(news)
        finally:
            self._looking = False
