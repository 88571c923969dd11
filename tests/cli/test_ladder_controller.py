"""The controller killed in every phase of a job: the next one goes on where it stood, and nobody can tell."""

import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.rungs import CALM, CHAIN, PART, Case, chains, climbed, node_of, reaches, standbys
from tests.cli.test_run_probing import spoiled
from tests.cli.test_run_survival import another_controller
from tests.cli.test_update_command import fates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# SIGTERM is not heard, so that a stop lasts until somebody ends the ranks; and each generation waits to be let go.
HEEDLESS = CHAIN.replace("import part\n", "import part, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n")
HEEDLESS = HEEDLESS.replace(
    "for step in range(",
    """while not os.path.exists(f"{folder}/open-{os.environ['HOLDFAST_GENERATION']}"):
    time.sleep(0.02)
for step in range(""",
)
HEEDLESS = HEEDLESS.replace(
    "    time.sleep(0.02)\n    state",
    """    if os.path.exists(f"{folder}/go"):
        break
    time.sleep(0.1)
    state""",
)
FOR_EVER = ("--set", "recovery.stop_grace_s=300", "--set", "recovery.stop_s=300")


@pytest.fixture
def case(start: Start, tmp_path: Path) -> Case:
    (tmp_path / "open-1").touch()
    return Case(start, tmp_path)


def started(case: Case) -> Job:
    """A job of two nodes that trains."""
    job = case.chain("--nnodes", "2", *CALM, *FOR_EVER, script=HEEDLESS, HOLDFAST_STEPS="100000")
    job.trains()
    return job


def killed(job: Job, phase: str) -> None:
    """Kill the controller in a phase, and wait for the next one, which must come to the same.

    News that led to no action may not have reached the disk, and is then told again by the nodes.
    """
    job.until(lambda: job.phase() == phase, f"phase {phase}")
    before = job.controller()
    job.kill(before)
    another_controller(job, before)
    job.until(lambda: job.phase() == phase, f"phase {phase} once more")


def end(job: Job, generation: int) -> None:
    for pid in job.ranks(2, generation):
        try:
            job.kill(pid)
        except ProcessLookupError:
            pass  # it had ended before


def test_the_controller_dies_in_every_phase_of_a_recovery(case: Case) -> None:
    job = started(case)
    killed(job, "training")
    job.kill(job.rank(1))
    killed(job, "stopping")
    store = job.store()
    os.kill(store, signal.SIGSTOP)  # without an answer from the store nothing can be launched
    end(job, generation=1)
    killed(job, "launching")
    os.kill(store, signal.SIGCONT)
    killed(job, "starting")
    (case.folder / "open-2").touch()
    job.trains(generation=2)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop restart launch end"
    assert (found.restarts, found.evicted, len(job.report().incidents)) == (1, (), 1)
    assert chains(job, 2, steps=0) == {("one",)}


@pytest.mark.slow
def test_the_controller_dies_while_code_is_staged_and_while_a_person_has_the_job_stand(case: Case) -> None:
    job = started(case)
    agent = job.agent("n0")
    os.kill(agent, signal.SIGSTOP)  # until it goes on nothing is staged there
    case.updates(PART.format(name="two"))
    assert fates(job)[2] == "staging"
    killed(job, "training")
    job.until(lambda: fates(job).get(2) == "staging", "it is staged still")
    os.kill(agent, signal.SIGCONT)
    killed(job, "pausing")
    (case.folder / "open-2").touch()
    end(job, generation=1)
    job.trains(generation=2)
    assert case.does("hold", "--no-wait").returncode == 0
    job.until(lambda: job.phase() == "pausing", "the pause")
    end(job, generation=2)
    killed(job, "held")
    (case.folder / "open-3").touch()
    assert case.does("resume", "--no-wait").returncode == 0
    job.trains(generation=3)
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch pause launch pause hold launch end"
    assert (found.restarts, found.evicted, len(job.report().incidents)) == (2, (), 0)
    assert [launch.release.number for launch in found.launches] == [1, 2, 2]
    assert chains(job, 2, steps=0) == {("one", "two")}


@pytest.mark.slow
def test_a_sick_node_is_found_by_probes_though_the_controller_dies_meanwhile(case: Case) -> None:
    """Ranks of three nodes die of the same, one after the other, and one of the nodes cannot multiply."""
    flags = ("--nnodes", "3", "--standbys", "1", "--no-zygote", *CALM)
    job = case.chain(*flags, probes=True, HOLDFAST_GATE="20", PYTHONPATH=spoiled(case.folder))
    standbys(job, 1)
    reaches(job, 19)
    sick = node_of(job, 1)
    (case.folder / "sick").write_text(sick)
    for generation, rank in ((1, 0), (2, 2), (3, 1)):
        job.kill(job.rank(rank, generation))
    killed(job, "probing")
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch stop restart launch stop restart launch stop probe evict launch end"
    assert (found.restarts, found.evicted) == (3, (sick,))
    [record] = job.report().incidents
    assert "gemm" in record.verdict.reason and record.failures == 3
    assert chains(job, 3) == {("one",)}
