"""Alarms about slow ranks and bad losses that interrupted nothing: they were reported, and the job went on."""

from collections.abc import Sequence

import msgspec

from holdfast.core.detect.nonfinite_loss import BAD_LOSS
from holdfast.core.detect.slow import PresentSlowness
from holdfast.model.action import Say
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry

KEPT_NOTICES = 100  # about losses: a script may have a bad one at every step
_OVER_S = 600.0  # for so long it is told that the job was slow


class AlarmNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A report that some or all ranks are slow or have bad losses. Training went on while the report was made."""

    at: float  # when it was told
    generation: int
    ranks: tuple[int, ...]  # empty: nobody is named
    nodes: tuple[str, ...]
    text: str  # what was told then, and if nothing was done although it might have been, why


def describe_slow(told: Sequence[AlarmNotice], present: PresentSlowness, now: float) -> tuple[str, bool]:
    """Return in words what was told of slow ranks, and whether it still holds. Who is named stays so while the others
    wait for that node. What is over is told in the past, and after a while no more."""
    if not told:
        return "", False
    about = [one for one in told if present.node in one.nodes]
    longer = f"{present.unit} take {present.ratio:.1f} times as long as they did" if present.ratio else ""
    if about:
        text = f"{about[-1].text} (told {now - about[-1].at:.0f} s ago)"
        return "; ".join(filter(None, (text, longer))), True
    newest, named = told[-1], [one for one in told if one.ranks]
    if longer:
        last = f"; told {now - named[-1].at:.0f} s ago: {named[-1].text}" if named else ""
        return f"{longer}{last or f' (told {now - newest.at:.0f} s ago)'}", True
    ago_s = now - newest.at
    return (f"no longer; told {ago_s:.0f} s ago: {newest.text}" if ago_s <= _OVER_S else ""), False


class AlarmNotices:
    """Collects what was reported about slow ranks and bad losses."""

    def __init__(self) -> None:
        self.slow: list[AlarmNotice] = []
        self.losses: list[AlarmNotice] = []

    def add(self, entry: Entry) -> None:
        """Record the messages about an alarm on slow ranks or a bad loss, if the alarm did not stop the job."""
        event, decision = entry.event, entry.decision
        if not isinstance(event, Alarm) or decision.phase is not Phase.TRAINING:
            return
        told = [said.text for said in decision.actions if isinstance(said, Say)]
        if event.kind is Kind.SLOW:
            self.slow += [_make_notice(entry.at, event, text) for text in told]
        elif (event.kind is Kind.LOSS or event.klass == BAD_LOSS) and len(self.losses) < KEPT_NOTICES:
            self.losses += [_make_notice(entry.at, event, text) for text in told]


def _make_notice(at: float, alarm: Alarm, text: str) -> AlarmNotice:
    return AlarmNotice(at=at, generation=alarm.generation, ranks=alarm.ranks, nodes=alarm.suspects, text=text)
