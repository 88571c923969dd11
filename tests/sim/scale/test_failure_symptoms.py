"""What detectors make of a failure: how late, whom they name, and that one machine is seen alike every time."""

from random import Random

import pytest

from holdfast.core.incident.incident_case import CODE
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import UNNAMED, Kind
from holdfast.sim.scale import node_defects, price_sheet
from holdfast.sim.scale.failure_mixes import FailureMode, Shows
from holdfast.sim.scale.failure_symptoms import AlarmModel, AlarmSign
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.node_neighbours import FailurePlace
from holdfast.sim.scale.price_sheet import PriceDraws

SHEET, CATALOG = price_sheet.load_sheet(), catalog_files.load_failures()


def fault(shows: Shows, **more: object) -> FailureMode:
    return FailureMode(name="it", weight=1, shows=shows, machine=1, source="", **more)  # type: ignore[arg-type]


PLACES = FailurePlace(node="bad", other="other", group=("bad", "next", "third"), ranks=(0, 8))


def signs(
    what: FailureMode, lots: float = 0.5, count: int = 200, off: frozenset[str] = frozenset(), wide: float = 1.0
) -> list[AlarmSign]:
    rng = Random(5)
    seen = AlarmModel(PriceDraws(SHEET, 9600, rng), CATALOG, 10.0, off)
    ails = NodeDefect(fault=what, probe_lot=lots, hash_lot=lots, hang_lot=lots, wide_lot=wide)
    return [seen.draw_sign(what, PLACES, rng, ails) for _ in range(count)]


def test_a_link_has_to_be_down_twice() -> None:
    waits = [sign.after_s for sign in signs(fault("health", klass="ib_rdma_error", read_s=30.0, reads=2))]
    assert 30 <= min(waits) < 33 and 57 < max(waits) < 61


@pytest.mark.parametrize(
    ("lot", "seconds", "named"),
    [
        (0.1, 83, ("bad",)),  # its GPU stands, as it has for longer than a restart takes when it is named
        (0.2, 262, ()),
        (0.33, 600, ("other",)),  # it spins
        (0.4, 82, ("bad",)),  # it is stopped
        (0.6, 139, ("bad",)),  # it sleeps, until waiting has cost a restart: 57 s at this size
        (0.9, 262, ("bad",)),  # it may wait for something outside
    ],
)
def test_hangs_that_are_named_or_not_and_those_that_time_out(
    lot: float, seconds: float, named: tuple[str, ...]
) -> None:
    found = signs(fault("hang"), lot)
    assert all(abs(sign.after_s - seconds) < 5 for sign in found)
    assert {sign.alarm.suspects for sign in found} == {named}
    assert {sign.alarm.kind for sign in found} == {Kind.CRASH if named == ("other",) else Kind.HANG}
    assert all(sign.alarm.signature == UNNAMED for sign in found if not named)
    assert all(sign.after_s >= 600 for sign in signs(fault("hang"), lot, off=frozenset({"hang"})))


def test_only_code_makes_a_deadlock() -> None:
    rng = Random(5)
    seen = AlarmModel(PriceDraws(SHEET, 9600, rng), CATALOG, 10.0, frozenset())
    of_code = [seen.draw_sign(fault("hang"), PLACES, rng, None) for _ in range(2000)]
    endless = [sign for sign in of_code if sign.alarm.action == CODE]
    assert 0.7 * 0.2857 == pytest.approx(len(endless) / 2000, abs=0.02)
    assert all(82 < sign.after_s < 84 for sign in endless), "at the second look"
    lots = [number / 200 for number in range(200)]
    assert not [lot for lot in lots if signs(fault("hang"), lot, count=1)[0].alarm.action == CODE]


def test_without_snapshots_a_restart_costs_more_than_the_longest_wait() -> None:
    for lot, off in ((0.1, "snapshots"), (0.6, "snapshots")):
        assert all(260 < sign.after_s < 263 for sign in signs(fault("hang"), lot, off=frozenset({off})))


def test_hangs_of_several_nodes_name_their_pipeline() -> None:
    for lot in (0.1, 0.4, 0.6, 0.9):
        alarms = [sign.alarm for sign in signs(fault("hang"), lot, wide=0.4)]
        assert {(alarm.suspects, alarm.ranks) for alarm in alarms} == {(PLACES.group, PLACES.ranks)}
        alone = [sign.alarm for sign in signs(fault("hang"), lot, wide=0.6)]
        assert {(alarm.suspects, alarm.ranks) for alarm in alone} == {(("bad",), ())}
    nobody = signs(fault("hang"), 0.9, off=frozenset({"naming"}), wide=0.0)
    assert {(sign.alarm.suspects, sign.alarm.ranks) for sign in nobody} == {((), ())}


def test_corruption_is_seen_by_hashes_every_time_or_never() -> None:
    assert {sign.alarm.kind for sign in signs(fault("loss"), 0.6)} == {Kind.REPLICA}
    assert {sign.alarm.kind for sign in signs(fault("loss"), 0.8)} == {Kind.LOSS}
    assert {sign.alarm.kind for sign in signs(fault("loss"), 0.6, off=frozenset({"replica"}))} == {Kind.LOSS}


def test_a_crash_is_sometimes_blamed_on_another() -> None:
    said = "RuntimeError: CUDA error: an illegal memory access was encountered"
    wrong = sum(sign.alarm.suspects == ("other",) for sign in signs(fault("crash", said=said), count=2000))
    assert 0.02 < wrong / 2000 < 0.05


def test_lots_are_spread() -> None:
    drawn = [node_defects.draw_defect(fault("loss"), Random(seed)) for seed in range(300)]
    assert 0.6 < sum(one.hash_lot < 0.7 for one in drawn) / 300 < 0.8
    assert any(one.hash_lot < 0.7 <= one.probe_lot for one in drawn), "each has a lot of its own"


def test_a_generations_ways_are_learned_before_a_slow_host_is_acted_on() -> None:
    """With steps of 10 s a round takes 50, and 30 rounds are learned from; whoever leads half of these always does."""
    seen = AlarmModel(PriceDraws(SHEET, 9600, Random(5)), CATALOG, 10.0, frozenset())
    assert seen.slow_sign("bad", 0.0) is None and seen.slow_sign("bad", 700.0) is None
    for runs_s, after_s in ((800.0, 700 + 600), (1400.0, 250 + 600), (90000.0, 250 + 600)):
        sign = seen.slow_sign("bad", runs_s)
        assert sign is not None and sign.after_s == pytest.approx(after_s)
        assert (sign.alarm.kind, sign.alarm.suspects, sign.stalls) == (Kind.SLOW, ("bad",), False)
