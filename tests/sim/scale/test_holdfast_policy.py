"""Our policy at scale: the decider does what it should about each kind of failure, and the clock is covered."""

from itertools import pairwise

import msgspec
import pytest

from holdfast.sim.scale import failure_mixes, price_sheet
from holdfast.sim.scale.failure_mixes import FailureMix, FailureMode, Shows, Why
from holdfast.sim.scale.failure_schedule import MECHANISMS, ScaleSetup
from holdfast.sim.scale.holdfast_policy import HoldfastPolicy
from holdfast.sim.scale.price_sheet import PriceSheet

SMALL = ScaleSetup(gpus=64 * 8, days=10.0, rate=0.02, seed=3)
SHEET = price_sheet.load_sheet()
SOON = price_sheet.scale_sheet(SHEET, {"relapse": 0.05})  # what is bad fails again before it was worth going on


def one(shows: Shows, why: Why, said: str = "") -> FailureMix:
    """Failures of one kind, with one cause behind them."""
    causes = {name: float(name == why) for name in ("machine", "passing", "outside")}
    code = float(why == "release")
    told = {"klass": "gpu_lost_bus", "read_s": 10.0, "source": "", "said": said}
    row = {"name": "it", "weight": 1, "shows": shows, "code": code, **told, **causes}
    fault = msgspec.convert(row, FailureMode)
    parts = failure_mixes.CodeFailures(passing=0.0, release=1.0, source="")
    return FailureMix(name="one", rate=0.02, rate_source="", fault=(fault,), code=parts)


def played(mix: FailureMix, sheet: PriceSheet = SHEET, **changes: object) -> HoldfastPolicy:
    world = HoldfastPolicy(msgspec.structs.replace(SMALL, **changes), mix, sheet)
    world.result = world.play_job()  # type: ignore[attr-defined]
    return world


def lost_s(world: HoldfastPolicy) -> float:
    """Seconds for each incident."""
    return sum(world.state.book.by_use(0.0).values()) / max(1, world.state.tally.incidents)


CUDA = "RuntimeError: CUDA error: an illegal memory access was encountered"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."


@pytest.mark.parametrize("shows", ["crash", "oom", "silence", "health", "hang", "slow", "loss"])
def test_a_bad_machine_leaves_however_it_shows(shows: Shows) -> None:
    world = played(one(shows, "machine", CUDA))
    assert world.state.tally.incidents > 5
    assert world.state.tally.evicted >= 0.5 * world.state.tally.incidents
    assert len(world.state.defects) <= 2, "what is bad still sits in the job only if it came a moment ago"
    assert all(a.end_at == b.start_at for a, b in pairwise(world.state.book.pieces))
    assert world.state.book.wall_s == pytest.approx(SMALL.end_at, abs=1.0)


@pytest.mark.parametrize("shows", ["crash", "oom", "loss"])
def test_what_passes_costs_no_machine_and_one_restart(shows: Shows) -> None:
    world = played(one(shows, "passing", "hdfs.util.HdfsError: Connection to namenode refused"))
    assert world.state.tally.evicted == 0 and world.state.tally.people == 0
    assert lost_s(world) < 180


def test_a_gpu_that_raised_costs_one_restart_whoever_was_to_blame() -> None:
    passing, machine = (played(one("crash", why, CUDA)) for why in ("passing", "machine"))
    assert passing.state.tally.people == passing.state.tally.waits == 0
    assert lost_s(passing) < 180
    assert machine.state.tally.evicted >= machine.state.tally.incidents - 2
    assert lost_s(machine) < 240, "but for those of the wrong node, and what examinations did not find"


def test_a_bad_release_is_rolled_back_or_mended_by_a_person() -> None:
    said = "ValueError: expected sequence of length 8192 at dim 1"
    world = played(one("crash", "release", said))
    assert world.state.tally.rolled_back > 0
    without = played(one("crash", "release", said), off=frozenset({"rollback"}))
    assert without.state.tally.people > world.state.tally.people
    assert lost_s(without) > lost_s(world)


def blast(name: str, nodes: int, share: float = 1.0) -> failure_mixes.BlastFailure:
    return failure_mixes.BlastFailure(name=name, nodes=nodes, share=share, source="")


def test_a_switch_takes_its_nodes_and_state_goes_back_to_peers() -> None:
    mix = msgspec.structs.replace(one("crash", "passing", CUDA), blast=(blast("switch", 4),))
    world = played(mix)
    assert world.state.tally.evicted == 4 * world.state.tally.faults["switch"]
    assert world.state.tally.restored["peer_state"] >= world.state.tally.faults["switch"] - 2
    half = played(msgspec.structs.replace(mix, blast=(blast("switch", 64),)), standbys=64)
    assert half.state.tally.restored["stored_state"] >= 1, "who lost everything goes back to storage"


def test_several_kinds_of_blast_take_as_many_nodes_as_each_has() -> None:
    kinds = (blast("switch", 8, 0.5), blast("rack", 2, 0.5))
    world = played(msgspec.structs.replace(one("crash", "passing", CUDA), blast=kinds))
    switches, racks = (world.state.tally.faults[kind.name] for kind in kinds)
    assert switches > 2 and racks > 2
    assert world.state.tally.evicted == 8 * switches + 2 * racks
    assert {"switch", "rack"} <= world.state.book.by_cause(0.0).keys()


@pytest.mark.parametrize(("standbys", "least", "most"), [(8, 6, 10), (5, 1.5, 3)])
def test_a_hang_of_several_nodes_costs_their_pipeline_where_it_can_be_replaced(
    standbys: int, least: float, most: float
) -> None:
    certain = {"hang_group": 1.0, "hang_unnamed": 0.0}
    shares = tuple(msgspec.structs.replace(s, value=certain.get(s.name, s.value)) for s in SHEET.share)
    setup = msgspec.structs.replace(SMALL, standbys=standbys)
    world = HoldfastPolicy(setup, one("hang", "machine"), msgspec.structs.replace(SHEET, share=shares))
    world.play_job()
    assert least <= world.state.tally.evicted / world.state.tally.incidents <= most
    assert world.state.tally.waits == 0, "who is not proved bad goes only if a standby can take its place"


@pytest.mark.parametrize("shows", ["silence", "health"])
def test_standbys_fail_while_they_wait_and_others_come(shows: Shows) -> None:
    world = played(one(shows, "machine"), standbys=64, days=5.0)  # as many as train, so as many failures
    assert 0.5 * world.state.tally.incidents < world.state.tally.standbys_lost < 2 * world.state.tally.incidents
    again = (
        world.state.tally.evicted - world.state.tally.incidents
    )  # of those that read as bad, whose probes found nothing
    assert again <= (2 if shows == "health" else 0), "a lost standby is no eviction, and nobody else goes for it"
    assert (
        len(world.state.view.pool) + len(world.state.view.coming) >= 62
        and not world.state.dead & world.state.view.pool.keys()
    )
    assert world.state.tally.waits == 0
    unseen = played(one("crash", "machine", CUDA), standbys=64, days=5.0)
    assert unseen.state.tally.standbys_lost == 0, "no code runs on them"


def test_the_same_seed_gives_the_same_result() -> None:
    mix = failure_mixes.load_mix("byterobust")
    first, second = (HoldfastPolicy(SMALL, mix, SHEET).play_job() for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


@pytest.mark.parametrize("mechanism", ["standbys", "snapshots", "zygote", "health", "hang"])
def test_what_is_switched_off_is_missed(mechanism: str) -> None:
    shows: dict[str, Shows] = {"health": "health", "hang": "hang", "standbys": "silence"}
    mix = one(shows.get(mechanism, "crash"), "machine", CUDA)
    assert mechanism in MECHANISMS
    whole, without = (
        sum(played(mix, off=off, seed=seed).result.ettr for seed in (3, 4))  # type: ignore[attr-defined]
        for off in (frozenset(), frozenset({mechanism}))
    )
    assert without < whole, "one more node evicted for nothing outweighs little in one run, not in two"


def test_a_job_that_gives_up_is_queued_again_by_a_person() -> None:
    full = one("crash", "machine", MEMORY)
    ended = played(full, SOON, off=frozenset({"ask"}))
    assert ended.state.tally.people > 0
    assert {"person", "requeue"} <= set(ended.state.book.by_use(0.0))
    asked = played(full, SOON)
    assert "ask" in asked.state.book.by_use(0.0) and "requeue" not in asked.state.book.by_use(0.0)
    goes_on = played(full)
    assert not {"ask", "hold", "person", "requeue"} & set(goes_on.state.book.by_use(0.0)), "better than to stand"


def test_code_that_changes_while_the_job_is_queued_comes_with_it() -> None:
    full = one("crash", "machine", MEMORY)
    changing = msgspec.structs.replace(full, updates_per_day=500.0)
    ended = played(changing, SOON, off=frozenset({"ask"}), days=3.0)
    assert "requeue" in ended.state.book.by_use(0.0) and ended.state.tally.updates > 500
