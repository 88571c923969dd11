"""Elastic pipelines: a rank fails at a point of a step, and the others go on with the state in their processes."""

import json
import signal
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from holdfast.client.elastic.layer_files import LayerFiles
from tests.cli.conftest import Start
from tests.cli.driver import Job, run_command
from tests.cli.elastic_job import POINTS, STRUCK, TRAIN, losses, made_steps, recoveries, strike_at, struck, train_alone
from tests.cli.rungs import CALM, QUICK, lose, node_of, reaches, said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
slow = pytest.mark.slow

Calm = tuple[set[str], dict[int, float]]  # the digest of its state, and its losses
TWO = ("--nnodes", "2", "--nproc-per-node", "2")


# A rank that is stopped by SIGSTOP is named soon; nobody is lost because the machine is busy.
HANGS = ("--set", "silence.silence_s=40", "--set", "hang.least_s=1", "--set", "slow.stance=observe")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
POLICIES = (
    "replace", "reroute", "retemplate", "stochastic wiring", "memory rollback", "disk rollback", "drop", "hybrid",
    "redundant layers",
)  # fmt: skip
NEEDS: dict[str, dict[str, object]] = {"disk rollback": {"store_every": 3}, "redundant layers": {"shadows": True}}


def matrix() -> Iterator[ParameterSet]:
    """Every policy at every point, by each signal in turn; the other signal there is for a longer run."""
    for (row, policy), (column, point), (sign, how) in product(*map(enumerate, (POLICIES, POINTS, SIGNALS))):
        yield pytest.param(policy, point, how, marks=[pytest.mark.search] if (row + column + sign) % 2 else [])


def digests(job: Job) -> set[str]:
    return {words[0] for words in said(job, "digest")}


@pytest.fixture(scope="module")
def calm(start_shared: Start) -> Calm:
    job = start_shared(*TWO, *CALM, script=TRAIN, name="calm")
    job.ends(0)
    return digests(job), losses(job.folder)


def test_a_killed_rank_is_replaced(start: Start, calm: Calm) -> None:
    strikes = strike_at((2, 1, STRUCK, "backward", signal.SIGKILL))
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strikes)
    job.ends(0)
    assert struck(job) == {"2-1": "backward"}
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    assert (digests(job), losses(job.folder)) == calm
    job.check_replay()


@slow
@pytest.mark.parametrize(("policy", "point", "how"), [*matrix()])
def test_every_policy_at_every_point(start: Start, calm: Calm, policy: str, how: str, point: str) -> None:
    asked = {"policies": [policy], **NEEDS.get(policy, {})}
    strikes = strike_at((1, 1, STRUCK, point, SIGNALS[how]))
    flags = CALM if how == "kill" else HANGS
    job = start(*TWO, *flags, script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=json.dumps(asked))
    job.ends(0)
    assert struck(job) == {"1-1": point}
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert (digests(job), losses(job.folder)) == calm
    [recovery] = recoveries(job)
    committed = STRUCK if point in ("apply", "keep") else STRUCK - 1
    step = STRUCK - 2 if "rollback" in policy else committed
    assert recovery == {"policy": policy, "step": step, "again": committed - step, "workers": 4}


@slow
def test_it_goes_on_without_a_node_and_grows_back(start: Start, calm: Calm) -> None:
    flags = ("--nnodes", "4", "--min-nodes", "3", *QUICK, "--set", "recovery.last_call_s=4")
    job = start(*flags, script=TRAIN, HOLDFAST_GATES="[3,6]")
    reaches(job, 2)
    lose(job, node_of(job, 3))
    job.until(lambda: job.status()["generation"] == 2, "the next generation")
    (job.folder / "go-3").touch()
    reaches(job, 5, generation=2)
    reaches(job, 5, generation=3)
    (job.folder / "go-6").touch()
    job.ends(0)
    assert (digests(job), losses(job.folder)) == calm
    first, second = recoveries(job)
    assert (first["workers"], first["step"], first["again"]) == (3, 2, 0)
    assert (second["workers"], second["step"], second["again"]) == (4, 5, 0)


KILL = signal.SIGKILL
# Ranks that strike themselves, each with generation, step and point; what is done then, and the steps made again.
MORE = {
    "both replicas of a stage": (
        [(1, 1, STRUCK, "backward", KILL), (3, 1, STRUCK, "backward", KILL)],
        [("memory rollback", 1)],
    ),
    "three of four in two incidents": (
        [(1, 1, STRUCK, "sums", KILL), (3, 1, STRUCK, "sums", KILL), (0, 2, STRUCK + 1, "vote", KILL)],
        [("memory rollback", 1), ("replace", 0)],
    ),
    "a new rank before it is there": ([(2, 1, STRUCK, "vote", KILL), (2, 2, 0, "start", KILL)], [("replace", 0)]),
    "a new rank as it gets its layers": ([(2, 1, STRUCK, "vote", KILL), (2, 2, 0, "move", KILL)], [("replace", 0)]),
    "the source of its layers": ([(3, 1, STRUCK, "vote", KILL), (1, 2, 0, "move", KILL)], [("memory rollback", 1)]),
    "a survivor as all meet": ([(3, 1, STRUCK, "vote", KILL), (0, 2, 0, "agree", KILL)], [("replace", 0)]),
}


@slow
@pytest.mark.parametrize("case", MORE)
def test_more_than_one_failure(start: Start, calm: Calm, case: str) -> None:
    strikes, done = MORE[case]
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strike_at(*strikes))
    job.ends(0)
    assert struck(job) == {f"{rank}-{generation}": point for rank, generation, _, point, _ in strikes}
    assert (digests(job), losses(job.folder)) == calm
    assert [(one["policy"], one["again"]) for one in recoveries(job)] == done


@slow
def test_shadows_take_the_place_of_a_whole_stage(start: Start, calm: Calm) -> None:
    strikes = strike_at((1, 1, STRUCK, "backward", KILL), (3, 1, STRUCK, "backward", KILL))
    asked = json.dumps({"shadows": True, "policies": ["redundant layers"]})
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=asked)
    job.ends(0)
    assert len(struck(job)) == 2
    assert (digests(job), losses(job.folder)) == calm
    assert [(one["policy"], one["again"]) for one in recoveries(job)] == [("redundant layers", 0)]


@slow
def test_others_go_on_before_a_new_rank_has_its_layers(start: Start, tmp_path: Path) -> None:
    strikes = strike_at((1, 1, STRUCK, "backward", KILL))
    asked = json.dumps({"policies": ["hybrid"]})
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=asked, HOLDFAST_STEPS="60")
    job.ends(0)
    assert struck(job) == {"1-1": "backward"}
    assert [(one["policy"], one["again"]) for one in recoveries(job)] == [("hybrid", 0)]
    assert sorted(said(job, "holds")) == [["0", "1", "2"]] * 2 + [["3", "4", "5"]] * 2, "at the end"
    assert digests(job) == {train_alone(tmp_path, HOLDFAST_STEPS="60")}


@slow
def test_a_job_that_has_lost_all_ranks_begins_again_from_files(start: Start, calm: Calm) -> None:
    strikes = strike_at(*((rank, 1, STRUCK, "sums", KILL) for rank in range(4)))
    asked = json.dumps({"store_every": 2})
    job = start(*TWO, *CALM, script=TRAIN, HOLDFAST_STRIKES=strikes, HOLDFAST_JOB=asked)
    job.ends(0)
    assert len(struck(job)) >= 3, "a rank may hear of another's end before it gets that far"
    assert (digests(job), losses(job.folder)) == calm
    assert [step for step, _, generation in made_steps(job.folder) if generation > 1] == [5, 6, 7, 8]


@slow
def test_a_node_that_is_to_leave_hands_over_what_it_alone_holds(start: Start, tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", *QUICK)
    asked = json.dumps({"snapshot_every": 0})
    job = start(*flags, script=TRAIN, HOLDFAST_JOB=asked, HOLDFAST_GATES="[4]", HOLDFAST_STEPS="200")
    reaches(job, 3)
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby")
    before, leaving = job.ranks(2), node_of(job, 1)
    told = run_command("drain", leaving, str(job.run_dir), "--no-wait", folder=job.folder)
    assert told.returncode == 0, told.stderr
    job.until(lambda: job.phase() == "pausing", "the order to leave")
    (job.folder / "go-4").touch()
    job.ends(0)
    after = job.ranks(2, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
    assert [(one["policy"], one["again"]) for one in recoveries(job)] == [("replace", 0)]
    steps = [step for step, _, _ in made_steps(job.folder)]
    assert steps == list(range(1, 201)), "no step is made twice, and none is left out"
    assert digests(job) == {train_alone(tmp_path, HOLDFAST_STEPS="200")}


@slow
def test_all_layers_are_saved_before_a_node_leaves_if_they_may_not_be_handed_over(start: Start, tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", *QUICK)
    named = ["just-in-time save", "disk rollback"]
    asked = json.dumps({"snapshot_every": 0, "store_every": 1000, "policies": named})
    job = start(*flags, script=TRAIN, HOLDFAST_JOB=asked, HOLDFAST_GATES="[4]", HOLDFAST_STEPS="200")
    reaches(job, 3)
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby")
    told = run_command("drain", node_of(job, 1), str(job.run_dir), "--no-wait", folder=job.folder)
    assert told.returncode == 0, told.stderr
    job.until(lambda: job.phase() == "pausing", "the order to leave")
    (job.folder / "go-4").touch()
    job.ends(0)
    assert [(one["policy"], one["again"]) for one in recoveries(job)] == [("disk rollback", 0)]
    assert [step for step, _, _ in made_steps(job.folder)] == list(range(1, 201)), "no step is made twice"
    assert digests(job) == {train_alone(tmp_path, HOLDFAST_STEPS="200")}


@slow
def test_a_job_that_is_ended_finishes_its_step_and_writes_it(start: Start) -> None:
    asked = json.dumps({"snapshot_every": 0, "store_every": 1000})
    job = start(*TWO, *QUICK, script=TRAIN, HOLDFAST_JOB=asked, HOLDFAST_GATES="[4]", HOLDFAST_STEPS="100000")
    reaches(job, 3)
    stopping = threading.Thread(target=run_command, args=("stop", str(job.run_dir)), kwargs={"folder": job.folder})
    stopping.start()
    job.until(lambda: job.phase() == "ending", "the order to end")
    (job.folder / "go-4").touch()
    stopping.join()
    job.until(lambda: job.process.poll() is not None, "its end")
    last = max(losses(job.folder))
    assert last >= 4
    assert LayerFiles(job.folder / "layers", 6).newest_whole() == last
