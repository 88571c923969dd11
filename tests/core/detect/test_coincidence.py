"""Heat and silent drivers count against a machine only with what happens to the job at the same time."""

import pytest

from holdfast.core.detect.coincidence import CoincidenceDetector
from holdfast.core.detect.health import HealthLimits
from holdfast.core.detect.slow import LostPace, SlowLimits
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Beat, Strain, StrainKind

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(6))


def strain(*nodes: str, since: float, kind: StrainKind = StrainKind.SLOWS) -> Strain:
    text = "slows GPU 2 down for heat or power at 88 °C" if kind is StrainKind.SLOWS else "has not answered for 12 s"
    return Strain(kind=kind, sign="gpu.slowed GPU 2", nodes=nodes, since=since, text=text)


def detector(*strains: Strain, stance: Stance = Stance.ACT, heard_at: float = 1000.0) -> CoincidenceDetector:
    """One machine for each strain."""
    made = CoincidenceDetector(SlowLimits(cost_s=100.0), HealthLimits(stance=stance))
    made.on_launch(3, SEATS)
    for one in strains:
        made.on_beat(heard_at, Beat(node=one.nodes[0], generation=3, step=9, at=0.0, strains=(one,)))
    return made


def lost(since: float = 900.0, ratio: float = 1.31, named: str = "") -> LostPace:
    return LostPace(since=since, ratio=ratio, blur_s=20.0, named=named)


def act_at(made: CoincidenceDetector, pace: LostPace) -> Alarm | None:
    """What it says when the slowness has cost enough."""
    now = pace.since + 1.01 * 100.0 / (1 - 1 / pace.ratio)
    for node in ("n1", "n2", "n3", "n4"):
        if node in made._strains:
            made._strains[node] = now, made._strains[node][1]
    return made.check_pace(now, pace)


def test_the_hot_machine_is_told_and_then_acted_on() -> None:
    made = detector(strain("n3", since=895.0))
    told = made.check_pace(1000.0, lost())
    assert told is not None and (told.kind, told.stance, told.suspects) == (Kind.SLOW, Stance.NOTIFY, ("n3",))
    assert told.reason == (
        "slows GPU 2 down for heat or power at 88 °C, for 105 s; steps take 1.31 times as long since then"
    )
    assert made.check_pace(1001.0, lost()) is None, "it is told once"
    acted = act_at(made, lost())
    assert acted is not None and (acted.stance, acted.generation, acted.hard) == (Stance.ACT, 3, False)
    assert acted.reason.endswith(", which has cost 101 s")
    assert acted.signature == "strained slows [6]", "the seat, whichever node has it next"


def test_heat_without_lost_pace_is_nothing() -> None:
    assert detector(strain("n3", since=895.0)).check_pace(1000.0, None) is None


@pytest.mark.parametrize(("since", "coincides"), [(700.0, False), (830.0, True), (955.0, True), (970.0, False)])
def test_only_heat_of_the_same_time_counts(since: float, coincides: bool) -> None:
    """The pace is lost at 900, or up to 20 s before it shows."""
    assert (detector(strain("n3", since=since)).check_pace(1000.0, lost()) is not None) is coincides


def test_several_machines_at_once_are_a_matter_of_cooling() -> None:
    made = detector(strain("n3", since=895.0), strain("n4", since=905.0))
    for alarm in (
        made.check_pace(1000.0, lost()),
        act_at(detector(*[strain(f"n{i}", since=890.0) for i in (1, 2)]), lost()),
    ):
        assert alarm is not None and (alarm.suspects, alarm.stance) == ((), Stance.NOTIFY)
        assert "cooling" in alarm.reason
    assert act_at(made, lost()) is None


def test_only_those_that_became_hot_then_are_told_to_have() -> None:
    made = detector(strain("n1", since=100.0), strain("n3", since=895.0), strain("n4", since=905.0))
    alarm = made.check_pace(1000.0, lost())
    assert alarm is not None and alarm.reason.startswith(
        "n3, n4 slow down for heat or power at once, and steps take 1.31 times as long since then: cooling"
    )


def test_one_more_where_most_are_hot_already() -> None:
    hot = [strain(f"n{i}", since=100.0) for i in (1, 2, 4)]
    alarm = act_at(detector(*hot, strain("n3", since=895.0)), lost())
    assert alarm is not None and alarm.suspects == ()
    assert alarm.reason.startswith(
        "n1, n2, n3, n4 slow down for heat or power, and steps take 1.31 times as long: cooling"
    )


def test_one_that_has_always_been_hot_clears_nobody() -> None:
    alarm = act_at(detector(strain("n1", since=100.0), strain("n3", since=895.0)), lost())
    assert alarm is not None and (alarm.suspects, alarm.stance) == (("n3",), Stance.ACT)


def test_the_nodes_of_one_machine_are_one() -> None:
    alarm = act_at(detector(strain("n3", "n4", since=895.0)), lost())
    assert alarm is not None and alarm.suspects == ("n3", "n4")


def test_who_is_waited_for_counts_before_heat() -> None:
    assert detector(strain("n3", since=895.0)).check_pace(1000.0, lost(named="n1")) is None
    assert detector(strain("n3", since=895.0)).check_pace(1000.0, lost(named="n3")) is not None


def test_a_standby_makes_no_job_slow() -> None:
    assert detector(strain("n9", since=895.0)).check_pace(1000.0, lost()) is None


def test_what_is_over_or_out_of_date_does_not_count() -> None:
    made = detector(strain("n3", since=895.0))
    made.on_beat(999.0, Beat(node="n3", generation=3, step=9, at=0.0))
    assert made.check_pace(1000.0, lost()) is None and not made.has_strains
    assert detector(strain("n3", since=895.0), heard_at=960.0).check_pace(1000.0, lost()) is None


def test_shadow_mode() -> None:
    alarm = act_at(detector(strain("n3", since=895.0), stance=Stance.OBSERVE), lost())
    assert alarm is not None and alarm.stance is Stance.OBSERVE


# --- drivers -------------------------------------------------------------------------------------------------


def stuck(node: str, since: float = 988.0) -> Strain:
    return strain(node, since=since, kind=StrainKind.STANDS)


def test_a_silent_driver_of_a_job_that_stands_is_proof() -> None:
    made = detector(stuck("n3"))
    assert made.check_standstill(1000.0, None) == (), "the job makes steps"
    assert made.check_standstill(1000.0, 995.0) == (), "it has only just stopped"
    [alarm] = made.check_standstill(1000.0, 985.0)
    assert (alarm.kind, alarm.suspects, alarm.stance, alarm.hard) == (Kind.HEALTH, ("n3",), Stance.ACT, True)
    assert alarm.reason == "has not answered for 12 s, while the job has stood for 15 s"
    assert made.check_standstill(1001.0, 985.0) == ()


def test_a_driver_that_has_just_fallen_silent_has_time() -> None:
    assert detector(stuck("n3", since=995.0)).check_standstill(1000.0, 900.0) == ()


def test_two_drivers_of_many() -> None:
    found = detector(stuck("n3"), stuck("n4")).check_standstill(1000.0, 985.0)
    assert [(alarm.suspects, alarm.hard) for alarm in found] == [(("n3",), True), (("n4",), True)]


def test_the_drivers_of_half_the_nodes_name_nobody() -> None:
    [alarm] = detector(stuck("n1"), stuck("n2"), stuck("n3")).check_standstill(1000.0, 985.0)
    assert (alarm.suspects, alarm.stance, alarm.hard) == ((), Stance.NOTIFY, False)


def test_heat_explains_no_standstill() -> None:
    assert detector(strain("n3", since=895.0)).check_standstill(1000.0, 900.0) == ()
