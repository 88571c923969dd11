"""Every metric is seen at /metrics of a real job, but for those that need a GPU, a network or an hour."""

import pytest

from holdfast.controller.metrics import METRICS
from tests.cli.conftest import Start
from tests.prometheus.record_run import scrape

# Keeps its state, tells tokens, and writes checkpoints.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
folder = sys.argv[1]
model = torch.nn.Linear(10, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer, path=f"{folder}/ckpt", every=5)
for step in range(ckpt.restore() + 1, 1_000_000):
    time.sleep(0.1)
    model(torch.ones(10)).sum().backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, tokens=1000)
    done = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(done)
    if done:
        break
"""
NOT_HERE = {
    "holdfast_last_hour_ettr_ratio": "of a job that is an hour old",
    "holdfast_tensor_active_ratio": "GPUs tell it",
    "holdfast_network_bytes_per_second": "ranks of one host use no link",
    "holdfast_network_rdma_events_per_second": "RDMA ports tell it",
    "holdfast_link_bytes_per_second": "ranks of one host use no link",
    "holdfast_link_rdma_events_per_second": "RDMA ports tell it",
}


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_job_shows_every_metric(start: Start) -> None:
    quick = ("--set", "pace.progress_s=0.5", "--set", "pace.peak_flops=1e7")
    job = start(*quick, "--nnodes", "2", script=SCRIPT)
    job.trains()
    job.kill(job.rank(1))
    job.trains(generation=2)

    def names() -> set[str]:
        return {series.partition("{")[0] for series in scrape(job.run_dir)}

    job.until(lambda: METRICS.keys() - NOT_HERE.keys() <= names(), "every metric", 120)
    found = scrape(job.run_dir)
    shown = {series.partition("{")[0] for series in found}
    assert shown <= METRICS.keys()
    assert found['holdfast_incidents_total{kind="crash"}'] == 1 and found["holdfast_generation{}"] == 2
    assert 0 < found["holdfast_stored_step{}"] <= found["holdfast_step{}"] >= found["holdfast_copied_step{}"] > 0
    assert found['holdfast_restart_seconds_total{kind="incident",phase="launch"}'] > 0
    job.finish()
    job.ends(0)
