"""What others do: their data has sources, and it costs what it says."""

import msgspec
import pytest

from holdfast.sim.scale import failure_mixes, price_sheet, published_policy
from holdfast.sim.scale.failure_mixes import FailureMix, FailureMode
from holdfast.sim.scale.failure_schedule import ScaleSetup
from holdfast.sim.scale.published_policy import PolicyRun

SHEET = price_sheet.load_sheet()
SETUP = ScaleSetup(gpus=9600, days=90.0, seed=2)


@pytest.mark.parametrize("name", published_policy.KNOWN)
def test_every_figure_has_its_source(name: str) -> None:
    found = published_policy.load_policy(name)
    assert found.save_source and found.restart_source
    assert {sees.shows for sees in found.sees} == {"crash", "oom", "silence", "health", "hang", "slow", "loss"}
    assert all(sees.source for sees in found.sees)


def test_one_kind_of_failure_costs_what_the_data_says() -> None:
    fault = FailureMode(name="it", weight=1, shows="crash", passing=1, source="")
    mix = FailureMix(name="one", rate=0.0012, rate_source="", fault=(fault,))
    played = PolicyRun(
        published_policy.load_policy("megatron"), msgspec.structs.replace(SETUP, updates=False), mix, SHEET
    )
    played.play_job()
    uses, incidents = played.book.by_use(0.0), played.tally.incidents
    assert uses["detect"] == pytest.approx(60 * incidents)
    assert 120 * incidents < uses["diagnose"] < 900 * incidents
    assert uses["launch"] / incidents == pytest.approx(
        price_sheet.read_curve(((8192, 635.0), (16384, 768.0)), 9600), rel=0.01
    )
    assert uses["redo"] / incidents == pytest.approx(900, rel=0.25), "half of the interval between checkpoints"


def test_whom_nobody_names_costs_more_rounds_and_a_person() -> None:
    fault = FailureMode(name="it", weight=1, shows="crash", machine=1, source="")
    mix = FailureMix(name="one", rate=0.0012, rate_source="", fault=(fault,))
    named, unnamed = (
        PolicyRun(published_policy.load_policy(name), SETUP, mix, SHEET) for name in ("megatron", "torchrun")
    )
    assert named.play_job().ettr > unnamed.play_job().ettr
    assert named.tally.people == 0 and unnamed.tally.people >= unnamed.tally.incidents - 1, (
        "the last may be cut off by the end"
    )


def test_standbys_run_short_and_are_made_up_for() -> None:
    fault = FailureMode(name="it", weight=1, shows="hang", machine=1, source="")
    mix = FailureMix(name="one", rate=0.0012, rate_source="", fault=(fault,))
    few = PolicyRun(published_policy.load_policy("byterobust"), msgspec.structs.replace(SETUP, standbys=5), mix, SHEET)
    few.play_job()
    assert few.tally.waits == few.tally.incidents, "a group of 8 is more than 5 standbys"
    many = PolicyRun(
        published_policy.load_policy("byterobust"), msgspec.structs.replace(SETUP, standbys=20), mix, SHEET
    )
    many.play_job()
    assert many.tally.waits < few.tally.waits / 10


def test_policies_meet_the_same_failures() -> None:
    mix = failure_mixes.load_mix("llama3")
    setup = msgspec.structs.replace(SETUP, days=20.0)
    found = [
        PolicyRun(published_policy.load_policy(name), setup, mix, SHEET).play_job() for name in published_policy.KNOWN
    ]
    assert len({tuple(sorted(one.tally.faults.items())) for one in found}) == 1


def test_what_passes_while_the_job_stands_costs_nothing() -> None:
    fault = FailureMode(name="it", weight=1, shows="hang", passing=1, source="")
    mix = FailureMix(name="one", rate=0.0012, rate_source="", fault=(fault,))
    calm = msgspec.structs.replace(SETUP, updates=False)
    played = PolicyRun(published_policy.load_policy("megatron"), calm, mix, SHEET)
    played.play_job()
    stood = PolicyRun(published_policy.load_policy("megatron"), msgspec.structs.replace(calm, rate=0.05), mix, SHEET)
    stood.play_job()
    assert played.tally.people >= 0.8 * played.tally.incidents
    assert stood.tally.people < 0.5 * stood.tally.incidents, "most came while it stood"


def test_a_job_that_is_slow_for_minutes_is_not_restarted_an_hour_later() -> None:
    fault = FailureMode(name="it", weight=1, shows="slow", passing=1, source="")
    mix = FailureMix(name="one", rate=0.0012, rate_source="", fault=(fault,))
    late = PolicyRun(
        published_policy.load_policy("megatron"), msgspec.structs.replace(SETUP, updates=False), mix, SHEET
    )
    late.play_job()
    assert set(late.book.by_use(0.0)) == {"slow"}
    assert late.book.by_use(0.0)["slow"] < 0.2 * 900 * late.tally.incidents
    soon = PolicyRun(
        published_policy.load_policy("byterobust"), msgspec.structs.replace(SETUP, updates=False), mix, SHEET
    )
    soon.play_job()
    assert "launch" in soon.book.by_use(0.0), "who sees it within a minute does act"


def test_copies_to_peers_cost_everybody_who_makes_them() -> None:
    mix = FailureMix(
        name="none",
        rate=0.0,
        rate_source="",
        fault=(FailureMode(name="it", weight=1, shows="hang", passing=1, source=""),),
    )
    calm = msgspec.structs.replace(SETUP, updates=False, days=1.0)
    ettrs = {
        name: PolicyRun(published_policy.load_policy(name), calm, mix, SHEET).play_job().ettr
        for name in published_policy.KNOWN
    }
    assert ettrs["byterobust"] == pytest.approx(1 - 0.003 - 0.0025)
    assert ettrs["megatron"] == pytest.approx(1 - 10 / 1800)


@pytest.mark.parametrize(("gpus", "more_s"), [(9600, 0.0), (131072, 41.5)])
def test_what_was_published_as_mean_and_most_is_that(gpus: int, more_s: float) -> None:
    byterobust = published_policy.load_policy("byterobust")
    for sees in byterobust.sees:
        assert sees.mend_s is not None
        fault = FailureMode(name="it", weight=1, shows=sees.shows, passing=1, source="")
        mix = FailureMix(name="one", rate=0.003 * 9600 / gpus, rate_source="", fault=(fault,))
        setup = ScaleSetup(gpus=gpus, days=900.0, seed=2, updates=False)
        if sees.shows == "slow":
            continue  # what passes may be over before it is seen
        played = PolicyRun(byterobust, setup, mix, SHEET)
        played.play_job()
        took = [piece.seconds for piece in played.book.pieces if piece.use == "launch"]
        assert max(took) <= sees.most_s + more_s + 0.1
        assert sum(took) / len(took) == pytest.approx(sees.mend_s + more_s, rel=0.05)
