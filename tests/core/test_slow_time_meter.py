"""What slowness costs while a job trains on."""

from holdfast.core.detect.slow import LostPace
from holdfast.core.record.slow_time_meter import SlowTimeMeter
from holdfast.model.decider_events import SlowTime


def twice_as_long(since: float, ratio: float = 2.0, node: str = "") -> LostPace:
    return LostPace(since=since, ratio=ratio, blur_s=0.0, named=node)


def test_one_slowness_is_told_as_it_begins_every_ten_seconds_and_as_it_ends() -> None:
    meter = SlowTimeMeter()
    assert meter.on_pace(90.0, 1, None) is None
    told = meter.on_pace(130.0, 1, twice_as_long(100.0))
    assert told == SlowTime(generation=1, since=100.0, until=130.0, cost_s=15.0) and told.ratio == 2.0
    assert meter.on_pace(135.0, 1, twice_as_long(100.0)) is None
    told = meter.on_pace(140.0, 1, twice_as_long(100.0, 4.0, "b"))
    assert told == SlowTime(generation=1, since=100.0, until=140.0, cost_s=15.0 + 2.5 + 3.75, node="b")
    assert meter.on_pace(144.0, 1, twice_as_long(100.0)) is None
    told = meter.on_pace(145.0, 1, None)
    assert told and (told.until, told.cost_s, told.node) == (144.0, 23.25, "b"), "up to when it was slow"
    assert meter.on_pace(150.0, 1, None) is None, "once"


def test_a_slowness_ends_with_its_generation() -> None:
    meter = SlowTimeMeter()
    meter.on_pace(130.0, 1, twice_as_long(100.0))
    meter.on_pace(132.0, 1, twice_as_long(100.0))
    told = meter.on_pace(140.0, 2, twice_as_long(139.0))
    assert told and (told.generation, told.until) == (1, 132.0)
    told = meter.on_pace(141.0, 2, twice_as_long(139.0))
    assert told == SlowTime(generation=2, since=139.0, until=141.0, cost_s=1.0)
    assert meter.on_pace(142.0, 2, None) is None, "all of it has been told"
