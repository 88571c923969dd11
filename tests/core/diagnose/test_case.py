"""The rungs that part what a machine did from what the job or its code did: scarcity, releases, timeouts, GPUs."""

import msgspec
import pytest

from holdfast.core.diagnose.case import Past
from holdfast.core.diagnose.ladder import GAVE_UP, judge
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.verdict import Remedy
from tests.core.diagnose.test_ladder import CRASH, SCRIPT, case, past


@pytest.mark.parametrize("klass", ["host_oom_kill", "disk_full"])
def test_a_machine_that_alone_runs_short_goes_at_the_second_time(klass: str) -> None:
    short = msgspec.structs.replace(CRASH, klass=klass, action="fix_config", confidence=0.8, signature="s")
    assert judge(case(short)).remedy is Remedy.RESTART
    assert judge(case(short, past=past(50))).nodes == ("n1",), "even if the job did not get further"
    assert judge(case(short, past=past(10, node="n2"))).remedy is Remedy.RESTART
    assert judge(case(short, past=past(50, node="n2"))).code == GAVE_UP, "a disk that all share: who came next has it"
    assert judge(case(short, past=past(50), replaceable=False)).code == GAVE_UP


def test_two_machines_that_run_short_at_once_do_not_hide_each_other() -> None:
    short = msgspec.structs.replace(CRASH, klass="disk_full", action="fix_config", confidence=0.8, signature="s")
    both = past(10) + past(20, node="n2")
    assert judge(case(short, past=both, nodes=1200)).nodes == ("n1",)
    assert judge(case(short, past=both, nodes=8)).remedy is Remedy.RESTART, "among eight it may be chance"
    often = past(10) + past(*range(20, 36), node="n2")
    assert judge(case(short, past=often, nodes=1200)).code == GAVE_UP


def test_code_that_fails_twice_in_a_release_of_the_last_day_goes_back() -> None:
    def before(*releases: int, at: float = 0.0) -> tuple[Past, ...]:
        return tuple(msgspec.structs.replace(past(10, at=at)[0], release=release) for release in releases)

    assert judge(case(SCRIPT, release=2, back_to=1)).remedy is Remedy.RESTART, "once may be the data"
    verdict = judge(case(SCRIPT, release=2, back_to=1, past=before(2)))
    assert (verdict.remedy, verdict.to) == (Remedy.ROLLBACK, 1), "although it gets further each time"
    assert judge(case(SCRIPT, release=2, back_to=1, past=before(1, 2))).remedy is Remedy.RESTART, "the old one did too"
    assert judge(case(SCRIPT, release=2, past=before(2))).remedy is Remedy.RESTART, "nothing to go back to"
    assert judge(case(SCRIPT, release=2, back_to=1, past=before(2, at=-1800.0))).remedy is Remedy.RESTART
    assert judge(case(CRASH, release=2, back_to=1, past=before(2))).remedy is Remedy.EVICT, "a node may be to blame"
    waits = judge(case(SCRIPT, release=2, back_to=1, past=before(2), update=True))
    assert waits.remedy is Remedy.RESTART, "a newer one is tried first"


TIMED_OUT = msgspec.structs.replace(CRASH, code=1, klass="nccl_timeout", group="unknown", confidence=0.5)
RAISED = msgspec.structs.replace(
    CRASH, code=1, klass="cuda_illegal_access", action="run_diagnostics", confidence=0.84, signature="s"
)


def test_where_a_timeout_had_to_be_waited_for_nodes_are_tried_at_once() -> None:
    verdict = judge(case(TIMED_OUT, may_probe=True))
    assert verdict.remedy is Remedy.PROBE and "a timeout had to be waited for" in verdict.reason
    looked = tuple(msgspec.structs.replace(p, probed=True) for p in past(10))
    assert judge(case(TIMED_OUT, may_probe=True, past=looked)).remedy is Remedy.RESTART, "once"
    assert judge(case(TIMED_OUT)).remedy is Remedy.RESTART
    assert judge(case(CRASH, may_probe=True)).remedy is Remedy.RESTART
    lost = Alarm(kind=Kind.HANG, at=100.0, suspects=(), reason="it stands", signature="hang ()")
    assert judge(case(lost, may_probe=True)).remedy is Remedy.RESTART, "seen early, and nobody to evict"


def test_the_node_of_a_gpu_that_failed_is_exchanged_the_first_time() -> None:
    spare = {"may_probe": True, "standbys": 2}
    verdict = judge(case(RAISED, **spare))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))
    assert "examined" in verdict.reason and case(RAISED).is_guess
    elsewhere = past(10, 20, 30, node="n2")
    assert judge(case(RAISED, **spare, past=elsewhere, nodes=16384)).nodes == ("n1",), "so many fail at the same time"
    assert judge(case(RAISED, **spare, past=elsewhere + elsewhere, nodes=16384)).remedy is not Remedy.EVICT
    assert not case(RAISED, **spare, past=elsewhere, nodes=16384, back_to=1).may_exchange, "a new release may be it"


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("it came on another node before", {"past": past(10, node="n2")}),
        ("the last standby is for nodes that are surely lost", {"standbys": 1}),
        ("nobody could examine it", {"may_probe": False}),
        ("nobody can take its place", {"replaceable": False}),
        ("a release is on trial", {"trial": True, "back_to": 1}),
        ("no step was ever made", {"ever": False}),
        ("it fails without a step in between", {"rounds": 1}),
        ("as many went within the hour as may", {"may_evict": 0}),
        ("it is another kind of crash", {"cause": CRASH}),
    ],
)
def test_a_gpu_that_failed_and_is_kept(why: str, changes: dict[str, object]) -> None:
    spare = {"cause": RAISED, "may_probe": True, "standbys": 2}
    assert judge(case(**{**spare, **changes})).remedy is not Remedy.EVICT, why  # type: ignore[arg-type]
