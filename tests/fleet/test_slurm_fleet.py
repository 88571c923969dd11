"""When a controller that is itself in a job of Slurm's asks for nodes; `make test-slurm` has the rest."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.fleet.slurm_commands import ClusterView
from holdfast.fleet.slurm_fleet import SlurmFleet, SlurmPlan
from holdfast.fleet.slurm_replies import SlurmHost, SlurmJob


def controller_in_a_job(place: Path, patch: pytest.MonkeyPatch, lasts_s: float) -> tuple[SlurmFleet, float]:
    """A fleet inside job 7, which lasts for so long, and when that ends."""
    fleet = SlurmFleet(place, SlurmPlan(run_id="r", allocation=7, starts=("true",)), {}, mint=str, epoch=lambda: 1)
    ends_at = time.time() + lasts_s
    job = SlurmJob(id=7, state="RUNNING", hosts=("c1", "c2"), ends_at=ends_at)

    def look(jobs: Iterable[int], hosts: Iterable[str]) -> ClusterView:
        up = dict.fromkeys(job.hosts, SlurmHost(answers=True, state="mixed"))
        return ClusterView(asked=frozenset(jobs), jobs={7: job}, steps=(), hosts=up)

    patch.setattr(fleet._commands, "look", look)
    patch.setattr(fleet._commands, "find_jobs", dict)
    return fleet, ends_at


@pytest.mark.parametrize(("lasts_s", "last_s"), [(240.0, 120.0), (86400.0, 900.0)])
async def test_a_short_job_that_was_looked_at_first_gives_its_hosts_until_its_end_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts_s: float, last_s: float
) -> None:
    fleet, ends_at = controller_in_a_job(tmp_path, monkeypatch, lasts_s)
    assert await fleet.survey() == {}
    assert await fleet.acquire(1) == ("n0",)
    now_s = -5.0
    monkeypatch.setattr(time, "time", lambda: ends_at - last_s + now_s)
    assert await fleet.acquire(1) == ("n1",)
    now_s = 5.0
    with pytest.raises(OSError, match=r"^job 7,"):
        await fleet.acquire(1)
