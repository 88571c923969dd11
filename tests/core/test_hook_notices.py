"""What is worth a notice, and how many of them pass."""

import msgspec
import pytest

from holdfast.core.record.hook_notices import (
    HookNotice,
    HookNotices,
    JobStanding,
    NoticePacer,
    NoticeTopic,
    format_slack,
)
from holdfast.model.action import Finish
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Event, Order, Outcome, Tick
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.model.stored_checkpoint_report import MissedCheckpoint, StorageReport

RECORD = Record(
    number=3, generation=1, cause="x", kind="crash", klass="", verdict=Verdict(remedy=Remedy.RESTART, reason="x"),
    good_step=1, good_at=1.0, alarm_at=1.0, stopped_at=1.0, launched_at=1.0, resumed_at=2.0, resumed_from=1,
    sentence="rank 0 on n0 failed; restarted in place",
)  # fmt: skip
GAVE_UP = msgspec.structs.replace(RECORD, verdict=Verdict(remedy=Remedy.GIVE_UP, reason="x", code=93))
FINISH = Finish(id=9, code=93, grace_s=0.0, reason="rank 0 on n0 failed; nothing helps")


def entry(seq: int = 1, event: Event | None = None, **decided: object) -> Entry:
    decision = msgspec.structs.replace(Decision(phase=Phase.TRAINING), **decided)
    return Entry(seq=seq, at=float(seq), event=event or Tick(), decision=decision)


def topics(found: tuple[HookNotice, ...]) -> list[NoticeTopic]:
    return [notice.topic for notice in found]


def test_an_incident_is_told_when_it_is_over() -> None:
    [notice] = HookNotices("r").on_entry(entry(7, closed=RECORD), JobStanding())
    assert (notice.topic, notice.text, notice.seq, notice.run_id) == (NoticeTopic.INCIDENT, RECORD.sentence, 7, "r")
    assert notice.incident == RECORD


def test_a_job_that_is_slower_is_told() -> None:
    alarm = Alarm(kind=Kind.SLOW, at=1.0, suspects=(), reason="steps take 2.0 times as long as they did")
    told = msgspec.structs.replace(alarm, stance=Stance.NOTIFY)
    [notice] = HookNotices().on_entry(entry(event=told), JobStanding())
    assert (notice.topic, notice.text) == (NoticeTopic.SLOW, alarm.reason)
    watched = msgspec.structs.replace(alarm, stance=Stance.OBSERVE)
    assert HookNotices().on_entry(entry(event=watched), JobStanding()) == ()
    assert HookNotices().on_entry(entry(event=alarm), JobStanding()) == (), "the incident that it opens is told"


def test_most_entries_are_no_news() -> None:
    assert HookNotices().on_entry(entry(), JobStanding()) == ()


def test_giving_up_and_being_stopped() -> None:
    [notice] = HookNotices().on_entry(entry(actions=(FINISH,), closed=GAVE_UP), JobStanding())
    assert (notice.topic, notice.code, notice.incident) == (NoticeTopic.GAVE_UP, 93, GAVE_UP)
    assert notice.text == "ended with code 93: rank 0 on n0 failed; nothing helps"
    order = Order(verb="stop", who="me", code=143)
    stopped = entry(event=order, actions=(msgspec.structs.replace(FINISH, code=143),), closed=GAVE_UP)
    assert topics(HookNotices().on_entry(stopped, JobStanding())) == [NoticeTopic.ENDED]
    well = entry(actions=(msgspec.structs.replace(FINISH, code=0),))
    assert topics(HookNotices().on_entry(well, JobStanding())) == [NoticeTopic.ENDED]


def test_a_final_state_that_is_not_on_storage_is_told_after_a_good_end() -> None:
    missed = StorageReport(step=5, at=1.0, missed=MissedCheckpoint(step=9, why="step 9 was not written"))
    over = entry(2, event=Outcome(action=9, ok=True, storage=missed), phase=Phase.DONE)
    found = []
    for code in (0, 143):
        notices = HookNotices()
        notices.on_entry(entry(actions=(msgspec.structs.replace(FINISH, code=code),)), JobStanding())
        found.append([(notice.topic, notice.code) for notice in notices.on_entry(over, JobStanding())])
    assert found == [[(NoticeTopic.GAVE_UP, 94)], []]


def test_a_question_is_told_once() -> None:
    notices, asking = HookNotices(), JobStanding(asking="may n1 go?", until=50.0)
    [notice] = notices.on_entry(entry(1), asking)
    assert (notice.topic, notice.text, notice.until) == (NoticeTopic.ASKING, "may n1 go?", 50.0)
    assert notices.on_entry(entry(2), asking) == ()
    assert notices.on_entry(entry(3), JobStanding()) == ()
    assert topics(notices.on_entry(entry(4), asking)) == [NoticeTopic.ASKING]


def test_the_owner_of_a_release_hears_what_became_of_it() -> None:
    notices, known = HookNotices(), {1: Release(number=1), 2: Release(number=2, who="ann")}
    fates = {1: Fate.REPLACED, 2: Fate.RUNNING}
    assert notices.on_entry(entry(1), JobStanding(fates=fates, known=known)) == ()
    fallen = JobStanding(fates=fates | {2: Fate.ROLLED_BACK}, known=known, told={2: "TypeError at train.py:3"})
    [notice] = notices.on_entry(entry(2), fallen)
    assert (notice.topic, notice.owner, notice.release) == (NoticeTopic.ROLLED_BACK, "ann", known[2])
    assert notice.text == "release 2 of ann was rolled back: TypeError at train.py:3"
    assert notices.on_entry(entry(3), fallen) == ()
    refused = JobStanding(fates={**fallen.fates, 3: Fate.REFUSED}, known=known, told={3: "a.py does not compile"})
    assert [n.text for n in notices.on_entry(entry(4), refused)] == ["release 3 was refused: a.py does not compile"]


def notice(seq: int, topic: NoticeTopic = NoticeTopic.INCIDENT) -> HookNotice:
    return HookNotice(topic=topic, text=f"text {seq}", seq=seq, at=0.0, run_id="r")


def test_the_first_passes_and_the_rest_ride_on_the_next() -> None:
    pacer = NoticePacer(30.0)
    assert (pacer.wait_s(0.0), pacer.next_notice(0.0)) == (None, None)
    pacer.add_notice(notice(1))
    assert pacer.next_notice(100.0) == notice(1)
    for seq in (2, 3, 4):
        pacer.add_notice(notice(seq, NoticeTopic.ASKING if seq == 3 else NoticeTopic.INCIDENT))
    assert (pacer.wait_s(110.0), pacer.next_notice(110.0), pacer.newest_seq) == (20.0, None, 4)
    told = pacer.next_notice(130.0)
    assert told and (told.text, told.more, told.others) == ("text 3", 2, ("text 2", "text 4"))
    assert (pacer.wait_s(131.0), pacer.newest_seq) == (None, 0)


@pytest.mark.parametrize("topic", [NoticeTopic.ENDED, NoticeTopic.GAVE_UP])
def test_the_end_waits_for_nobody(topic: NoticeTopic) -> None:
    pacer = NoticePacer(1e9)
    pacer.add_notice(notice(1))
    pacer.next_notice(0.0)
    pacer.add_notice(notice(2))
    assert pacer.next_notice(1.0) is None
    pacer.add_notice(notice(3, topic))
    told = pacer.next_notice(1.0)
    assert told and (told.topic, told.more) == (topic, 1)


def test_a_flood_is_bounded_and_counted_and_hides_nothing_urgent() -> None:
    pacer = NoticePacer(10.0)
    pacer.add_notice(notice(0))
    pacer.next_notice(0.0)
    pacer.add_notice(notice(1, NoticeTopic.ASKING))
    for seq in range(2, 1000):
        pacer.add_notice(notice(seq))
    told = pacer.next_notice(10.0)
    assert told and (told.topic, told.more, len(told.others)) == (NoticeTopic.ASKING, 998, 16)
    assert format_slack(told).splitlines()[0] == "holdfast r: text 1"
    assert format_slack(told).endswith("and 982 more")
    assert format_slack(notice(5)) == "holdfast r: text 5"
    hostile = msgspec.structs.replace(notice(5), text="raised <!channel> & <http://evil.test/|holdfast>")
    assert format_slack(hostile) == "holdfast r: raised &lt;!channel&gt; &amp; &lt;http://evil.test/|holdfast&gt;"
    hostile = msgspec.structs.replace(notice(5), text="raised @ALL, @channel and @here at a@hereby.test")
    assert format_slack(hostile) == "holdfast r: raised @\u200bALL, @\u200bchannel and @\u200bhere at a@hereby.test"
