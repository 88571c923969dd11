"""What the local fleet sees of its nodes reaches the job at once, without any silence."""

import pytest

from tests.cli.conftest import Start
from tests.cli.rungs import lose, node_of, standbys


@pytest.mark.e2e
def test_nodes_that_are_gone_are_replaced_though_silence_would_take_minutes(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", "--set", "silence.silence_s=600", "--set", "node.lost_s=900")
    [spare] = standbys(job, 1)
    job.trains()
    lose(job, spare)
    ended = "its holder was killed by SIGKILL (sender unknown), and with it all its processes"
    job.says(f"standby {spare} lost: {ended}")
    [spare] = standbys(job, 1)  # after a pause: another is asked for
    lost = node_of(job, 1)
    lose(job, lost)
    job.trains(generation=2)
    assert node_of(job, 1) == spare
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.evicted) == ("silence", (lost,))
    assert record.cause == f"{lost} is gone, says its fleet ({ended})"
    job.check_replay()
