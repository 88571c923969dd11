"""Cuts the account's spans: at the last good step before a stop, and at the time when a stall began."""

from collections.abc import Sequence

import msgspec

from holdfast.core.record.job_account import Span, TimeUse
from holdfast.model.decider_events import Event, Progress
from holdfast.model.detector_alarm import NO_STEP, Alarm, Kind
from holdfast.model.incident_record import Record
from holdfast.model.job_phase import Phase

USES = {
    Phase.WAITING: TimeUse.WAIT,
    Phase.LAUNCHING: TimeUse.LAUNCH,
    Phase.STARTING: TimeUse.START_UP,  # imports, groups, state and first step: the ranks' own business
    Phase.TRAINING: TimeUse.TRAIN,
    Phase.STOPPING: TimeUse.STOP,
    Phase.PROBING: TimeUse.PROBE,
    Phase.PAUSING: TimeUse.PAUSE,
    Phase.HELD: TimeUse.HOLD,
    Phase.ENDING: TimeUse.STOP,
}
TRAINED = (TimeUse.TRAIN, TimeUse.REDO, TimeUse.END)  # uses of the training phase
ALONE = (TimeUse.UNWATCHED, TimeUse.UNKNOWN)  # uses of time without a controller


class OpenStandstill:
    """When and where the job stopped making steps. The next step of any generation clears both."""

    def __init__(self) -> None:
        self.since: float | None = None  # None: it does not, as far as anybody has told
        self.place = ""  # where ranks are, or were when the job last stood, in words

    def add(self, event: Event, generation: int) -> None:
        """Note a stall that begins or ends with this event; `generation` is the one that trains."""
        match event:
            case Alarm(kind=Kind.HANG, generation=of) if of == generation and (
                event.suspects or event.signature == NO_STEP
            ):
                self.since, self.place = event.at, event.reason.partition(": ")[2]
            case Progress(at=at) if self.since is not None and at > self.since:
                self.since = None

    def split_newest(self, spans: list[Span]) -> list[Span]:
        """Return the spans with the open stall booked: the end of the last training span becomes a stall."""
        if self.since is None or spans[-1].use not in (TimeUse.TRAIN, TimeUse.REDO):
            return spans
        *before, last = spans
        trained = last.clip_end(self.since)
        stall = msgspec.structs.replace(last, use=TimeUse.STALL, start_at=trained.end_at, place=self.place)
        return [*before, *(part for part in (trained, stall) if part.seconds)]


def find_first_cut(spans: Sequence[Span], index: int, good_at: float) -> int:
    """Return the index of the span to cut, which contains the last good step at `good_at`. The search begins at `index`
    and goes back over times without a controller, because a rank may have failed in such a time."""
    while index and spans[index].start_at > good_at:
        before, use = spans[index - 1].use, spans[index].use
        if before not in ALONE and not (use in ALONE and before in TRAINED):
            break
        index -= 1
    return index


def split_end(span: Span, at: float) -> list[Span]:
    """Split a job's last training span at `at`, the time of its newest step. The time after that counts as the job's
    end."""
    trained = span.clip_end(at)
    ended = Span(use=TimeUse.END, start_at=trained.end_at, end_at=span.end_at)
    return [part for part in (trained, ended) if part.seconds]


def book_stall(spans: Sequence[Span], record: Record, place: str) -> list[Span]:
    """Return the spans after turning the end of one training span into a stall at `place`, which ran into the incident
    and belongs to it. The stall begins with the last good step, or with the span if that is later."""
    found: list[Span] = []
    for span in spans:
        if span.end_at == record.good_at and span.use in (TimeUse.TRAIN, TimeUse.REDO) and span.seconds:
            trained = span.clip_end(record.stepped_at)
            stall = Span(
                use=TimeUse.STALL,
                start_at=trained.end_at,
                end_at=span.end_at,
                incident=record.number,
                place=place,
            )
            found += [part for part in (trained, stall) if part.seconds]
        else:
            found.append(span)
    return found
