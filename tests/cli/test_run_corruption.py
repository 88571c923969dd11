"""A bit that flips in one replica's weights: its node is named and evicted, and nobody can tell afterwards."""

import pytest

from holdfast.model.detector_alarm import Kind
from tests.cli.conftest import Start
from tests.cli.test_run_state import TRAIN, backed, said

pytestmark = pytest.mark.e2e

STRIKE = """
    strike = f"{folder}/strike-{dist.get_rank()}"
    if os.path.exists(strike):
        os.remove(strike)
        with torch.no_grad():
            net[0].weight.view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 12)  # far below what a loss shows
        print("struck", step, flush=True)
    ckpt.save(step)
"""
STRUCK = TRAIN.replace("\n    ckpt.save(step)\n", STRIKE)


@pytest.mark.slow
def test_the_replica_that_differs_is_evicted_and_undone(start: Start) -> None:
    flags = ("--nnodes", "3", "--standbys", "1")
    calm = start(*flags, script=TRAIN, name="calm", HOLDFAST_STEPS="250")
    calm.ends(0, patience_s=90)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=STRUCK, HOLDFAST_STEPS="250")
    job.trains()
    job.until(lambda: backed(job), "copies on peers")
    bad = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "1")
    (job.folder / "strike-1").touch()
    job.trains(generation=2)
    job.ends(0, patience_s=90)
    [record] = job.report().incidents
    [[struck]] = said(job, "struck")
    assert (record.kind, record.ranks, record.evicted) == ("replica", (1,), (bad,))
    assert record.resumed_from is not None and 0 < record.resumed_from < int(struck)
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}


@pytest.mark.slow
def test_without_snapshots_ranks_compare_their_parameters_themselves(start: Start) -> None:
    script = STRUCK.replace("DistributedDataParallel(net))", "DistributedDataParallel(net), replicas=True)")
    script = script.replace("ckpt = holdfast.Checkpointer(model=ddp, optimizer=optimizer, **stored)\n", "ckpt = None\n")
    script = script.replace("first = ckpt.restore() + 1\n", "first = 1\n").replace("    ckpt.save(step)\n", "")
    script = script.replace('print("from", first - 1, ckpt.restored_from, flush=True)\n', "")
    job = start("--nproc-per-node", "3", "--set", "replica.stance=notify", script=script)
    job.trains()
    job.until(lambda: job.status()["step"] > 45, "a comparison")
    (job.folder / "strike-2").touch()
    job.until(lambda: "has other parameters than 2 of its 3 replicas" in job.text(), "a word of it")
    assert {alarm.ranks for alarm in job.alarms(Kind.REPLICA)} == {(2,)}
    job.finish()
    job.ends(0)
    assert job.report().incidents == ()
