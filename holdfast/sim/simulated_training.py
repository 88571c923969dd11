"""Steps of a simulated job: they advance with the clock until a fault stalls them."""

from holdfast.model.observation import Beat

ALL = "job"  # in whose name all nodes beat at once


class SimTraining:
    def __init__(self, step_s: float, save_steps: int) -> None:
        self.step_s = step_s
        self.save_steps = save_steps
        self.saved = 0  # the newest step that a restart finds
        self.generation = 0
        self._first_step = 0
        self._first_at: float | None = None
        self._stalled_at: float | None = 0.0

    @property
    def stalled(self) -> bool:
        return self._stalled_at is not None

    def on_launch(self, generation: int) -> None:
        self.generation = generation
        self._first_step, self._first_at, self._stalled_at = self.saved + 1, None, None

    def first_step(self, now: float) -> None:
        self._first_at = now

    def stall_steps(self, now: float) -> None:
        """Stall training from now on; only steps up to the last save can be restored."""
        if self._stalled_at is None:
            self._stalled_at = now
            if beat := self.newest_beat(now):
                self.saved = max(self.saved, beat.step // self.save_steps * self.save_steps)

    def newest_beat(self, now: float) -> Beat | None:
        """Return a beat with the newest step made by now; None before the first step."""
        if self._first_at is None:
            return None
        until = now if self._stalled_at is None else self._stalled_at
        made = int((until - self._first_at) / self.step_s)
        return Beat(
            node=ALL,
            generation=self.generation,
            step=self._first_step + made,
            at=self._first_at + made * self.step_s,
            first_step=self._first_step,
            first_at=self._first_at,
            counted=False,
        )

    def left_s(self, now: float, step: int) -> float:
        """Return the seconds until this step is made, if no fault stalls training."""
        assert self._first_at is not None
        return self._first_at + (step - self._first_step) * self.step_s - now
