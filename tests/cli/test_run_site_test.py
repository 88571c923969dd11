"""A site's own test of its machines, in a job: the node on which it fails is evicted in the test's own words."""

import pytest

from tests.agent.test_site_test import SICK
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN
from tests.cli.test_traceback_folding import TIMEOUT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

# In its first life rank 0 dies of a collective that timed out. Nobody is known to be to blame, so all are probed.
TIMES_OUT = TRAIN.replace(
    "    holdfast.step(step, loss=1 / step)\n",
    f"""    holdfast.step(step, loss=1 / step)
    if step == 30 and rank == "0" and os.environ["HOLDFAST_GENERATION"] == "1":
        print({TIMEOUT[0]!r}, file=sys.stderr, flush=True)
        os.abort()
""",
)
assert TIMES_OUT != TRAIN

# The shell is a child of its node's agent, which writes into a log of its own.
ON_N1 = f"case $(readlink /proc/$PPID/fd/2) in */nodes/n1/*) {SICK};; esac"


def test_the_node_that_fails_the_sites_own_test_is_evicted_with_its_words(start: Start) -> None:
    flags = ("--nnodes", "2", "--standbys", "1", "--set", f"probe.command={ON_N1}")
    job = start(*flags, script=TIMES_OUT, probes=True)
    job.patience_s = 200.0  # processes of probes import torch, on each node twice
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert record.probed_s > 0 and record.evicted == ("n1",), job.text()
    assert "gpu 3: targeted stress: FAIL" in record.verdict.reason and "226" in record.verdict.reason
