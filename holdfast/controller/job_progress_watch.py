"""Watches whether a job whose nodes respond makes progress, and finds the ranks that make the others wait."""

from collections.abc import Callable

from holdfast.config import Settings
from holdfast.controller.stack_tracing import StackTracing
from holdfast.core.decide.job_view import JobView
from holdfast.core.detect.coincidence import CoincidenceDetector
from holdfast.core.detect.hang import HangDetector
from holdfast.core.detect.hang_at_exit import ExitHangDetector
from holdfast.core.detect.slow import SlowDetector
from holdfast.core.detect.standstill import StandstillDetector
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.core.diagnose.stack_outline import keep_stacks
from holdfast.core.record.slow_time_meter import SlowTimeMeter
from holdfast.model.action import Launch
from holdfast.model.decider_events import Ended, SlowTime
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import world_size
from holdfast.model.job_phase import Phase
from holdfast.model.observation import Beat

_LOOK_S = 2.0  # for all nodes to look at their processes


class StallWatch:
    def __init__(
        self,
        settings: Settings,
        view: JobView,
        tracing: StackTracing,
        now: Callable[[], float],
    ) -> None:
        self.hang, self.ending = HangDetector(settings.hang), ExitHangDetector(settings.hang)
        self.standstill = StandstillDetector(self.hang)
        self.slow, self._slow_time = SlowDetector(settings.slow), SlowTimeMeter()
        self.coincidence = CoincidenceDetector(settings.slow, settings.health)
        self._view = view
        self._tracing = tracing
        self._now = now
        self._looking = False

    def on_launch(self, now: float, launch: Launch) -> None:
        self.hang.on_launch(now, launch.generation, tuple(seat.node for seat in launch.seats))
        self.slow.on_launch(now, launch.generation, (launch.release.number, world_size(launch.seats)))
        self.ending.on_launch(launch.generation)
        self.coincidence.on_launch(launch.generation, launch.seats)

    def on_beat(self, now: float, beat: Beat) -> Alarm | None:
        """Process a beat. Return an alarm if a rank is slow, or if a machine under strain makes the job slow."""
        self.hang.on_beat(now, beat)
        self.coincidence.on_beat(now, beat)
        alarm = self.slow.on_beat(now, beat, beat.arrivals)
        if not self.is_under_way() or self._view.some_ended:
            return None
        if alarm is not None and alarm.suspects:
            return self.coincidence.add_strains(now, alarm)
        if self.coincidence.has_strains:
            alarm = self.coincidence.check_pace(now, self.slow.find_lost_pace(now)) or alarm
        return alarm

    def measure_slow_time(self, now: float) -> SlowTime | None:
        """Return a report on the slowness of the job, if one is due. A job that stands still is not slow."""
        trains = self._view.phase is Phase.TRAINING and self.hang.stands_since(now) is None
        return self._slow_time.on_pace(now, self._view.generation, self.slow.find_lost_pace(now) if trains else None)

    def check_drivers(self, now: float) -> tuple[Alarm, ...]:
        """Return alarms about GPU drivers that do not answer while the job stands still."""
        if not self.coincidence.has_strains or not self.is_under_way() or self._view.some_ended:
            return ()
        return self.coincidence.check_standstill(now, self.hang.stands_since(now))

    def should_look(self, now: float) -> bool:
        """Return whether the job has stood still so long that the stacks of its ranks are needed."""
        return self.hang.should_look(now) and self.is_under_way() and not self._looking

    def is_under_way(self) -> bool:
        return self._view.phase in (Phase.STARTING, Phase.TRAINING)

    async def look_at_ranks(self) -> tuple[Alarm | Ended, ...]:
        """Take all ranks' stacks. Return alarms if ranks block others, and alarms or Ended if ranks hang at exit."""
        generation, seats = self._view.generation, self._view.seats
        self._looking = True
        try:
            there = tuple(seat.node for seat in seats if not self._view.has_ended(seat.node))
            traces = await self._tracing.take_traces(_LOOK_S, nodes=there)
        finally:
            self._looking = False
        if self._view.generation != generation or not self.is_under_way():
            return ()
        now, blocking = self._now(), find_blocking(traces, seats, self._view.mesh)
        alarm = self.hang.on_traces(now, traces, blocking)
        stands = self.standstill.on_traces(now, traces, blocking)
        over, found = self.ending.on_traces(now, traces, seats)
        # At the end ranks wait for each other, and nobody is named for that.
        named = tuple(one for one in (alarm or stands,) if one and not over and not self._view.some_ended)
        news = (*named, *found)
        return tuple(keep_stacks(one, traces, blocking.ranks) if isinstance(one, Alarm) else one for one in news)
