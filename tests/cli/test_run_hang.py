"""A job that stands or is slow: whoever keeps the others waiting is named, and acted on where there is no doubt."""

import re
import signal

import pytest

from holdfast.core.detect.hang import HangLimits
from holdfast.core.diagnose.suspect_hang_timeout import ENDLESS
from holdfast.core.record.job_account import TimeUse
from holdfast.model.detector_alarm import UNNAMED, Kind, Stance
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_transcript

pytestmark = pytest.mark.e2e

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import holdfast

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 1_000_000):
    if os.path.exists(f"{folder}/pause-{rank}"):
        time.sleep(1000 if os.path.exists(f"{folder}/long") else 8)
        os.remove(f"{folder}/pause-{rank}")
    if os.path.exists(f"{folder}/astray-{rank}"):
        os.remove(f"{folder}/astray-{rank}")
        dist.all_gather([torch.ones(4)] * dist.get_world_size(), torch.ones(4))
    time.sleep(0.2 if os.path.exists(f"{folder}/slow-{rank}") else 0.1)
    x = torch.ones(4)
    dist.all_reduce(x)
    holdfast.step(step)
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(stop)
    if stop:
        break
dist.destroy_process_group()
"""


def test_a_stopped_rank_is_named_and_acted_on(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", "--standbys", "1", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby", patience_s=100)
    job.kill(job.rank(3), signal.SIGSTOP)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks) == ("hang", (3,)) and len(record.evicted) == 1
    stacks = next(alarm.stacks for alarm in job.alarms(Kind.HANG) if alarm.stance is Stance.ACT)
    assert stacks[0].count == 4 and "rank 3" in {row.ranks for row in stacks if row.named}, "they stay when it is over"
    assert_transcript(job, "hang")


@pytest.mark.slow
def test_another_collective_than_the_others_is_acted_on_at_the_second_look(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "astray-2").touch()
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks) == ("hang", (2,)) and ENDLESS in record.cause
    assert not record.evicted, "only code can do this"


@pytest.mark.slow
def test_a_rank_that_sleeps_is_acted_on_when_that_has_cost_a_restart(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "long").touch()
    (job.folder / "pause-1").touch()
    job.says("rank 1 on ")
    (job.folder / "pause-1").unlink()
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks) == ("hang", (1,))
    asleep_s, restart_s = map(int, re.findall(r" (\d+) s\b", record.cause)[-2:])
    assert restart_s <= asleep_s < HangLimits().act_s, record.cause


# In its first life all ranks stand in one place of torch.distributed, as where the network carries nothing any more.
TOGETHER = TRAIN.replace(
    "    x = torch.ones(4)\n",
    """    if step == 30 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from datetime import timedelta
        from torch.distributed.distributed_c10d import _get_default_store, _store_based_barrier
        _store_based_barrier(rank, _get_default_store(), "nobody", 99, timedelta(hours=1), timedelta(hours=1))
    x = torch.ones(4)
""",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hang_in_which_nobody_stands_out_is_acted_on_and_nodes_are_probed(start: Start) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--set", "hang.act_s=12")
    job = start(*flags, script=TOGETHER, probes=True)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks, record.evicted) == ("hang", (), ())
    assert [alarm.signature for alarm in job.alarms(Kind.HANG) if alarm.stance is Stance.ACT] == [UNNAMED]
    assert record.probed_s > 0, "the nodes were tried, and nobody was found"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_evicted_node_is_examined_while_the_job_goes_on(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", script=TRAIN, probes=True)
    job.trains()
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby", patience_s=100)
    job.kill(job.rank(1), signal.SIGSTOP)
    job.trains(generation=2)

    def beside() -> list[str]:
        return [node["role"] for node in job.status()["nodes"] if node["role"] not in ("active", "evicted")]

    job.until(lambda: "examined" in beside(), "the examination of the evicted node", patience_s=100)
    job.until(lambda: set(beside()) == {"ready"}, "standbys, the examined one among them or not", patience_s=150)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert len(record.evicted) == 1


@pytest.mark.slow
def test_a_rank_that_pauses_is_named_and_left_alone(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "pause-2").touch()
    job.says("rank 2 on ")
    job.until(lambda: not (job.folder / "pause-2").exists(), "the end of the pause")
    at = job.status()["step"]
    job.until(lambda: job.status()["step"] > at + 5, "more steps")
    told = re.search(r"rank 2 went on after (\d+) s at step \d+", job.says(" went on after "))
    job.finish()
    job.ends(0)
    report = job.report()
    assert report.incidents == ()
    [stall] = [span for span in report.spans if span.use is TimeUse.STALL]
    assert told and abs(stall.seconds - int(told[1])) < 1.0, "what the console says is what the account has"
    assert 6.0 < stall.seconds < report.wall_s and report.spent_s["stall"] == stall.seconds
    trained = sum(span.seconds for span in report.spans if span.use is TimeUse.TRAIN)
    assert report.ettr == pytest.approx(trained / report.wall_s), "a stall is no training"


@pytest.mark.slow
def test_a_slow_rank_is_named(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "slow-1").touch()
    job.says("makes the others wait")
    assert {alarm.ranks for alarm in job.alarms(Kind.SLOW)} == {(1,)}
    job.finish()
    job.ends(0)
    assert job.report().incidents == ()
