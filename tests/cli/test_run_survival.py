"""What survives what: the controller, the front and agents die; training goes on, and trouble is still mended."""

import os
import signal
import time

import psutil
import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.terminal.quantity_text import FIRST_STEP
from tests.cli.conftest import Start
from tests.cli.driver import DEAF, Job, gone

pytestmark = pytest.mark.e2e

PATIENT = ("--set", "silence.silence_s=15")  # processes are stopped for a while, on a machine that may be busy


def another_controller(job: Job, before: int) -> int:
    def look() -> int:
        listening = run_directory.find_controller(job.run_dir)
        return listening.pid if listening and listening.pid != before and job.status() else 0

    return job.until(look, "another controller")


def test_the_controller_dies_while_all_is_well(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", *PATIENT)
    job.trains()
    ranks, first = job.ranks(2), job.controller()
    job.kill(first)
    another_controller(job, first)
    status = job.trains()  # still the first generation
    assert job.ranks(2) == ranks and not any(gone(pid) for pid in ranks)
    assert status["incidents"] == 0
    job.kill(ranks[1])
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert len(job.report().incidents) == 1
    assert sum("controller.log" in line for line in job.sentences()) == 1
    assert sum(FIRST_STEP in line for line in job.sentences()) == 1
    job.check_replay()


@pytest.mark.slow
def test_the_controller_dies_while_it_mends(start: Start) -> None:
    """Once while ranks are being stopped, once while they are being launched."""
    job = start("--nnodes", "2", "--nproc-per-node", "1", *PATIENT, "--set", "recovery.stop_grace_s=2.5", script=DEAF)
    job.trains()
    ranks, first = job.ranks(2), job.controller()
    job.kill(ranks[1])
    job.until(lambda: job.phase() == "stopping", "the stop")
    job.kill(first)
    second = another_controller(job, first)
    job.trains(generation=2)
    assert gone(*ranks)

    job.kill(job.store(), signal.SIGSTOP)  # without an answer from the store nothing can be launched
    ranks = job.ranks(2, generation=2)
    job.kill(ranks[0])
    job.until(lambda: job.phase() == "launching", "the launch")
    job.kill(second)
    another_controller(job, second)
    job.kill(job.store(), signal.SIGCONT)
    job.trains(generation=3)
    assert gone(*ranks)
    job.finish()
    job.ends(0)
    assert [record.verdict.remedy for record in job.report().incidents] == ["restart", "restart"]
    job.check_replay()


def test_the_store_dies(start: Start) -> None:
    job = start("--nproc-per-node", "1")
    job.trains()
    job.kill(job.store())
    job.kill(job.rank(0))
    job.trains(generation=2)
    job.finish()
    job.ends(0)


def test_the_front_dies_and_the_run_is_resumed(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", *PATIENT)
    job.trains()
    ranks, controller = job.ranks(2), job.controller()
    os.kill(job.process.pid, signal.SIGKILL)
    job.ends(-signal.SIGKILL)
    job.until(lambda: gone(controller), "the end of the controller")
    steps = [(job.folder / f"step-{rank}").read_text() for rank in range(2)]
    moved = lambda: [(job.folder / f"step-{rank}").read_text() for rank in range(2)] != steps  # noqa: E731
    job.until(moved, "further steps")
    take_up = f"holdfast run --resume {job.run_dir}"
    assert main(["ls"]) == 0 and main(["status", str(job.run_dir)]) == 1
    for said in capfd.readouterr():  # the one on stdout, the other on stderr
        assert take_up in said and " nodes " in said and "holdfast clean" not in said
    job.start("--resume", str(job.run_dir))
    job.trains()
    assert f"holdfast logs {job.run_dir}" in job.text(), "where to see what ranks have printed meanwhile"
    assert job.ranks(2) == ranks and not any(gone(pid) for pid in ranks)
    job.kill(ranks[0])
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert len(job.report().incidents) == 1
    assert "resuming" in job.text()
    job.check_replay()


@pytest.mark.slow
def test_without_a_front_all_leave_by_themselves(start: Start) -> None:
    """And the run can be resumed even then, with other nodes."""
    job = start("--set", "node.lost_s=2.5", "--set", "silence.silence_s=2")
    job.trains()
    pids = [job.rank(0), job.holder("n0"), job.store(), job.controller()]
    os.kill(job.process.pid, signal.SIGKILL)
    job.until(lambda: gone(*pids), "the end of everything")
    assert (job.run_dir / "nodes" / "n0" / "left").read_text() == "no controller for 2.5 s\n"
    job.start("--resume", str(job.run_dir))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.evicted, record.admitted) == (("n0",), ("n1",))


@pytest.mark.slow
def test_ranks_that_end_well_without_a_controller_have_ended_well(start: Start) -> None:
    """The front is killed, ranks make their last steps unseen, and the node is gone when the run is resumed."""
    job = start("--set", "node.lost_s=10", "--nproc-per-node", "2")
    job.trains()
    killed_at = time.time()
    os.kill(job.process.pid, signal.SIGKILL)
    job.ends(-signal.SIGKILL)
    seen = int((job.folder / "step-0").read_text())
    job.until(lambda: int((job.folder / "step-0").read_text()) > seen + 20, "steps that nobody sees")
    job.finish()
    left = job.run_dir / "nodes" / "n0" / "left"
    job.until(left.exists, "the node to leave")
    made = min(int((job.folder / f"step-{rank}").read_text()) for rank in (0, 1))
    made_at = max((job.folder / f"step-{rank}").stat().st_mtime for rank in (0, 1))
    job.start("--resume", str(job.run_dir))
    job.ends(0)
    found = job.report()
    assert (found.incidents, found.generation, found.step) == ((), 1, made)
    [alone] = found.unwatched
    assert killed_at - 2 < alone.since < killed_at + 2 and alone.until > left.stat().st_mtime
    train, over = (next(span for span in found.spans if span.use == use) for use in ("train", "over"))
    assert abs(train.end_at - made_at) < 0.5 and over.start_at >= train.end_at and over.end_at == alone.until
    assert not found.at_most
    job.check_replay()


@pytest.mark.slow
def test_agents_die_again_and_again_and_no_node_is_lost(start: Start) -> None:
    """Each is back long before its silence is an alarm: what it needs is there already, in its holder."""
    job = start("--nnodes", "2")
    job.trains()
    ranks = job.ranks(2)
    for _ in range(3):
        for node in ("n0", "n1"):
            agent = job.agent(node)
            job.kill(agent)
            job.until(lambda node=node, agent=agent: job.agent(node) != agent, "another agent")  # type: ignore[misc]
    before = job.status()["step"]
    job.until(lambda: job.status()["step"] > before + 20, "more steps")
    spent = [sum(psutil.Process(job.agent(node)).cpu_times()[:2]) for node in ("n0", "n1")]
    assert max(spent) < 0.5, "a fresh interpreter takes longer to import what an agent needs"
    assert job.ranks(2) == ranks and job.status()["incidents"] == 0
    job.finish()
    job.ends(0)
    job.check_replay()


@pytest.mark.slow
def test_an_agent_dies(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", *PATIENT)
    job.trains()
    ranks, agent = job.ranks(4), job.agent("n1")
    job.kill(agent)
    job.until(lambda: job.agent("n1") != agent, "another agent")
    assert not any(gone(pid) for pid in ranks)
    job.kill(ranks[3])
    job.trains(generation=2)
    assert gone(*ranks)

    # Ranks end while there is nobody to see it.
    ranks, agent = job.ranks(4, generation=2), job.agent("n0")
    job.kill(agent, signal.SIGSTOP)
    job.kill(ranks[0])
    job.kill(ranks[1])
    job.until(lambda: gone(ranks[0], ranks[1]), "the end of two ranks")
    job.kill(agent)
    job.trains(generation=3)
    assert gone(*ranks)
    job.finish()
    job.ends(0)
    first, second = job.report().incidents
    assert (first.suspects, first.ranks) == (("n1",), (3,))
    assert second.suspects == ("n0",) and second.ranks == (0, 1)
    assert first.evicted == second.evicted == ()
    job.check_replay()


@pytest.mark.slow
def test_the_front_dies_while_nodes_are_being_started(start: Start) -> None:
    job = start("--nnodes", "2", zygote=True, OWN_SERVER="1")
    job.until(lambda: (job.run_dir / "nodes" / "n1").exists(), "a node that is to be started")
    job.kill(job.process.pid)
    job.start("--resume", str(job.run_dir))
    job.trains()
    job.finish()
    job.ends(0)


def steps_unseen(job: Job) -> None:
    """Kill the front, and wait until ranks have made steps that no controller sees. The journal knows of earlier ones:
    `holdfast status` may tell of a step a moment before it is written down."""
    job.until(lambda: job.report().step > 0, "a step in the journal")
    controller = job.controller()
    os.kill(job.process.pid, signal.SIGKILL)
    job.ends(-signal.SIGKILL)
    job.until(lambda: gone(controller), "the end of the controller")
    seen = int((job.folder / "step-0").read_text())
    job.until(lambda: int((job.folder / "step-0").read_text()) > seen + 20, "steps that nobody sees")


def last_step_at(job: Job, ranks: int = 2) -> float:
    return max((job.folder / f"step-{rank}").stat().st_mtime for rank in range(ranks))


def test_ranks_that_end_without_a_controller_on_nodes_that_stay_trained_up_to_their_last_step(start: Start) -> None:
    """Nodes tell the new controller their newest step before they tell it that their ranks have ended."""
    job = start("--nnodes", "2", "--nproc-per-node", "1", *PATIENT)
    job.trains()
    ranks = job.ranks(2)
    steps_unseen(job)
    job.finish()
    job.until(lambda: gone(*ranks), "the end of the ranks")
    made, made_at = min(int((job.folder / f"step-{rank}").read_text()) for rank in (0, 1)), last_step_at(job)
    job.start("--resume", str(job.run_dir))
    job.ends(0)
    found = job.report()
    assert (found.incidents, found.step, found.at_most, found.spent_s["unknown"]) == ((), made, "", 0.0)
    train = next(span for span in found.spans if span.use == "train")
    assert abs(train.end_at - made_at) < 0.5, "what each rank wrote at its last step"
    assert not any(span.use == "end" and span.start_at < found.unwatched[0].until for span in found.spans)


@pytest.mark.slow
def test_a_rank_that_died_without_a_controller_cost_the_time_since_its_death(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", *PATIENT)
    job.trains()
    ranks = job.ranks(2)
    steps_unseen(job)
    job.kill(ranks[1])
    killed_at = time.time()
    job.until(lambda: gone(ranks[1]), "the end of the rank")
    job.start("--resume", str(job.run_dir))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    found = job.report()
    [record] = found.incidents
    late_s = found.unwatched[0].until - killed_at  # the agent saw it sooner than this, if not at once on a busy machine
    assert abs(record.good_at - killed_at) < max(0.5, late_s / 2) and found.unwatched[0].until < record.resumed_at
    detect = next(span for span in found.spans if span.use == "detect" and span.incident == 1)
    assert abs(detect.start_at - record.good_at) < 0.01 and abs(detect.end_at - record.alarm_at) < 0.01
    away = found.unwatched[0]
    assert not record.untold and found.spent_s["unknown"] <= away.until - away.since + 0.01  # no more than nobody saw
    job.check_replay()
