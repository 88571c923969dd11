"""The ladder, where machines are to blame: who leaves, who comes, and who stays."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Start
from tests.cli.driver import gone
from tests.cli.rungs import CALM, QUICK, Case, chains, climbed, lose, node_of, reaches, standbys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def case(start: Start, tmp_path: Path) -> Case:
    return Case(start, tmp_path)


@pytest.mark.slow
def test_a_hang_in_one_pipeline_group_evicts_the_group(case: Case) -> None:
    """Two of its three ranks are stopped; the third leaves with them, and the other group stays."""
    patient = ("--set", "silence.silence_s=40", "--set", "slow.stance=observe")
    job = case.chain("--nnodes", "6", "--standbys", "3", "--mesh", "pp=3,dp=2", *patient, HOLDFAST_STEPS="600")
    standbys(job, 3)
    reaches(job, 20)
    group = {node_of(job, rank) for rank in (0, 2, 4)}
    for rank in (0, 2):
        job.kill(job.rank(rank), signal.SIGSTOP)
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict launch end"
    assert found.restarts == 1 and set(found.evicted) == group and len(found.evicted) == 3
    [record] = job.report().incidents
    assert record.kind == "hang" and {0, 2} <= set(record.ranks)
    assert chains(job, 6, 600) == {("one",)}


@pytest.mark.slow
def test_two_faults_at_once(case: Case) -> None:
    """A node is lost and a rank elsewhere dies: one incident, one restart, and only the lost node leaves."""
    job = case.chain("--nnodes", "3", "--standbys", "1", *QUICK, HOLDFAST_GATE="20")
    standbys(job, 1)
    reaches(job, 19)
    lost, rank = node_of(job, 0), job.rank(2)
    lose(job, lost)
    job.kill(rank)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict launch end"
    assert (found.restarts, found.evicted) == (1, (lost,))
    [record] = job.report().incidents
    assert record.kind == "silence" and record.failures == 1
    assert chains(job, 3) == {("one",)}


@pytest.mark.slow
def test_a_standby_dies_while_it_joins(case: Case) -> None:
    """It was to take the place of a lost node; it goes as well, and the next one comes."""
    job = case.chain("--nnodes", "2", "--standbys", "2", *QUICK, HOLDFAST_GATE="20")
    waiting = standbys(job, 2)
    reaches(job, 19)
    lost = node_of(job, 1)
    job.kill(job.store(), signal.SIGSTOP)  # without an answer from the store nothing can be launched
    lose(job, lost)
    job.until(lambda: job.phase() == "launching", "the launch")
    joining = node_of(job, 1)
    assert joining in waiting
    lose(job, joining)
    job.says(f"{joining} is gone")  # the phase is another one for an instant only
    job.kill(job.store(), signal.SIGCONT)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict launch stop evict launch end"
    assert (found.restarts, found.evicted) == (2, (lost, joining))
    [record] = job.report().incidents
    assert record.failures == 2 and len(record.admitted) == 2
    assert chains(job, 2) == {("one",)}


@pytest.mark.slow
def test_no_standby_is_left(case: Case) -> None:
    """Two nodes are lost one after the other, with one standby: the second time a new node is waited for."""
    job = case.chain("--nnodes", "2", *QUICK, HOLDFAST_GATE="20")
    reaches(job, 19)
    lost = node_of(job, 0)
    lose(job, lost)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict wait launch end"
    assert (found.restarts, found.evicted) == (1, (lost,))
    assert chains(job, 2) == {("one",)}


@pytest.mark.slow
def test_a_node_that_comes_and_goes(case: Case) -> None:
    """It falls silent, is replaced, and speaks again: it is not taken back, and nothing of it stays."""
    job = case.chain("--nnodes", "2", "--standbys", "1", *QUICK, HOLDFAST_GATE="20")
    standbys(job, 1)
    reaches(job, 19)
    flapping = node_of(job, 1)
    holder = psutil.Process(job.holder(flapping))
    below = [holder.pid, *(child.pid for child in holder.children(recursive=True))]
    agent = job.agent(flapping)
    os.kill(agent, signal.SIGSTOP)
    job.until(lambda: job.status().get("generation") == 2, "another generation")
    with contextlib.suppress(ProcessLookupError):  # it may have been ended by now
        os.kill(agent, signal.SIGCONT)
    job.until(lambda: gone(*below), "the end of the node that was away")
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop evict launch end"
    assert (found.restarts, found.evicted) == (1, (flapping,))
    assert all(flapping not in {seat.node for seat in launch.seats} for launch in found.launches[1:])
    assert chains(job, 2) == {("one",)}


@pytest.mark.slow
def test_the_same_failure_on_the_same_node_again_evicts_it(case: Case) -> None:
    job = case.chain("--nnodes", "2", "--standbys", "1", *CALM, HOLDFAST_GATE="20")
    standbys(job, 1)
    reaches(job, 19)
    weak = node_of(job, 1)
    job.kill(job.rank(1), signal.SIGSEGV)
    job.kill(job.rank(1, generation=2), signal.SIGSEGV)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop restart launch stop evict launch end"
    assert (found.restarts, found.evicted) == (2, (weak,))
    assert chains(job, 2) == {("one",)}
