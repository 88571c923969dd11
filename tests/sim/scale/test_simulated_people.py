"""What people do: they find what the ladder cannot, in the time that was published for it, and nothing else."""

import msgspec
import pytest

from holdfast.model.job_phase import Phase
from holdfast.sim.scale import price_sheet
from holdfast.sim.scale.failure_mixes import FailureMix, FailureMode, Shows
from holdfast.sim.scale.failure_schedule import DAY_S, ScaleSetup
from holdfast.sim.scale.holdfast_policy import HoldfastPolicy
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.time_book import TRAIN

SHEET = price_sheet.load_sheet()
SETUP = ScaleSetup(gpus=32 * 8, days=1.0, rate=0.0, updates=False)


def world(shows: Shows) -> tuple[HoldfastPolicy, FailureMode]:
    """A job with one bad machine that nothing of ours can see."""
    fault = FailureMode(name="it", weight=1, shows=shows, machine=1, source="")
    ours = HoldfastPolicy(SETUP, FailureMix(name="one", rate=0.0, rate_source="", fault=(fault,)), SHEET)
    ours._left = [NodeDefect(fault=fault, probe_lot=1.0, hash_lot=1.0, hang_lot=0.2, wide_lot=0.0)]
    return ours, fault


def test_a_hang_that_nobody_names_is_found_after_an_hour_and_a_half_or_more() -> None:
    ours, _ = world("hang")
    ours.play_job()
    assert ours.state.defects == {} and ours.state.tally.evicted == 1 and ours.state.tally.people == 1
    gone_at = [piece for piece in ours.state.book.pieces if piece.use == TRAIN][-1].start_at  # it trains on without it
    assert 6300 < gone_at < 6300 + 3 * 600 + 2 * 900 + 400, "page and person after it has shown itself"


def test_whoever_looks_for_corruption_needs_the_job_to_stand() -> None:
    ours, _ = world("loss")
    ours.play_job()
    assert ours.state.tally.evicted == 1 and ours.state.defects == {}
    held_s = ours.state.book.by_use(0.0)["hold"]
    assert 7100 < held_s < 28900
    assert ours.state.view.phase is Phase.TRAINING
    assert ours.state.book.by_cause(0.0)["it"] > held_s


def test_a_person_mends_what_was_asked_about_and_nothing_else() -> None:
    ours, fault = world("crash")
    other = msgspec.structs.replace(fault, name="other")
    ours.state.defects = {"a": NodeDefect(fault=fault, probe_lot=1.0, hash_lot=1.0, hang_lot=0.0, wide_lot=0.0)}
    ours.state.defects["b"] = NodeDefect(fault=other, probe_lot=1.0, hash_lot=1.0, hang_lot=0.0, wide_lot=0.0)
    ours.state.away = (DAY_S, other)
    assert ours.people.mend_failure("it") == ["a"]
    assert ours.state.away[1] is other
    assert ours.people.mend_failure("other") == ["b"]
    assert ours.state.away[0] == 0.0


@pytest.mark.parametrize(("shows", "least_s", "most_s"), [("crash", 5400, 5400), ("loss", 7200, 28800)])
def test_how_long_a_person_takes(shows: Shows, least_s: float, most_s: float) -> None:
    ours, _ = world(shows)
    assert least_s <= ours.people.rest_s("it") <= most_s
    assert ours.state.tally.people == 1


def test_a_slow_machine_is_told_and_goes_when_a_person_says_so() -> None:
    fault = FailureMode(name="it", weight=1, shows="slow", machine=1, source="")
    mix = FailureMix(name="one", rate=0.02, rate_source="", fault=(fault,))
    setup = msgspec.structs.replace(SETUP, days=5.0, rate=0.02, seed=2)
    told = HoldfastPolicy(setup, mix, SHEET)
    told.play_job()
    assert told.state.tally.incidents - 2 <= told.state.tally.evicted <= told.state.tally.incidents
    assert told.state.book.by_use(0.0)["slow"] == pytest.approx(5400 * 0.2 * told.state.tally.incidents)
    unseen = HoldfastPolicy(msgspec.structs.replace(setup, off=frozenset({"slow"})), mix, SHEET)
    unseen.play_job()
    assert unseen.state.book.by_use(0.0)["slow"] > told.state.book.by_use(0.0)["slow"]


def test_a_slow_host_goes_when_it_has_cost_as_much_as_that() -> None:
    fault = FailureMode(name="it", weight=1, shows="slow", machine=1, host=True, source="")
    mix = FailureMix(name="one", rate=0.02, rate_source="", fault=(fault,))
    setup = msgspec.structs.replace(SETUP, days=5.0, rate=0.02, seed=2)
    acted, alone = (
        HoldfastPolicy(setup, mix, SHEET),
        HoldfastPolicy(msgspec.structs.replace(setup, standbys=0), mix, SHEET),
    )
    for world in (acted, alone):
        world.play_job()
    assert acted.state.tally.incidents == acted.state.tally.evicted > 2 and not acted.state.tally.people
    # Five rounds of 50 s to name it, and 600 s in which a fifth is lost.
    assert acted.state.book.by_use(0.0)["slow"] == pytest.approx(0.2 * (250 + 600) * acted.state.tally.incidents)
    assert alone.state.tally.people == alone.state.tally.incidents, "nobody can take its place, so a person has to come"
