"""Silence is noticed in time, once, and never because we ourselves were not looking."""

from holdfast.core.detect.silence import SilenceDetector, SilenceLimits, gone_alarm
from holdfast.core.incident.first_cause import with_word
from holdfast.model.detector_alarm import Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetState


def silence() -> SilenceDetector:
    return SilenceDetector(SilenceLimits(beat_s=1.0, silence_s=3.0))


def asked(watch: SilenceDetector, start: float, end: float) -> list[tuple[float, str]]:
    """Ask every quarter of a second, as the controller does."""
    found, now = [], start
    while now <= end:
        found += [(now, alarm.suspects[0]) for alarm in watch.overdue_alarms(now)]
        now += 0.25
    return found


def test_three_missed_beats_are_an_alarm() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    assert asked(watch, 10.0, 20.0) == [(13.0, "a")]


def test_the_alarm_is_dated_at_the_last_word() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    asked(watch, 10.0, 12.75)
    (alarm,) = watch.overdue_alarms(13.0)
    assert (alarm.kind, alarm.at, alarm.suspects) == (Kind.SILENCE, 10.0, ("a",))
    assert alarm.reason == "has been silent for 3 s"


def test_what_the_fleet_says_of_a_silent_node_is_added_once() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    asked(watch, 10.0, 12.75)
    (alarm,) = watch.overdue_alarms(13.0)
    joined = with_word(alarm, "Slurm gets no answer from c4.")
    assert joined.reason == "has been silent for 3 s (its fleet says: Slurm gets no answer from c4)"
    assert joined.evidence == ("Slurm gets no answer from c4",) and joined.signature == alarm.signature
    assert with_word(alarm, "") == alarm and with_word(joined, "more") == joined
    gone = gone_alarm(13.0, "a", FleetNode(state=FleetState.GONE, reason="job 7 has ended: node fail", failed=True))
    assert with_word(gone, "job 7 has ended: node fail") == gone


def test_who_speaks_is_not_silent() -> None:
    watch = silence()
    for second in range(10, 20):
        watch.on_message(second, "a")
        assert asked(watch, second, second + 0.75) == []


def test_each_is_named_once_until_it_speaks_again() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    assert len(asked(watch, 10.0, 30.0)) == 1
    watch.on_message(30.5, "a")
    assert asked(watch, 30.25, 40.0) == [(33.5, "a")]


def test_several_at_once_come_in_order() -> None:
    watch = silence()
    for node in "cab":
        watch.on_message(10.0, node)
    assert asked(watch, 10.0, 20.0) == [(13.0, "a"), (13.0, "b"), (13.0, "c")]


def test_who_is_forgotten_is_not_missed() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    watch.forget_node("a")
    watch.forget_node("never heard of")
    assert asked(watch, 10.0, 20.0) == []


def test_our_own_stall_is_nobodys_silence() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    assert asked(watch, 10.0, 11.0) == []
    assert watch.overdue_alarms(60.0) == ()  # we were away for 49 s; its beats may lie unread
    assert asked(watch, 60.25, 80.0) == [(62.0, "a")]  # two seconds of its three were left


def test_a_stall_does_not_excuse_what_was_heard_during_it() -> None:
    watch = silence()
    watch.on_message(10.0, "a")
    assert watch.overdue_alarms(10.0) == ()
    watch.on_message(59.0, "a")  # read just before we are asked again
    assert watch.overdue_alarms(60.0) == ()
    assert asked(watch, 60.25, 80.0) == [(63.0, "a")]  # at most from now on, not 50 s later


def test_a_node_expected_later_is_given_until_then() -> None:
    watch = silence()
    watch.on_message(15.0, "a")  # a restarted controller grants its nodes time to find it
    assert watch.overdue_alarms(10.0) == ()
    assert watch.overdue_alarms(12.0) == ()  # a stall does not shorten the grant
    assert asked(watch, 12.25, 30.0) == [(18.0, "a")]
