"""Every rung of the ladder, and the bound of each."""

import msgspec
import pytest

from holdfast.core.incident.first_cause import NOT_STARTED
from holdfast.core.incident.incident_case import IncidentCase, PastFailure
from holdfast.core.incident.ladder import GAVE_UP, find_verdict, verdict_after_probe
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy

CRASH = Alarm(
    kind=Kind.CRASH, at=100.0, suspects=("n1",), ranks=(2,), code=-11, klass="process_crash_signal", group="framework",
    reason="was killed by SIGSEGV", signature="process_crash_signal -11",
)  # fmt: skip
SCRIPT = msgspec.structs.replace(CRASH, code=1, klass="python_exception", group="script")
ECHO = msgspec.structs.replace(CRASH, code=1, klass="peer_connection_lost", group="infrastructure")
SILENCE = Alarm(kind=Kind.SILENCE, at=100.0, suspects=("n1",), reason="has been silent for 3 s")
UNSTARTED = msgspec.structs.replace(CRASH, code=None, ranks=(), klass=NOT_STARTED, group="infrastructure")


def case(cause: Alarm, **changes: object) -> IncidentCase:
    fresh = IncidentCase(
        cause=cause, step=50, counted=False, ever=True, past=(), since=-1700.0, rounds=0, attempts=3,
        restarts=0, max_restarts=None, replaceable=True,
    )  # fmt: skip
    return msgspec.structs.replace(fresh, **changes)


def past(*steps: int, node: str = "n1", at: float = 0.0, counted: bool = False) -> tuple[PastFailure, ...]:
    return tuple(PastFailure(signature="s", nodes=(node,), at=at, step=step, counted=counted) for step in steps)


def test_silence_evicts_whatever_else_is_known() -> None:
    for rounds in (0, 99):
        verdict = find_verdict(case(SILENCE, max_restarts=0, rounds=rounds, replaceable=False))
        assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))


def test_a_first_crash_restarts_in_place() -> None:
    assert find_verdict(case(CRASH)).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, ever=False, step=-1)).remedy is Remedy.RESTART


def test_the_same_crash_on_the_same_node_evicts() -> None:
    verdict = find_verdict(case(CRASH, past=past(10)))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("on another node", {"past": past(10, node="n2")}),
        ("outside the window", {"past": past(10, at=-1800.0)}),
        ("nobody can take its place", {"past": past(10), "replaceable": False}),
        ("only an echo", {"past": past(10), "cause": ECHO}),
        ("ranks of other nodes said the same", {"past": past(10), "elsewhere": True}),
    ],
)
def test_a_crash_that_is_not_the_nodes_fault(why: str, changes: dict[str, object]) -> None:
    assert find_verdict(case(**{"cause": CRASH, **changes})).remedy is Remedy.RESTART, why  # type: ignore[arg-type]


def test_eviction_is_not_capped() -> None:
    assert find_verdict(case(CRASH, past=past(10), max_restarts=0)).remedy is Remedy.EVICT


def test_a_node_that_starts_no_ranks_is_evicted_at_once() -> None:
    assert find_verdict(case(UNSTARTED)).remedy is Remedy.EVICT
    assert find_verdict(case(UNSTARTED, replaceable=False)).remedy is Remedy.RESTART


@pytest.mark.parametrize("cause", [CRASH, SCRIPT, ECHO, UNSTARTED])
def test_failures_in_a_row_are_bounded(cause: Alarm) -> None:
    assert find_verdict(case(cause, rounds=2)).remedy is not Remedy.GIVE_UP
    assert find_verdict(case(cause, rounds=3)).code == GAVE_UP
    assert find_verdict(case(cause, rounds=3, max_restarts=9)).remedy is not Remedy.GIVE_UP


def test_the_same_crash_without_getting_further_is_bounded() -> None:
    for at in (0.0, -99999.0):  # the window does not hide a crash that takes longer to come
        elsewhere = past(60, 40, 55, node="n2", at=at)
        assert find_verdict(case(CRASH, past=elsewhere[:2])).remedy is Remedy.RESTART
        verdict = find_verdict(case(CRASH, past=elsewhere))
        assert (verdict.remedy, verdict.code) == (Remedy.GIVE_UP, GAVE_UP)
        assert "4 times" in verdict.reason


def test_what_failed_before_the_job_got_further_is_forgiven() -> None:
    elsewhere = past(60, 40, 55, 30, 20, node="n2")
    assert find_verdict(case(CRASH, past=elsewhere, trained_s=1.0)).remedy is Remedy.RESTART


def test_to_get_further_is_worth_a_tenth_of_what_the_restarts_took() -> None:
    elsewhere = past(20, 30, 40, node="n2")
    assert find_verdict(case(CRASH, past=elsewhere, trained_s=10.1, lost_s=100.0)).remedy is Remedy.RESTART
    for cause in (CRASH, SCRIPT):
        verdict = find_verdict(case(cause, past=elsewhere, trained_s=10.0, lost_s=100.0))
        assert (verdict.remedy, verdict.code) == (Remedy.GIVE_UP, GAVE_UP), "one step more each time would never end"


def test_a_job_that_loses_more_than_it_gains_ends_whatever_fails() -> None:
    assert find_verdict(case(CRASH, luckless=29)).remedy is Remedy.RESTART
    for cause in (CRASH, SCRIPT):
        assert find_verdict(case(cause, luckless=30)).code == GAVE_UP
    told = case(CRASH, luckless=30, max_restarts=99)
    assert find_verdict(told).remedy is Remedy.RESTART, "the user has said how often"
    assert find_verdict(case(SILENCE, luckless=30)).remedy is Remedy.EVICT


def test_a_failure_that_has_cost_more_than_a_look_is_looked_into() -> None:
    elsewhere = past(20, 30, node="n2")
    gained = {"may_probe": True, "trained_s": 9999.0}
    assert find_verdict(case(CRASH, past=elsewhere, lost_s=119.0, **gained)).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, past=elsewhere, lost_s=120.0, **gained)).remedy is Remedy.PROBE
    looked = (*elsewhere, msgspec.structs.replace(elsewhere[0], probed=True, lost_s=120.0))
    again = case(CRASH, past=looked, lost_s=999.0, **gained)
    assert find_verdict(again).remedy is Remedy.RESTART, "once within the window"
    for lost_s, remedy in ((239.0, Remedy.RESTART), (240.0, Remedy.ROLLBACK)):
        verdict = find_verdict(case(CRASH, past=looked, lost_s=lost_s, release=2, back_to=1, **gained))
        assert verdict.remedy is remedy, "and when that did not help, as much again later, the newest release goes"
    verdict = find_verdict(case(CRASH, past=looked, lost_s=240.0, may_replay=True, **gained))
    assert verdict.remedy is Remedy.REPLAY


def test_counted_steps_are_compared_by_how_many_were_made() -> None:
    def judged(step: int, *before: int) -> Remedy:
        return find_verdict(case(CRASH, counted=True, step=step, past=past(*before, node="n2", counted=True))).remedy

    assert judged(50, 1, 2, 3) is Remedy.RESTART  # it got much further than ever
    assert judged(50, 40, 60, 70) is Remedy.RESTART  # and so it does every time
    assert judged(50, 50, 50, 50) is Remedy.GIVE_UP  # the same work from the same state
    assert judged(2, 70, 3, 1, 2) is Remedy.GIVE_UP  # it no longer gets anywhere
    assert judged(2, 3, 1, 70) is Remedy.RESTART
    assert judged(50, *range(51, 81)) is Remedy.GIVE_UP  # nobody knows, and it is enough


@pytest.mark.parametrize(("code", "expected"), [(7, 7), (-9, 137), (-15, 143), (None, 1)])
def test_the_cap_ends_with_the_scripts_own_code(code: int | None, expected: int) -> None:
    cause = msgspec.structs.replace(CRASH, code=code)
    verdict = find_verdict(case(cause, restarts=2, max_restarts=2))
    assert (verdict.remedy, verdict.code) == (Remedy.GIVE_UP, expected)
    assert find_verdict(case(cause, restarts=1, max_restarts=2)).remedy is Remedy.RESTART


def test_user_code_never_evicts() -> None:
    assert find_verdict(case(SCRIPT, past=past(10))).remedy is Remedy.RESTART
    assert find_verdict(case(SCRIPT, past=past(50))).code == GAVE_UP


def test_user_code_that_fails_where_it_failed_before_needs_no_window() -> None:
    assert find_verdict(case(SCRIPT, past=past(50, at=-99999.0))).code == GAVE_UP
    assert find_verdict(case(SCRIPT, past=past(49, at=-99999.0))).remedy is Remedy.RESTART


def test_user_code_after_as_many_counted_steps_as_before_is_stuck() -> None:
    assert find_verdict(case(SCRIPT, counted=True, past=past(50, counted=True, at=-99999.0))).code == GAVE_UP
    assert find_verdict(case(SCRIPT, counted=True, past=past(49, 51, counted=True))).remedy is Remedy.RESTART
    assert find_verdict(case(SCRIPT, counted=True, past=past(*range(51, 81), counted=True))).code == GAVE_UP


LOST = Alarm(
    kind=Kind.HEALTH, at=100.0, suspects=("n1",), klass="gpu_lost_bus", reason="has lost GPU 3", hard=True,
    signature="s",
)  # fmt: skip
KILLED = Alarm(
    kind=Kind.LINES, at=100.0, suspects=("n1",), ranks=(2,), klass="host_oom_kill", group="framework", reason="oom",
    signature="s",
)  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.HEALTH, Kind.LINES])
def test_a_bad_machine_is_evicted_whatever_else_is_known(kind: Kind) -> None:
    for changes in ({}, {"rounds": 99}, {"max_restarts": 0}, {"ever": False}):
        verdict = find_verdict(case(msgspec.structs.replace(LOST, kind=kind), **changes))
        assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))


def test_a_bad_machine_that_nobody_can_replace() -> None:
    assert find_verdict(case(LOST, replaceable=False)).remedy is Remedy.RESTART
    assert find_verdict(case(LOST, replaceable=False, past=past(10))).remedy is Remedy.GIVE_UP
    evicted = tuple(msgspec.structs.replace(one, evicted=True) for one in past(10))
    back = find_verdict(case(LOST, replaceable=False, past=evicted))
    assert back.remedy is Remedy.RESTART, "it was evicted, came back as no other node was there, and was not tried yet"
    assert find_verdict(case(LOST, replaceable=False, rounds=3)).remedy is Remedy.GIVE_UP
    assert find_verdict(case(LOST, replaceable=False, max_restarts=0)).remedy is Remedy.GIVE_UP


def test_an_oom_kill_now_here_now_there_never_costs_a_node() -> None:
    assert find_verdict(case(KILLED)).remedy is Remedy.RESTART
    elsewhere = past(10, node="n2")
    assert find_verdict(case(KILLED, past=past(20) + elsewhere)).remedy is Remedy.RESTART, "it gets further each time"
    assert find_verdict(case(KILLED, past=past(50, node="n2"))).remedy is Remedy.GIVE_UP
    assert find_verdict(case(KILLED, past=past(20, 30) + elsewhere)).remedy is Remedy.GIVE_UP
    assert find_verdict(case(KILLED, max_restarts=0)).remedy is Remedy.GIVE_UP


def test_an_oom_kill_on_one_machine_twice_and_nowhere_else_evicts_it() -> None:
    verdict = find_verdict(case(KILLED, past=past(20)))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))
    assert find_verdict(case(KILLED, past=past(20, at=-1800.0))).remedy is Remedy.RESTART, "too long ago"
    assert find_verdict(case(KILLED, past=past(20), replaceable=False)).remedy is Remedy.RESTART


NAMED = Alarm(
    kind=Kind.REPLICA, at=100.0, suspects=("n1",), ranks=(2,), reason="has other parameters", signature="s", hard=True,
    not_after=40,
)  # fmt: skip
UNNAMED = msgspec.structs.replace(NAMED, suspects=("n1", "n2"), hard=False)


def test_a_replica_that_a_majority_names_is_evicted() -> None:
    verdict = find_verdict(case(NAMED))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))
    assert find_verdict(case(NAMED, replaceable=False)).remedy is Remedy.RESTART


def test_replicas_that_differ_without_a_majority_cost_no_node_however_often() -> None:
    assert find_verdict(case(UNNAMED)).remedy is Remedy.RESTART
    assert find_verdict(case(UNNAMED, past=past(40, at=50.0))).remedy is Remedy.RESTART
    assert find_verdict(case(UNNAMED, past=past(40, 40, 40, at=50.0))).code == GAVE_UP
    assert find_verdict(case(UNNAMED, max_restarts=1, restarts=1)).remedy is Remedy.GIVE_UP


# --- last words ------------------------------------------------------------------------------------------------------

ECC = msgspec.structs.replace(
    CRASH, klass="gpu_ecc_memory", group="infrastructure", action="evict_and_restart", confidence=0.95
)
OOM = msgspec.structs.replace(CRASH, klass="gpu_oom", group="framework", action="fix_config", confidence=0.9)
HUB = msgspec.structs.replace(
    CRASH, klass="hub_network_error", group="external", action="wait_external", confidence=0.9
)
COMPILE = msgspec.structs.replace(CRASH, klass="torch_compile_error", action="rollback_or_fix_code", confidence=0.9)
NAN = Alarm(kind=Kind.LOSS, at=100.0, suspects=("n1",), ranks=(2,), reason="has a loss of nan", signature="loss nan")


def test_words_that_leave_no_doubt_evict_at_once() -> None:
    assert find_verdict(case(ECC)).remedy is Remedy.EVICT
    assert find_verdict(case(msgspec.structs.replace(ECC, confidence=0.85))).remedy is Remedy.RESTART
    assert find_verdict(case(ECC, replaceable=False)).remedy is Remedy.RESTART


def test_a_service_outside_is_waited_for_longer_and_longer() -> None:
    waits = [find_verdict(case(HUB, past=past(*[50] * times, at=90.0), rounds=times)).wait_s for times in range(8)]
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert find_verdict(case(HUB, past=past(*[50] * 8, at=90.0), rounds=8)).remedy is Remedy.GIVE_UP


def test_code_of_a_framework_that_cannot_run_costs_no_node() -> None:
    assert find_verdict(case(COMPILE)).remedy is Remedy.RESTART
    assert find_verdict(case(COMPILE, past=past(50, at=90.0))).remedy is Remedy.GIVE_UP


# --- trying nodes ----------------------------------------------------------------------------------------------------


def test_nodes_are_tried_once_when_it_comes_again() -> None:
    first = find_verdict(case(NAN, may_probe=True))
    assert first.remedy is Remedy.RESTART
    again = find_verdict(case(NAN, may_probe=True, past=past(50, at=90.0)))
    assert (again.remedy, again.level) == (Remedy.PROBE, 3)
    tried_before = (*past(50, at=80.0), msgspec.structs.replace(past(50, at=90.0)[0], probed=True))
    assert find_verdict(case(NAN, may_probe=True, past=tried_before)).remedy is Remedy.RESTART
    assert find_verdict(case(NAN, may_probe=True, past=tried_before, trained_s=1.0)).remedy is Remedy.RESTART
    assert find_verdict(case(ECHO, may_probe=True, past=past(50, at=90.0))).level == 2  # nobody to blame


def test_a_second_death_while_the_job_comes_back_is_restarted_first() -> None:
    elsewhere = past(50, node="n2", at=99.0)
    for rounds, remedy in ((1, Remedy.RESTART), (2, Remedy.PROBE)):
        assert find_verdict(case(CRASH, may_probe=True, past=elsewhere, rounds=rounds)).remedy is remedy
    soon = past(49, node="n2", at=99.0)  # one step was made since
    assert find_verdict(case(CRASH, may_probe=True, past=soon)).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, may_probe=True, past=(*past(48, node="n3", at=98.0), *soon))).remedy is Remedy.PROBE
    assert find_verdict(case(NAN, may_probe=True, past=elsewhere, rounds=1)).remedy is Remedy.PROBE
    assert find_verdict(case(CRASH, may_probe=True, past=elsewhere, rounds=1, lost_s=120.0)).remedy is Remedy.PROBE


@pytest.mark.parametrize("cause", [SCRIPT, OOM, HUB, COMPILE, UNSTARTED])
def test_nobody_is_tried_for_what_is_explained(cause: Alarm) -> None:
    for times in range(4):
        verdict = find_verdict(case(cause, may_probe=True, may_replay=True, past=past(*[40] * times, at=90.0)))
        assert verdict.remedy not in (Remedy.PROBE, Remedy.REPLAY)


def test_the_work_is_done_again_when_probes_found_nobody() -> None:
    probed = msgspec.structs.replace(past(50, at=90.0)[0], probed=True)
    stubborn = case(NAN, may_probe=True, may_replay=True, past=(*past(50, at=80.0), probed))
    assert find_verdict(stubborn).remedy is Remedy.REPLAY
    replayed = msgspec.structs.replace(probed, probed=False, replayed=True)
    at_last = msgspec.structs.replace(stubborn, past=(*past(50, at=80.0), probed, replayed))
    assert find_verdict(at_last).remedy is Remedy.GIVE_UP


def test_what_trying_found() -> None:
    again = case(NAN, may_probe=True, past=past(50, at=90.0))
    found = verdict_after_probe(again, {"n3": "computes wrongly"}, "", replaceable=True)
    assert (found.remedy, found.nodes) == (Remedy.EVICT, ("n3",))
    kept = verdict_after_probe(again, {"n3": "computes wrongly"}, "", replaceable=False)
    assert kept.remedy is Remedy.RESTART and "n3 computes wrongly" in kept.reason
    nobody = verdict_after_probe(again, {}, "all 2 worlds passed", replaceable=True)
    assert nobody.remedy is Remedy.RESTART and "all 2 worlds passed" in nobody.reason


def test_guesses_are_bounded_and_proof_is_not() -> None:
    same = past(40, at=90.0)
    assert find_verdict(case(CRASH, past=same, may_evict=1)).remedy is Remedy.EVICT
    assert find_verdict(case(CRASH, past=same, may_evict=0)).remedy is Remedy.RESTART
    assert find_verdict(case(CRASH, past=past(*[50] * 3, at=90.0), may_evict=0)).remedy is Remedy.GIVE_UP
    assert find_verdict(case(ECC, may_evict=0)).remedy is Remedy.EVICT
    hang = Alarm(kind=Kind.HANG, at=100.0, suspects=("n1",), ranks=(2,), reason="is stopped", hard=True)
    assert find_verdict(case(hang, standbys=1, may_evict=0)).remedy is Remedy.EVICT
    slow = msgspec.structs.replace(hang, kind=Kind.SLOW, hard=False)
    assert find_verdict(case(slow, standbys=1, may_evict=0)).remedy is Remedy.RESTART


NAN = Alarm(kind=Kind.LOSS, at=100.0, suspects=("n1",), ranks=(2,), reason="nan", signature="s", not_after=50)
HANG = Alarm(kind=Kind.HANG, at=100.0, suspects=("n1",), ranks=(2,), reason="stands", signature="s")


def test_code_on_trial_goes_back_before_any_machine_goes() -> None:
    fresh: dict[str, object] = {"release": 2, "back_to": 1, "trial": True, "standbys": 4}
    for cause in (SCRIPT, HANG):
        verdict = find_verdict(case(cause, **fresh))
        assert (verdict.remedy, verdict.to, verdict.nodes) == (Remedy.ROLLBACK, 1, ())
    assert find_verdict(case(SCRIPT, ever=False, step=-1, **fresh)).remedy is Remedy.ROLLBACK
    for cause in (CRASH, NAN):
        assert find_verdict(case(cause, **fresh)).remedy is Remedy.RESTART  # many faults are transient
        assert find_verdict(case(cause, rounds=1, **fresh)).remedy is Remedy.ROLLBACK
        assert find_verdict(case(cause, mixed=True, **fresh)).remedy is Remedy.ROLLBACK
        under = tuple(msgspec.structs.replace(p, release=2) for p in past(40, node="n2"))
        assert find_verdict(case(cause, past=under, **fresh)).remedy is Remedy.ROLLBACK
        before = tuple(msgspec.structs.replace(p, release=1) for p in past(40, node="n2"))
        assert (
            find_verdict(case(cause, past=before, **fresh)).remedy is Remedy.RESTART
        )  # the old one failed like that, too


def test_proof_against_a_machine_acquits_the_code() -> None:
    for cause in (SILENCE, LOST, msgspec.structs.replace(HANG, hard=True)):
        verdict = find_verdict(
            case(cause, back_to=1, trial=True, mixed=cause is not HANG and not cause.ranks, standbys=1)
        )
        assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n1",))


def test_the_newest_release_goes_before_a_person_is_asked() -> None:
    stuck = {"past": past(50, 50, 50, node="n2", at=1.0), "back_to": 1, "release": 2}
    assert find_verdict(case(CRASH, **stuck)).remedy is Remedy.ROLLBACK
    assert find_verdict(case(CRASH, **(stuck | {"back_to": 0}))).code == GAVE_UP
    rolled = tuple(msgspec.structs.replace(p, rolled=True) for p in past(50, node="n2", at=1.0))
    assert find_verdict(case(CRASH, past=(*past(50, 50, node="n2", at=1.0), *rolled))).remedy is Remedy.RESTART


def test_a_newer_release_that_waits_is_tried_before_giving_up_or_going_back() -> None:
    assert find_verdict(case(SCRIPT, ever=False, step=-1, update=True)).remedy is Remedy.RESTART
    assert find_verdict(case(SCRIPT, back_to=1, trial=True, update=True)).remedy is Remedy.RESTART


def test_a_batch_is_left_out_when_the_loss_fails_at_the_same_step_again() -> None:
    again = past(50, at=1.0)
    verdict = find_verdict(case(NAN, past=again, skippable=True))
    assert verdict.remedy is Remedy.SKIP and [(s.first, s.last) for s in verdict.skips] == [(51, 51)]
    assert find_verdict(case(NAN, past=again)).remedy is Remedy.RESTART
    assert find_verdict(case(NAN, past=past(40, at=1.0), skippable=True)).remedy is Remedy.RESTART
    assert find_verdict(case(NAN, past=again, skippable=True, may_probe=True)).remedy is Remedy.PROBE  # machines first
    spike = msgspec.structs.replace(NAN, signature="spike loss", policy="rewind-and-skip:2")
    assert [(s.first, s.last) for s in find_verdict(case(spike, skippable=True)).skips] == [(51, 52)]
    assert find_verdict(case(spike)).remedy is Remedy.RESTART


def test_lost_nodes_are_bounded_even_with_proof() -> None:
    assert find_verdict(case(SILENCE, may_lose=0)).code == GAVE_UP


def test_a_little_slowness_is_looked_for_where_the_job_is_slow() -> None:
    for kind, least in ((Kind.SLOW, 0.0), (Kind.CRASH, 0.2)):
        cause = msgspec.structs.replace(ECHO, kind=kind, suspects=())
        verdict = find_verdict(case(cause, may_probe=True, past=past(50, 50, node="n3"), trained_s=1.0, lost_s=500.0))
        assert (verdict.remedy, verdict.least) == (Remedy.PROBE, least)
