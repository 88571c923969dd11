"""The rungs that part what a machine did from what the job or its code did: scarcity, releases, timeouts."""

from itertools import product

import msgspec

from holdfast.core.incident.incident_case import PastFailure
from holdfast.core.incident.ladder import GAVE_UP, find_verdict
from holdfast.model.detector_alarm import GPU_HANG, Alarm, Kind
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import CRASH, SCRIPT, case, past

SHORT = msgspec.structs.replace(CRASH, klass="host_oom_kill", action="fix_config", confidence=0.8, signature="s")


def test_a_machine_that_alone_runs_short_of_memory_goes_at_the_second_time() -> None:
    assert find_verdict(case(SHORT)).remedy is Remedy.RESTART
    assert find_verdict(case(SHORT, past=past(50))).nodes == ("n1",), "even if the job did not get further"
    assert find_verdict(case(SHORT, past=past(10, node="n2"))).remedy is Remedy.RESTART
    assert find_verdict(case(SHORT, past=past(50, node="n2"))).code == GAVE_UP, "not the machine"
    assert find_verdict(case(SHORT, past=past(50), replaceable=False)).code == GAVE_UP


def test_a_full_disk_is_no_machines_fault() -> None:
    """It may be one that all share, and that the node of rank 0 alone writes to."""
    full = msgspec.structs.replace(SHORT, klass="disk_full")
    assert find_verdict(case(full, past=past(50))).code == GAVE_UP


def test_two_machines_that_run_short_at_once_do_not_hide_each_other() -> None:
    both = past(10) + past(20, node="n2")
    assert find_verdict(case(SHORT, past=both, nodes=1200)).nodes == ("n1",)
    assert find_verdict(case(SHORT, past=both, nodes=8)).remedy is Remedy.RESTART, "among eight it may be chance"
    often = past(10) + past(*range(20, 36), node="n2")
    assert find_verdict(case(SHORT, past=often, nodes=1200)).code == GAVE_UP


def test_code_that_fails_twice_in_a_release_of_the_last_day_goes_back() -> None:
    def before(*releases: int, at: float = 0.0) -> tuple[PastFailure, ...]:
        return tuple(msgspec.structs.replace(past(10, at=at)[0], release=release) for release in releases)

    assert find_verdict(case(SCRIPT, release=2, back_to=1)).remedy is Remedy.RESTART, "once may be the data"
    verdict = find_verdict(case(SCRIPT, release=2, back_to=1, past=before(2)))
    assert (verdict.remedy, verdict.to) == (Remedy.ROLLBACK, 1), "although it gets further each time"
    assert find_verdict(case(SCRIPT, release=2, back_to=1, past=before(1, 2))).remedy is Remedy.RESTART, (
        "the old one did too"
    )
    assert find_verdict(case(SCRIPT, release=2, past=before(2))).remedy is Remedy.RESTART, "nothing to go back to"
    assert find_verdict(case(SCRIPT, release=2, back_to=1, past=before(2, at=-1800.0))).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, release=2, back_to=1, past=before(2))).remedy is Remedy.EVICT, (
        "a node may be to blame"
    )
    waits = find_verdict(case(SCRIPT, release=2, back_to=1, past=before(2), update=True))
    assert waits.remedy is Remedy.RESTART, "a newer one is tried first"


TIMED_OUT = msgspec.structs.replace(CRASH, code=1, klass="nccl_timeout", group="unknown", confidence=0.5)


def test_where_a_timeout_had_to_be_waited_for_nodes_are_tried_at_once() -> None:
    verdict = find_verdict(case(TIMED_OUT, may_probe=True))
    assert verdict.remedy is Remedy.PROBE
    looked = tuple(msgspec.structs.replace(p, probed=True) for p in past(10))
    assert find_verdict(case(TIMED_OUT, may_probe=True, past=looked)).remedy is Remedy.RESTART, "once"
    assert find_verdict(case(TIMED_OUT)).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, may_probe=True)).remedy is Remedy.RESTART
    lost = Alarm(kind=Kind.HANG, at=100.0, suspects=(), reason="it stands", signature="hang ()")
    assert find_verdict(case(lost, may_probe=True)).remedy is Remedy.RESTART, "seen early, and nobody to evict"


def test_who_is_waited_for_wherever_its_rank_sits_is_no_bad_machine() -> None:
    """Rank 0 saves for longer than collectives wait, again and again: nodes must not go one after the other for it."""
    hang = Alarm(kind=Kind.HANG, at=100.0, suspects=("n1",), ranks=(0,), reason="is waited for", signature="hang (0,)")
    assert find_verdict(case(hang, standbys=2)).nodes == ("n1",)
    moved = past(10, node="n0")
    assert find_verdict(case(hang, standbys=2, past=moved)).remedy is Remedy.RESTART
    assert find_verdict(case(hang, standbys=2, past=moved + past(20))).remedy is Remedy.RESTART, "nor for coming again"
    stopped = msgspec.structs.replace(hang, hard=True)
    assert find_verdict(case(stopped, standbys=2, past=moved)).nodes == ("n1",), "a stopped process is another matter"
    other = tuple(msgspec.structs.replace(p, hard=True) for p in moved)
    assert find_verdict(case(hang, standbys=2, past=other)).nodes == ("n1",), "and so was one before"


def test_a_gpu_that_stands_is_a_machines_fault_once_and_then_the_codes() -> None:
    signature = f"{GPU_HANG} (0,)"
    hang = Alarm(
        kind=Kind.HANG, at=100.0, suspects=("n1",), ranks=(0,), reason="stands", signature=signature, hard=True
    )
    assert find_verdict(case(hang, standbys=2)).nodes == ("n1",)
    elsewhere = tuple(msgspec.structs.replace(p, hard=True) for p in past(10, node="n0"))
    assert find_verdict(case(hang, standbys=2, past=elsewhere)).remedy is Remedy.RESTART, "another one stood there too"
    here = tuple(msgspec.structs.replace(p, hard=True) for p in past(10))
    assert find_verdict(case(hang, standbys=2, past=here)).nodes == ("n1",), "the same machine again"


def test_a_job_that_is_only_slow_is_neither_ended_nor_left_without_a_node() -> None:
    slow = Alarm(kind=Kind.SLOW, at=100.0, suspects=("n1",), ranks=(2,), reason="is late", signature="slow (2, 3)")
    assert find_verdict(case(slow, standbys=1)).nodes == ("n1",)
    for changes in ({"max_restarts": 0}, {"rounds": 9}, {"past": past(50, 50, 50)}):
        verdict = find_verdict(case(slow, standbys=0, **changes))
        assert (verdict.remedy, verdict.nodes) == (Remedy.RESTART, ()), "its standby was lost while the job stopped"


def test_memory_that_runs_short_wherever_a_rank_sits_is_no_machines_fault() -> None:
    before = past(10, 20, node="n0") + past(30)
    assert find_verdict(case(SHORT, past=before, nodes=16384)).remedy is not Remedy.EVICT


def test_only_one_node_goes_for_a_failure_that_comes_again_without_it() -> None:
    """A bug in the user's code would take one machine after the other, each of them twice."""
    gone = past(10, 11, node="n4")
    gone = (gone[0], msgspec.structs.replace(gone[1], evicted=True, ranks=(2,)))
    verdict = find_verdict(case(CRASH, past=(*gone, *past(12)), trained_s=900.0))
    assert (verdict.remedy, verdict.nodes) == (Remedy.RESTART, ())
    assert (
        verdict.reason == "the rank failed so again without n4, evicted for it: no node is to blame: restarted in place"
    )
    assert (
        find_verdict(case(CRASH, past=(*gone, *past(12)), may_probe=True, trained_s=900.0, lost_s=300.0)).remedy
        is Remedy.PROBE
    )
    assert find_verdict(case(CRASH, past=(*past(10, node="n4"), *past(12)), nodes=1200)).remedy is Remedy.EVICT
    back = (gone[0], msgspec.structs.replace(gone[1], nodes=("n1",), evicted=True))
    assert find_verdict(case(CRASH, past=(*back, *past(12)), nodes=1200)).remedy is Remedy.EVICT, "it was this one"
    other = (gone[0], msgspec.structs.replace(gone[1], ranks=(7,)))
    twice = case(CRASH, past=(*other, *past(12)), nodes=1200)
    assert find_verdict(twice).remedy is Remedy.EVICT, "another rank, another machine"
    stuck = (*gone, *past(50, 50, 50))
    assert find_verdict(case(CRASH, past=stuck)).code == GAVE_UP


def test_a_job_that_gets_no_further_replaces_the_node_that_failed_twice_before_it_is_given_up() -> None:
    """Among eight nodes twice may be chance, and was none in five of six simulated jobs that had ended by it."""
    others = past(50, 50, node="n4")
    assert find_verdict(case(CRASH, past=(*others[:1], *past(50)), nodes=8)).remedy is Remedy.RESTART
    verdict = find_verdict(case(CRASH, past=(*others, *past(50)), nodes=8))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))
    assert verdict.reason == "the same failure 4 times without progress, again on n1: evicted"
    for told in (
        case(CRASH, past=(*others, *past(50)), nodes=8, replaceable=False),
        case(CRASH, past=(*others, *past(50, node="n5")), nodes=8),
        case(CRASH, past=(msgspec.structs.replace(others[0], evicted=True, ranks=CRASH.ranks), *others, *past(50))),
    ):
        assert find_verdict(told).code == GAVE_UP


def test_a_bug_that_strikes_now_here_now_there_costs_no_more_than_one_machine() -> None:
    """Whatever the order in which six failures strike four nodes; a Python exception costs none."""
    for cause, most in ((SCRIPT, 0), (CRASH, 1), (msgspec.structs.replace(CRASH, code=1, klass="", group=""), 1)):
        for order in product(range(4), repeat=6):
            seats, failed, evicted = ["n0", "n1", "n2", "n3"], tuple[PastFailure, ...](), 0
            for step, seat in enumerate(order):
                struck = msgspec.structs.replace(cause, suspects=(seats[seat],), ranks=(seat,))
                verdict = find_verdict(case(struck, past=failed, step=step, nodes=4, trained_s=100.0 * step))
                gone = verdict.remedy is Remedy.EVICT
                one = msgspec.structs.replace(past(step, node=seats[seat])[0], evicted=gone, ranks=(seat,))
                failed = (*failed, msgspec.structs.replace(one, trained_s=100.0 * step))
                evicted += gone
                seats[seat] = f"standby {step}" if gone else seats[seat]
            assert evicted <= most, (cause.klass, order)
    verdict = find_verdict(case(CRASH, past=(*past(10, node="n4"), *past(12)), nodes=4, trained_s=900.0))
    assert verdict.reason == "it came on n4, too: no node is to blame: restarted in place"
