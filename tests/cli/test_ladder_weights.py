"""The ladder, where weights matter: four ranks with torch, and in the end the weights of a run with no faults."""

import signal
from pathlib import Path

import pytest

from holdfast.model.loss_response import Skip
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.rungs import (
    BATCH,
    CALM,
    MATHS,
    PATIENCE_S,
    QUICK,
    SHAPED,
    WEIGHTS,
    Case,
    climbed,
    lose,
    node_of,
    reaches,
    said,
    standbys,
    weights,
)
from tests.cli.test_run_probing import spoiled
from tests.cli.tortured import published
from tests.conftest import job_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
slow = pytest.mark.slow

TWO = ("--nnodes", "2", "--nproc-per-node", "2")
FOUR = ("--nnodes", "4", "--nproc-per-node", "1", "--standbys", "1")


@pytest.fixture
def case(start: Start, tmp_path: Path) -> Case:
    return Case(start, tmp_path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, warm_server: Path) -> set[str]:
    """The weights of a run with no faults."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "train.py").write_text(WEIGHTS)
    (folder / "part.py").write_text(MATHS)
    words = ("--run-dir", str(folder / "run"), *TWO, *CALM, "train.py", str(folder))
    env = make_rank_environment(
        job_environment(HOLDFAST_HOME=str(folder / "home"), HOLDFAST_FORK_SERVER=str(warm_server))
    )
    job = Job(folder, *words, env=env)
    try:
        job.ends(0, PATIENCE_S)
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(PATIENCE_S)
    assert climbed(job).path == "launch end"
    return weights(job)


@slow
def test_a_transient_crash_is_solved_by_a_restart(case: Case, calm: set[str]) -> None:
    job = case.weights(*TWO, *CALM, HOLDFAST_GATE="20")
    reaches(job, 19)
    job.kill(job.rank(2))
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop restart launch end"
    assert (found.restarts, found.evicted) == (1, ())
    [record] = job.report().incidents
    assert (record.good_step, record.resumed_from) == (19, 19)
    assert said(job, "from")[4:] == [["19", "memory"]] * 4
    assert weights(job) == calm


@slow
def test_a_fault_during_recovery(case: Case, calm: set[str]) -> None:
    """While ranks of the next generation start, another one dies of something else."""
    job = case.weights(*TWO, *CALM, HOLDFAST_GATE="20")
    reaches(job, 19)
    job.kill(job.rank(0))
    job.kill(job.rank(3, generation=2), signal.SIGABRT)  # as soon as it is there
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop restart launch stop restart launch end"
    assert (found.restarts, found.evicted) == (2, ())
    [record] = job.report().incidents
    assert (record.good_step, record.resumed_from, record.failures) == (19, 19, 2)
    assert weights(job) == calm


@slow
def test_storage_is_gone_and_nothing_else_has_the_state(case: Case) -> None:
    """Storage that is away looks empty: the job ends and says so, and does not begin at step 0."""
    store = case.folder / "store"
    no_copies = ("--set", "backup.duty=0.0001")
    job = case.weights(*TWO, "--standbys", "1", *QUICK, *no_copies, HOLDFAST_GATE="20", HOLDFAST_STORE=str(store))
    standbys(job, 1)
    reaches(job, 19)
    job.until(lambda: published(store), "a checkpoint")
    store.rename(case.folder / "gone")
    store.write_text("no folder any more\n")
    lose(job, next(view["node"] for view in job.status()["nodes"] if view["ranks"] == "2-3"))
    job.ends(93)
    found = climbed(job)
    assert found.path == "launch stop evict launch stop restart launch stop probe restart launch stop give up end"
    assert len(found.evicted) == 1, "only the lost node"
    assert said(job, "from") == [["0", "none"]] * 4, "only the first launch begins without a state"
    assert "StateError" in job.report().ending


@slow
def test_storage_is_gone(case: Case, calm: set[str]) -> None:
    """A node is lost when checkpoints can be neither read nor written: its peer has the state."""
    store = case.folder / "store"
    paced = {"HOLDFAST_GATE": "20", "HOLDFAST_PAUSE": "0.3"}  # a job that stops too soon has no copies yet
    job = case.weights(*TWO, "--standbys", "1", *QUICK, HOLDFAST_STORE=str(store), **paced)
    standbys(job, 1)
    reaches(job, 19)
    job.until(lambda: published(store), "a checkpoint")
    job.until(lambda: job.status().get("floor", 0) > 3, "copies on peers")
    store.rename(case.folder / "gone")
    store.write_text("no folder any more\n")
    lost = next(view["node"] for view in job.status()["nodes"] if view["ranks"] == "2-3")
    lose(job, lost)
    case.opens()
    job.ends(94)  # the final state is not where the script wanted it
    found = climbed(job)
    if found.path != "launch stop evict launch stop restart launch end":  # storage had a newer state: tried, in vain
        assert found.path == "launch stop evict launch end"
    assert found.evicted == (lost,)
    assert sorted(source for step, source in said(job, "from")[-4:]) == ["memory", "memory", "peer", "peer"]
    kept = job.report().storage
    assert kept and kept.missed and kept.missed.why in job.text(), "a person is told that storage fails"
    assert weights(job) == calm


@slow
def test_two_that_keep_the_copies_of_each_other_do_not_leave_at_once(case: Case, calm: set[str]) -> None:
    """Ranks on both are stopped: one of the nodes is evicted, and the other goes on with what it holds."""
    patient = ("--set", "silence.silence_s=40", "--set", "slow.stance=observe", "--set", "probe.allow=false")
    job = case.weights(*FOUR[:4], "--standbys", "2", *patient, HOLDFAST_GATE="20", HOLDFAST_PAUSE="0.3")
    standbys(job, 2)
    reaches(job, 19)
    job.until(lambda: job.status().get("floor", 0) > 3, "copies on peers")
    both = {node_of(job, rank) for rank in (0, 2)}
    for rank in (0, 2):
        job.kill(job.rank(rank), signal.SIGSTOP)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict launch end"
    assert len(found.evicted) == 1 and both.issuperset(found.evicted)
    assert weights(job) == calm


# From step 40 on the machine on which rank 1 began computes what no number is.
CORRUPT = """
    import os, sys
    sick, here = f"{sys.argv[1]}/sick", os.environ["HOLDFAST_NODE"]
    if os.environ["HOLDFAST_GENERATION"] == "1" and step == 1 and os.environ["RANK"] == "1":
        with open(sick, "w") as file:
            file.write(here)
    bad = step >= 40 and os.path.exists(sick) and open(sick).read() == here
    return loss * float("nan") if bad else loss
"""


@slow
def test_nan_from_a_machine_is_found_bit_by_bit(case: Case, calm: set[str]) -> None:
    part = MATHS.replace(SHAPED, CORRUPT.lstrip("\n"))
    told = {"HOLDFAST_PAUSE": "0.1", "HOLDFAST_STORE": str(case.folder / "store"), "PYTHONPATH": spoiled(case.folder)}
    job = case.weights(*FOUR, *CALM, part=part, **told)
    job.ends(0, 2 * PATIENCE_S)
    sick = (case.folder / "sick").read_text()
    found = climbed(job)
    assert found.path == "launch stop restart launch stop probe evict launch end"
    assert (found.restarts, found.evicted) == (2, (sick,))
    record = job.report().incidents[-1]
    assert record.kind == "loss" and "gemm_bits" in record.verdict.reason
    assert record.resumed_from is not None and 0 < record.resumed_from < 39, "from before what led astray twice"
    assert weights(job) == calm


# At step 20 of the first generation every rank waits for a message of the next one, and none has sent any.
STANDS = """
    import os
    import torch.distributed as dist
    if os.environ["HOLDFAST_GENERATION"] == "1" and step == 20:
        dist.recv(x.clone(), src=(rank + 1) % dist.get_world_size())
    return x
"""


@slow
def test_a_hang_in_which_nobody_is_named_is_probed_and_restarted(case: Case, calm: set[str]) -> None:
    """All ranks are at one place, so nobody stands out: the job is stopped, nodes are tried, and none is evicted."""
    calm_nodes = ("--set", "silence.silence_s=40", "--set", "slow.stance=observe", "--set", "hang.act_s=4")
    part = MATHS.replace(BATCH, STANDS.lstrip("\n"))
    job = case.weights(*TWO, "--standbys", "1", *calm_nodes, part=part)
    job.ends(0, 2 * PATIENCE_S)
    found = climbed(job)
    assert found.path == "launch stop probe restart launch end"
    assert (found.restarts, found.evicted) == (1, ())
    [record] = job.report().incidents
    assert (record.kind, record.ranks, record.suspects) == ("hang", (), ())
    assert weights(job) == calm


@slow
def test_nan_from_code_is_rolled_back(case: Case, calm: set[str]) -> None:
    job = case.weights(*TWO, "--standbys", "1", *CALM, HOLDFAST_GATE="20")
    reaches(job, 19)
    case.updates(MATHS.replace(SHAPED, "    return (loss - loss).log()\n"))
    job.until(lambda: job.status().get("generation") == 2, "the launch of the update")
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch pause launch stop restart launch stop rollback launch end"
    assert (found.restarts, found.evicted) == (3, ())
    assert [launch.release.number for launch in found.launches] == [1, 2, 2, 1]
    assert job.report().incidents[-1].rolled_back == 2
    assert weights(job) == calm, "nothing of what the update spoilt was gone on from"


@slow
def test_nan_from_a_batch_is_left_out(case: Case, calm: set[str]) -> None:
    part = MATHS.replace(BATCH, "    return x * float('nan') if step == 30 and rank == 2 else x\n")
    job = case.weights(*TWO, *CALM, part=part, HOLDFAST_PAUSE="0.1")
    job.ends(0, 2 * PATIENCE_S)
    found = climbed(job)
    assert found.path == "launch stop restart launch stop probe skip launch end"
    assert (found.restarts, found.evicted) == (2, ())
    assert [launch.skips for launch in found.launches] == [(), (), (Skip(first=30, last=30),)]
    left_out = weights(job)
    job.run_dir.rename(case.folder / "run-before")
    job.output.rename(case.folder / "before.out")
    by_hand = case.weights(*TWO, *CALM, part=part, HOLDFAST_SKIP="30-30")
    by_hand.ends(0)
    assert left_out == weights(by_hand) != calm, "exact against a run that was told to leave it out"
