"""A switch takes the links of several machines: the job waits for them, and no node is evicted."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.test_run_health import machines

pytestmark = pytest.mark.e2e


def set_carriers(folder: Path, carrier: int, *nodes: str) -> None:
    for node in nodes:
        link = folder / node / "sys/class/net/eth0"
        (link / "device").mkdir(parents=True, exist_ok=True)
        (link / "carrier.new").write_text(f"{carrier}\n")
        (link / "carrier.new").replace(link / "carrier")


def test_links_that_are_lost_together_are_waited_for(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "machines"
    flags = ("--set", machines(root), "--set", "health.network_s=2", "--set", "silence.beat_s=0.2")
    set_carriers(root, 1, "n0", "n1", "n2", "n3")
    job = start("--nnodes=2", "--standbys=0", *flags)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    set_carriers(root, 0, "n0", "n1")
    assert "(n0, n1: a switch)" in job.says("2 nodes lost their links within ")
    job.says("no node is to blame: restarted in place once the links are back; waiting for them up to 10 min")
    job.until(lambda: job.phase() == "waiting", "the wait")
    assert " n0, n1" in job.status()["now"]
    set_carriers(root, 1, "n0", "n1")
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.klass, record.evicted, record.admitted) == ("health", "ib_rdma_error", (), ())
    assert job.check_replay() > 5
