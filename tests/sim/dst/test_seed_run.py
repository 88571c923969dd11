"""Seeds of the control plane: nothing unsafe while faults come, all well after them; and a seed is always the same."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import msgspec
import pytest
from _pytest.mark import ParameterSet

from holdfast.cli.commands.sim_dst import REAL_PARTS, repeat_command
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.logs import catalog_files
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.seed_run import SeedResult, play_seed
from tests.sim.dst.mutant import draw_grouped, draw_surviving, draw_with_disks

ROOT = Path(__file__).parents[3]

# Seeds that failed once, and what they found. The same number may play something else by now; they cost little.
FAILED_ONCE = {
    2: "a node that was being checked when its acquisition was heard of was expected once more, and given back",
    7: "a job on one node that is cut off trains on while its successor does",
    54: "the same as 7",
    95: "the same as 7",
    178: "the same as 7",
    32: "the same as 7, on two ranks",
    45: "the same as 7, in a later generation",
    58: "the same as 7, early on",
    228: "a node that lost its power twice amid a stop was told to launch what was being stopped, and did",
    481: "a controller that came back before the first step watched for hangs by a clock that was not the world's",
    60: "a launch that was under way when its node said hello left ranks of an old generation on a standby",
    64: "a machine that was started anew between two looks at it was believed to train for ever",
    41: "the end of a rank was told by a clock that nobody had set yet",
    49: "a clock that was set back dated an alarm an hour early",
    223: "a node that had been away brought a state of the line that was left into a later launch",
    261: "a controller that died amid a launch came back and told the other nodes to go on from another step",
    6991: "a node whose disk was full refused a launch, and handed over states of the line that was left by it",
    4965: "the same as 6991",
    9099: "an evicted node that was not gone yet held a step that the next generation had made anew",
    9529: "an agent killed amid leaving had ended its ranks, and its successor neither left nor told of their end",
    102: "a node that was back told late how its ranks had ended, was forgotten, and stood idle for ever",
    469: "a node whose old ranks did not die was neither taken back nor sent away",
}


def slowly(seeds: range | int) -> ParameterSet:
    return pytest.param(seeds, marks=pytest.mark.slow)


def searching(seeds: range | int) -> ParameterSet:
    return pytest.param(seeds, marks=[pytest.mark.slow, pytest.mark.search])


FORGETFUL = [range(5), slowly(range(5, 60)), *(searching(range(first, first + 20)) for first in range(60, 400, 20))]


PLAIN = [0, *map(slowly, range(10, 50, 10)), *map(searching, range(50, 200, 10))]
FLEETS = [0, *map(slowly, range(10, 50, 10)), *map(searching, range(50, 300, 10))]
SURVIVING = [0, *map(slowly, range(12, 60, 12)), *map(searching, range(60, 240, 12))]


@cache
def known() -> FailureCatalog:
    return catalog_files.load_failures()


def played(seed: int) -> SeedResult:
    result = play_seed(draw_setup(seed), REAL_PARTS, known())
    if result.failure:
        pytest.fail(f"seed {seed} is broken {result.failure}\nto see it: {repeat_command(seed)}", pytrace=False)
    return result


# Seeds that failed once with a journal that loses its end.
FORGOT_ONCE = {
    153: "standbys that the journal still had as such ran ranks of the generation that it had lost",
    767: "a standby that was linked first was launched on beside a node that trained on",
    1072: "a state of a line that was left was mixed into the next launch",
    1148: "an evicted node that was to report anew was taken for a seated one, and given back as late",
    85: "a last call that was over was asked for again and again while nothing could be launched",
    34: "a node that was back was known as lost",
}


def forgetful(seed: int) -> SeedResult:
    result = play_seed(msgspec.structs.replace(draw_setup(seed), forgets=True), REAL_PARTS, known())
    if result.failure:
        pytest.fail(f"seed {seed}, with a journal that loses its end, is broken {result.failure}", pytrace=False)
    return result


@pytest.mark.parametrize("seeds", [range(3), slowly(range(3, 16))])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_script_that_reports_its_parallel_groups(forgets: bool, seeds: range) -> None:
    """Each controller knows them from the journal; where the journal has lost them, they are reported anew."""
    for seed in seeds:
        setup = msgspec.structs.replace(draw_setup(seed), reports_mesh=True, forgets=forgets)
        assert play_seed(setup, REAL_PARTS, known()).failure == "", f"seed {seed}"
        setup = msgspec.structs.replace(draw_grouped(seed), forgets=forgets)
        assert play_seed(setup, REAL_PARTS, known()).failure == "", f"seed {seed} of four nodes and pipelines of two"


@pytest.mark.parametrize("seeds", FORGETFUL)
def test_a_journal_that_loses_its_end(seeds: range) -> None:
    """Entries that were acknowledged are gone, again and again: no two generations train, and all heals."""
    results = [forgetful(seed) for seed in seeds]
    assert sum(result.lives for result in results) > len(seeds)
    assert sum(result.steps for result in results) > 5 * len(seeds)


@pytest.mark.parametrize("seeds", [range(4), slowly(range(4, 24))])
@pytest.mark.parametrize("forgets", [False, True])
def test_seeds_with_states_on_disks(forgets: bool, seeds: range) -> None:
    for seed in seeds:
        setup = msgspec.structs.replace(draw_with_disks(seed), forgets=forgets)
        assert play_seed(setup, REAL_PARTS, known()).failure == "", f"seed {seed}"


@pytest.mark.parametrize("seeds", [range(4), slowly(range(4, 60))])
def test_seeds_that_lose_links(seeds: range) -> None:
    """Of seats and of standbys, while nodes are drained: no job gives up that has enough nodes, and all heals."""
    for seed in seeds:
        setup = msgspec.structs.replace(draw_setup(seed), loses_links=True)
        assert play_seed(setup, REAL_PARTS, known()).failure == "", f"seed {seed}"


@pytest.mark.parametrize("first", FLEETS)
def test_seeds_of_a_fleet_that_tells_of_its_nodes(first: int) -> None:
    """Nodes wait in queues for longer than others may take, are ended at once, or are taken away with notice."""
    struck: Counter[str] = Counter()
    for seed in range(first, first + 10):
        setup = draw_setup(seed)
        setup = msgspec.structs.replace(
            setup, surveys=True, forgets=seed % 3 == 0, job=msgspec.structs.replace(setup.job, can_acquire=True)
        )
        result = play_seed(setup, REAL_PARTS, known())
        assert result.failure == "", f"seed {seed}"
        struck.update(result.struck)
    assert struck["end_queued"] and struck["preempt"]


@pytest.mark.parametrize("first", SURVIVING)
def test_seeds_of_ranks_that_survive(first: int) -> None:
    """They leave a stopped generation, most of them in time, and go on in the next: no two train, and all heals."""
    for seed in range(first, first + 12):
        assert play_seed(draw_surviving(seed), REAL_PARTS, known()).failure == "", f"seed {seed}"


def test_ranks_of_a_generation_that_the_journal_has_lost_do_not_survive() -> None:
    """They may run another release than the one that the journal still knows."""
    assert play_seed(draw_surviving(573), REAL_PARTS, known()).failure == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", FORGOT_ONCE)
def test_seeds_that_failed_once_with_such_a_journal(seed: int) -> None:
    forgetful(seed)


@pytest.mark.parametrize("first", PLAIN)
def test_seeds(first: int) -> None:
    results = [played(seed) for seed in range(first, first + 10)]
    assert sum(result.steps for result in results) > 100
    assert sum(sum(result.struck.values()) for result in results) > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_seeds_that_failed_once(seed: int) -> None:
    played(seed)


@pytest.mark.slow
def test_the_seeds_reach_all_there_is() -> None:
    """Or the rest would test nothing: controllers that come back, generations, jobs of every sort and their ends."""
    results = [played(seed) for seed in range(200, 230)]
    assert sum(result.lives > 1 for result in results) > 8
    assert sum(result.generations > 2 for result in results) > 10
    assert sum(bool(result.ended) for result in results) > 1
    assert len({kind for result in results for kind in result.struck}) > 10


@pytest.mark.slow
def test_a_seed_is_the_same_in_every_process() -> None:
    told = [_told(hash_seed) for hash_seed in ("1", "2")]
    assert told[0] == told[1] != ""


def _told(hash_seed: str) -> str:
    words = [sys.executable, "-m", "holdfast.cli", "sim", "dst", "--seed", "12", "--verbose"]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) > 50
    return "\n".join(lines[:-1])  # the last says how long it took
