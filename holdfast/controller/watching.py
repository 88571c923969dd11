"""Watches a job that answers: whether it stands, and who makes the others wait."""

from collections.abc import Callable, Coroutine

from holdfast.config import Settings
from holdfast.controller.tracing import Tracing
from holdfast.core.decider import Decider
from holdfast.core.detect.hang import Hang
from holdfast.core.detect.slow import Slow
from holdfast.core.diagnose.stacks import name
from holdfast.model.action import Launch
from holdfast.model.alarm import Alarm
from holdfast.model.event import Phase
from holdfast.model.signal import Beat
from holdfast.model.topology import Dims

_LOOK_S = 2.0  # for all nodes to look at their processes


class Watching:
    def __init__(self, settings: Settings, decider: Decider, tracing: Tracing, cry: Callable[[Alarm], None]) -> None:
        self.hang = Hang(settings.hang)
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

    def heard(self, now: float, beat: Beat) -> None:
        self.hang.heard(now, beat)
        alarm = self.slow.heard(now, beat, beat.arrivals)
        if alarm and self._is_under_way():
            self._cry(alarm)

    def tick(self, now: float) -> None:
        if self.hang.suspicious(now) and self._is_under_way() and not self._looking:
            self._looking = True
            self.spawn(self._look())

    def _is_under_way(self) -> bool:
        """At the end ranks may wait for each other as long as they like."""
        return self._decider.phase in (Phase.STARTING, Phase.TRAINING) and not self._decider.nodes.ended

    async def _look(self) -> None:
        generation, seats = self._decider.generation, self._decider.seats
        try:
            traces = await self._tracing.take(_LOOK_S, nodes=tuple(seat.node for seat in seats))
            if self._decider.generation != generation or not self._is_under_way():
                return
            alarm = self.hang.looked(self.now(), traces, name(traces, seats, self.mesh))
            if alarm:
                self._cry(alarm)
        finally:
            self._looking = False
