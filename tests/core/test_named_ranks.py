"""Whose cells the page marks: ranks of the newest launch that alarms name, until they are launched anew."""

import msgspec

from holdfast.core.incident.first_cause import ECHOES
from holdfast.core.record.named_ranks import NamedRanks, RankNaming
from holdfast.model.action import Launch
from holdfast.model.decider_events import Event, Progress, Tick
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry

HANG = Alarm(
    kind=Kind.HANG, at=5.0, suspects=("n0",), ranks=(2, 3), generation=1, reason="they keep the others waiting"
)
SEATS = (Seat(node="n0", group_rank=0, first_rank=0, nproc=8),)


def named(*events: Event | Launch, phase: Phase = Phase.TRAINING) -> tuple[RankNaming, ...]:
    fold = NamedRanks()
    for seq, event in enumerate((Launch(id=1, generation=1, seats=SEATS), *events), 1):
        actions = (event,) if isinstance(event, Launch) else ()
        heard = Tick() if isinstance(event, Launch) else event
        fold.add(Entry(seq=seq, at=float(seq), event=heard, decision=Decision(phase=phase, actions=actions)))
    return fold.namings


def step(generation: int = 1) -> Progress:
    return Progress(generation=generation, step=9, at=8.0, first_step=1, first_at=1.0, counted=False)


def like(**changes: object) -> Alarm:
    return msgspec.structs.replace(HANG, **changes)


def test_ranks_that_an_alarm_names_are_told_with_its_reason() -> None:
    assert named(HANG) == (RankNaming((2, 3), "hang", 5.0, HANG.reason),)
    crash = like(kind=Kind.CRASH, ranks=(3,), reason="it was killed")
    assert named(HANG, crash) == (
        RankNaming((2,), "hang", 5.0, HANG.reason),
        RankNaming((3,), "crash", 5.0, "it was killed"),
    )


def test_nobody_is_marked_for_an_echo_or_a_note_or_another_launch() -> None:
    assert named(like(klass=next(iter(ECHOES)))) == ()
    assert named(like(stance=Stance.OBSERVE)) == ()
    assert named(like(generation=7)) == ()
    assert named(like(stance=Stance.NOTIFY)) != ()


def test_a_mark_ends_with_the_next_launch_and_that_of_a_hang_with_the_next_step() -> None:
    slow = like(kind=Kind.SLOW, ranks=(5,))
    assert named(HANG, slow, Launch(id=2, generation=2, seats=SEATS)) == ()
    assert [one.kind for one in named(HANG, slow, step())] == ["slow"]
    assert len(named(HANG, step(), phase=Phase.STOPPING)) == 1, "a late step of ranks that end"
    assert len(named(HANG, step(generation=9))) == 1
