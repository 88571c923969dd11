"""Which dismissals are because of the machine: their reasons are text, and a fleet reads it."""

from itertools import count

import pytest

from holdfast.core.membership.standbys import Standbys, blames_machine
from holdfast.model.action import Dismiss
from holdfast.model.alarm import Kind
from holdfast.model.event import Limits, Outcome, Ready
from holdfast.model.job_and_seats import Job


def standbys(*, probes: bool = False, checks: bool = False) -> Standbys:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, probes=probes, checks=checks)
    return Standbys(job, Limits(), count(1))


def test_an_eviction_blames_the_machine() -> None:
    [dismiss] = standbys().evict_node("n0", Kind.SILENCE, 1, examine=False)
    assert blames_machine(dismiss.reason)


@pytest.mark.parametrize(("failed", "blames"), [({"n0": "gemm"}, True), ({}, False)])
def test_an_examination_blames_the_machine_if_something_is_wrong_with_it(failed: dict[str, str], blames: bool) -> None:
    unseated = standbys(probes=True)
    unseated.on_ready(Ready(node="n0", nproc=1, host="h0"), 0)
    unseated.admit_node("n0")
    unseated.evict_node("n0", Kind.CRASH, 1, examine=True)
    [probe] = unseated.examine_evicted(frozenset())
    _, actions = unseated.on_examined(1.0, Outcome(action=probe.id, ok=True, failed=failed))
    [dismiss] = [one for one in actions if isinstance(one, Dismiss)]
    assert blames_machine(dismiss.reason) is blames


def test_a_failed_check_blames_the_machine() -> None:
    unseated = standbys(checks=True)
    [probe] = unseated.on_ready(Ready(node="n0", nproc=1, host="h0"), 1)
    _, [dismiss] = unseated.on_checked(1.0, Outcome(action=probe.id, ok=True, failed={"n0": "gemm"}))
    assert isinstance(dismiss, Dismiss) and blames_machine(dismiss.reason)


def test_a_node_that_is_late_or_not_needed_any_more_blames_nobody() -> None:
    for reason in ("not ready within 300 s", "the job has ended", "drain by me", "it had left the job before"):
        assert not blames_machine(reason)
