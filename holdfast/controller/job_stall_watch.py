"""Watches whether a responding job makes progress, and finds the ranks that make the others wait."""

from collections.abc import Callable, Coroutine

from holdfast.config import Settings
from holdfast.controller.stack_tracing import StackTracing
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.hang import HangDetector
from holdfast.core.detect.hang_at_exit import ExitHangDetector
from holdfast.core.detect.slow import SlowDetector
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.model.action import Launch
from holdfast.model.alarm import Alarm
from holdfast.model.event import Ended, Phase
from holdfast.model.job_seats import Dims
from holdfast.model.signal import Beat

_LOOK_S = 2.0  # for all nodes to look at their processes


class StallWatch:
    def __init__(
        self, settings: Settings, view: JobView, tracing: StackTracing, cry: Callable[[Alarm | Ended], None]
    ) -> None:
        self.hang, self.ending = HangDetector(settings.hang), ExitHangDetector(settings.hang)
        self.slow = SlowDetector(settings.slow)
        self.spawn: Callable[[Coroutine[None, None, None]], None] = lambda work: work.close()
        self.now: Callable[[], float] = lambda: 0.0
        self.mesh: Dims = ()
        self._view = view
        self._tracing = tracing
        self._cry = cry
        self._looking = False

    def on_launch(self, now: float, launch: Launch) -> None:
        self.hang.on_launch(now, launch.generation, tuple(seat.node for seat in launch.seats))
        self.slow.on_launch(now, launch.generation)
        self.ending.on_launch(launch.generation)

    def on_beat(self, now: float, beat: Beat) -> None:
        self.hang.on_beat(now, beat)
        alarm = self.slow.on_beat(now, beat, beat.arrivals)
        if alarm and self._is_under_way() and not self._view.some_ended:
            self._cry(alarm)

    def tick(self, now: float) -> None:
        if self.hang.should_look(now) and self._is_under_way() and not self._looking:
            self._looking = True
            self.spawn(self._look_at_ranks())

    def _is_under_way(self) -> bool:
        return self._view.phase in (Phase.STARTING, Phase.TRAINING)

    async def _look_at_ranks(self) -> None:
        generation, seats = self._view.generation, self._view.seats
        try:
            there = tuple(seat.node for seat in seats if not self._view.has_ended(seat.node))
            traces = await self._tracing.take_traces(_LOOK_S, nodes=there)
            if self._view.generation != generation or not self._is_under_way():
                return
            alarm = self.hang.on_traces(self.now(), traces, find_blocking(traces, seats, self.mesh))
            over, found = self.ending.on_traces(self.now(), traces, seats)
            # At the end ranks wait for each other, and nobody is named for that.
            named = (alarm,) if alarm and not over and not self._view.some_ended else ()
            for news in (*named, *found):
                if self._is_under_way():
                    self._cry(news)
        finally:
            self._looking = False
