"""The next resume's conditions: states in doubt, steps to skip, and steps with a lowered learning rate."""

from holdfast.core.decide.distrusted_saved_states import DoubtfulStates
from holdfast.core.incident import incident_text
from holdfast.model.action import Launch, Say
from holdfast.model.code_release import Release
from holdfast.model.event import Progress
from holdfast.model.incident_record import Change, Record, Remedy, Verdict
from holdfast.model.job_and_seats import Seat
from holdfast.model.loss_response import Ease, Skip
from holdfast.model.state_copy import Doubt

_KEPT = 64  # skips, and eases


class ResumePoint:
    """States in doubt, steps to skip and steps with a lowered learning rate, as part of the job's state."""

    def __init__(self) -> None:
        self.doubts = DoubtfulStates()
        self.skips: tuple[Skip, ...] = ()
        self.eases: tuple[Ease, ...] = ()
        self.anew = 0  # restarts after which the script began at step 0

    def doubt_after(self, doubt: Doubt, progress: Progress | None) -> None:
        self.doubts.doubt_after(doubt, progress)

    def apply_verdict(self, verdict: Verdict, not_after: int | None) -> None:
        """Add the steps to skip and the steps with a lowered learning rate that the verdict asks for. They stay in
        force however often these steps are made again."""
        if verdict.remedy is Remedy.SKIP and not_after is not None:
            self.doubts.clear_after(not_after)
        self.skips = (*self.skips, *verdict.skips)[-_KEPT:]
        self.eases = (*self.eases, *verdict.eases)[-_KEPT:]

    def on_resumed(self, over: Record | Change) -> tuple[Say, ...]:
        """Return advice if a script starts from step 0 for the second time without a restore through holdfast."""
        self.anew += incident_text.is_fresh_start(over)
        return (
            (Say(text=incident_text.ADVICE),)
            if incident_text.is_fresh_start(over) and self.anew == 2 and not over.restored_at
            else ()
        )

    def on_training(self) -> None:
        self.doubts.on_training()

    def make_launch(
        self, id: int, generation: int, seats: tuple[Seat, ...], astray: tuple[str, ...], release: Release
    ) -> Launch:
        return Launch(
            id=id,
            generation=generation,
            seats=seats,
            doubts=self.doubts.all,
            not_after=self.doubts.not_after,
            verified=self.doubts.verified,
            astray=astray,
            release=release,
            skips=self.skips,
            eases=self.eases,
        )
