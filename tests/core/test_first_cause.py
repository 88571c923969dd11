"""Which alarm is the first cause, and what is kept of a thousand of them."""

import itertools

import msgspec

from holdfast.core.detect import nonfinite_loss
from holdfast.core.incident import incident_text
from holdfast.core.incident.cause_name import record_label
from holdfast.core.incident.first_cause import (
    ECHOES,
    first_cause,
    is_echo,
    is_told_elsewhere,
    list_alike,
    list_other_causes,
)
from holdfast.core.incident.incident_text import UNORDERED
from holdfast.core.incident.open_incident import KEPT_ALARMS, Incident
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record, Remedy, Verdict
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Loss


def crash(at: float, node: str = "n0", rank: int = 0, klass: str = "process_crash_signal") -> Alarm:
    return Alarm(kind=Kind.CRASH, at=at, suspects=(node,), ranks=(rank,), reason="failed", klass=klass, signature=klass)


def echo(at: float, node: str = "n0", rank: int = 0) -> Alarm:
    return crash(at, node, rank, klass="peer_connection_lost")


def silence(at: float, node: str = "n0") -> Alarm:
    return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason="silent", signature=f"silence {node}")


def incident() -> Incident:
    return Incident(number=1, generation=1, opened_at=10.0, good_step=5, good_at=9.0, counted=False)


def test_the_earliest_cause_counts_whatever_the_order_of_hearing() -> None:
    cause = crash(10.0, "n1", 3)
    alarms = [cause, crash(10.1, "n0", 1), echo(9.9), echo(10.2, "n2")]
    for order in itertools.permutations(alarms):
        assert first_cause(list(order)) is cause


def test_of_equally_early_causes_the_lowest_rank_counts() -> None:
    assert first_cause([crash(10.0, "n1", 3), crash(10.0, "n0", 1)]).ranks == (1,)


def test_echoes_count_only_among_themselves() -> None:
    assert first_cause([echo(10.0, "n1"), echo(9.0, "n2")]).suspects == ("n2",)
    assert all(is_echo(crash(1.0, klass=klass)) for klass in ECHOES)
    assert not is_echo(silence(1.0))


def test_among_echoes_a_timeout_comes_before_the_peers_that_it_leaves_behind() -> None:
    timeout = crash(10.0, "n1", 1, klass="nccl_timeout")
    assert first_cause([echo(9.9, "n0"), timeout, echo(10.1, "n2")]) is timeout


def test_every_echo_is_told_in_words_of_its_own() -> None:
    said = {incident_text.describe_echo(crash(1.0, klass=klass)) for klass in ECHOES}
    assert said == {f"rank 0 on n0 {words}: looking for the first cause" for words in ECHOES.values()}
    assert len(said) == len(ECHOES)


def test_silence_beats_the_crashes_it_caused() -> None:
    # NCCL aborts its process when a peer is gone: that is no known echo, but comes after the lost node's last word.
    lost = silence(10.0, "n1")
    assert first_cause([crash(10.9, "n0"), echo(10.1, "n2"), lost]) is lost
    assert first_cause([crash(9.5, "n0"), lost]) is lost  # dated up to a beat too early


def test_a_crash_well_before_the_silence_is_the_cause() -> None:
    cause = crash(7.0, "n0")
    assert first_cause([silence(10.0, "n1"), cause, echo(7.1, "n2")]) is cause


def test_the_first_of_several_silences_counts() -> None:
    assert first_cause([silence(10.5, "n2"), silence(10.0, "n1")]).suspects == ("n1",)


def test_alarms_are_bounded_but_a_late_cause_is_kept() -> None:
    case = incident()
    for rank in range(1000):
        case.add_alarm(echo(10.0 + rank / 1000, rank=rank))
    cause = crash(9.9, "n7", 99)
    case.add_alarm(cause)
    assert len(case.alarms) == KEPT_ALARMS
    assert case.name_cause() is cause
    assert case.alarms[0] is cause
    assert case.echoes == 1000


def test_no_silence_is_ever_dropped() -> None:
    case = incident()
    for number in range(3 * KEPT_ALARMS):
        case.add_alarm(silence(10.0, f"n{number}"))
        case.add_alarm(crash(11.0 + number))
    assert len(case.silent) == 3 * KEPT_ALARMS
    assert case.echoes == 0, "an echo is a rank that has lost its peer"


def test_a_second_round_keeps_the_first_cause() -> None:
    case = incident()
    case.add_alarm(crash(10.0, "n1", 2))
    case.add_alarm(echo(10.1))
    case.name_cause()
    case.stopped_at, case.launched_at = 11.0, 12.0
    case.next_round(12.0)
    case.add_alarm(silence(13.0, "n0"))
    assert list(case.silent) == ["n0"]
    assert case.name_cause().kind is Kind.SILENCE
    assert list(case.silent) == []  # by now it is out, and if it is back it is not silent
    case.stopped_at = 14.0
    record = case.make_record(Verdict(remedy=Remedy.EVICT, reason="lost", nodes=("n0",)), 15.0, 3)
    assert (record.kind, record.suspects, record.ranks) == ("crash", ("n1",), (2,))
    assert (record.failures, record.echoes) == (2, 1)
    assert (record.stopped_at, record.launched_at, record.resumed_at) == (14.0, 15.0, 15.0), (
        "its launch was not told of"
    )


def test_a_state_that_is_gone_on_from_was_made() -> None:
    """A node that falls silent may have made a step, and given its state away, that nobody was told of."""
    verdict = Verdict(remedy=Remedy.EVICT, reason="lost", nodes=("n0",))
    for counted, first, expected in ((False, 5, 6), (True, 5, 5), (False, -1, -1)):
        case = incident()
        case.counted, case.good_step = counted, first
        case.add_alarm(silence(10.0))
        assert case.make_record(verdict, 15.0, 6).good_step == expected


def test_times_of_a_record_never_run_backwards() -> None:
    case = incident()
    case.add_alarm(crash(10.0))
    record = case.make_record(Verdict(remedy=Remedy.GIVE_UP, reason="stopped"), 0.0, None)
    times = (record.good_at, record.alarm_at, record.stopped_at, record.launched_at, record.resumed_at)
    assert times == tuple(sorted(times))
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


def test_of_losses_the_one_that_went_wrong_at_the_earliest_step_counts() -> None:
    def loss(at: float, rank: int, not_after: int | None) -> Alarm:
        return Alarm(kind=Kind.LOSS, at=at, suspects=("n0",), ranks=(rank,), reason="nan", not_after=not_after)

    told = [loss(3.0, 0, 30), loss(3.1, 2, 29), loss(3.2, 1, None)]
    for order in itertools.permutations(told):
        assert first_cause(list(order)) == told[1], "the others have it from the sum of the step before"
    assert first_cause([*told, crash(2.9)]).kind is Kind.CRASH


def test_a_bad_loss_that_ranks_report_alike_is_of_all_of_them() -> None:
    """The incident opens with whoever was heard first, and must not end with the name of another."""
    case = incident()
    for rank in (1, 0):
        reason = "has a loss of nan since step 30"
        node = (f"n{rank}",)
        case.add_alarm(Alarm(kind=Kind.LOSS, at=3.0, suspects=node, ranks=(rank,), reason=reason, not_after=29))
    case.name_cause()
    record = case.make_record(Verdict(remedy=Remedy.RESTART, reason=""), 15.0, 29)
    assert record.cause == "ranks 0-1 on n0 and n1 have a loss of nan since step 30"
    assert case.alarms[0].suspects == ("n0",), "the ladder judges one alarm"


def test_who_had_a_bad_loss_first_is_said_only_if_others_had_it_later() -> None:
    def of_rank(rank: int, step: int) -> Alarm:
        told = Loss(node=f"n{rank}", generation=1, rank=rank, step=step, loss=float("nan"), at=3.0, numbered=True)
        return nonfinite_loss.alarm_of(told)

    alone = of_rank(1, 30)
    assert incident_text.describe_round(alone) == "rank 1 on n1 tells of a loss of nan since step 30"
    assert named({}, alone).cause == "rank 1 on n1 tells of a loss of nan since step 30"
    assert named({}, of_rank(0, 31), alone).cause == "rank 1 on n1 had a loss of nan first, since step 30"
    assert named({}, of_rank(0, 30), alone).cause == "ranks 0-1 on n0 and n1 have a loss of nan since step 30"


def test_a_fault_that_a_rank_alone_told_of_is_booked_as_what_probes_left_of_it() -> None:
    """A script may print anything; where probes found nobody to blame, no time is lost to a GPU."""
    said = msgspec.structs.replace(
        crash(10.0), klass="gpu_lost_bus", title="GPU fell off the bus", group="infrastructure", confidence=0.95
    )
    for action, evicted, label in (
        ("run_diagnostics", (), "unconfirmed: GPU fell off the bus"),
        ("run_diagnostics", ("n0",), "GPU fell off the bus"),  # a probe found it
        ("evict_and_restart", (), "GPU fell off the bus"),  # a witness has seen it
    ):
        case = incident()
        case.add_alarm(msgspec.structs.replace(said, action=action))
        case.evicted = evicted
        case.name_cause()
        record = case.make_record(Verdict(remedy=Remedy.RESTART, reason="no node is to blame"), 15.0, 3)
        assert record.label == label and record_label(record) == label


def test_a_rank_that_left_early_is_not_booked_as_an_exception() -> None:
    case = incident()
    case.add_alarm(echo(10.0))
    case.on_departed((1,), (Seat(node="n0", group_rank=0, first_rank=0, nproc=2),))
    case.name_cause()
    assert case.make_record(Verdict(remedy=Remedy.RESTART, reason=""), 15.0, 3).label == "rank left early"


def killed(at: float, rank: int, code: int = -9, reason: str = "was killed by SIGKILL (sender unknown)") -> Alarm:
    return msgspec.structs.replace(crash(at, f"n{rank}", rank, klass=""), code=code, reason=reason, signature=f"{code}")


def named(hosts: dict[str, str], *alarms: Alarm) -> Record:
    case = incident()
    for alarm in alarms:
        case.add_alarm(alarm)
    case.hosts = hosts
    case.name_cause()
    return case.make_record(Verdict(remedy=Remedy.RESTART, reason=""), 15.0, 5)


ONE_HOST = {f"n{rank}": "here" for rank in range(300)}


def test_every_rank_that_was_killed_is_named_and_none_of_them_is_an_echo() -> None:
    record = named(ONE_HOST, killed(10.3, 2), killed(10.0, 1), echo(10.4))
    assert record.cause == "ranks 1-2 on n1 and n2 (rank 1 first) were killed by SIGKILL (sender unknown)"
    assert (record.ranks, record.suspects, record.echoes) == ((1, 2), ("n1", "n2"), 1)


def test_which_of_two_killed_ranks_was_first_is_unknown_at_one_moment_and_between_hosts() -> None:
    for hosts, later_at in ((ONE_HOST, 10.02), ({"n1": "a", "n2": "b"}, 12.0), ({}, 12.0)):
        cause = named(hosts, killed(later_at, 2), killed(10.0, 1)).cause
        assert cause == f"ranks 1-2 on n1 and n2 ({UNORDERED}) were killed by SIGKILL (sender unknown)"


def test_ranks_that_were_killed_in_other_ways_are_told_each_in_its_own_words() -> None:
    fault = killed(10.5, 2, -11, "was killed by SIGSEGV")
    assert named(ONE_HOST, killed(10.0, 1), fault).cause == (
        "rank 1 on n1 was killed by SIGKILL (sender unknown), and rank 2 on n2 was killed by SIGSEGV (rank 1 first)"
    )
    raised = msgspec.structs.replace(crash(9.0), code=1, reason="exited with code 1 (ValueError: x)")
    record = named(ONE_HOST, raised, killed(10.0, 1))
    assert record.cause.startswith("rank 0 on n0 exited with code 1 (ValueError: x), and rank 1 on n1 was killed by")


def test_an_abort_after_another_failure_and_ranks_of_a_lost_node_are_not_named_beside_it() -> None:
    abort = killed(10.5, 2, -6, "was killed by SIGABRT")
    assert named(ONE_HOST, killed(10.0, 1), abort).ranks == (1,)
    assert named(ONE_HOST, silence(10.0, "n1"), killed(10.5, 1)).cause == "n1 silent"


def error(at: float, rank: int, what: str, **more: object) -> Alarm:
    """A Python error of a rank, each rank on a node of its own."""
    klass = {"klass": "python_exception", "raised": what, "confidence": 0.73, "alone": True} | more
    return msgspec.structs.replace(
        crash(at, f"n{rank}", rank), code=1, reason=f"exited with code 1 ({what})", signature=f"{what} 1", **klass
    )


def test_nodes_that_are_lost_in_one_round_are_all_named() -> None:
    record = named(ONE_HOST, silence(10.0, "n1"), echo(10.2), silence(10.4, "n2"), silence(10.9, "n2"))
    assert (record.cause, record.suspects) == ("n1 and n2 silent", ("n1", "n2"))
    assert record.echoes == 1, "a rank, and not what was heard of n2 twice"


def test_a_lost_node_and_a_rank_of_another_node_are_both_named_whichever_came_first() -> None:
    was = "rank 0 on n0 was killed by SIGKILL (sender unknown)"
    assert named(ONE_HOST, silence(10.0, "n1"), killed(10.5, 0)).cause == f"n1 silent, and {was}"
    assert named(ONE_HOST, killed(7.0, 0), silence(10.0, "n1")).cause == f"{was}, and n1 silent"
    raised = error(7.0, 0, "KeyError")
    assert named(ONE_HOST, raised, silence(10.0, "n1"), killed(10.4, 1)).cause == (
        "rank 0 on n0 exited with code 1 (KeyError), and n1 silent"
    ), "the ranks of a lost node are lost with it"


def test_errors_that_two_ranks_make_by_themselves_are_both_named() -> None:
    record = named(ONE_HOST, error(10.0, 0, "ValueError"), error(10.3, 1, "KeyError"), echo(10.4, "n2", 2))
    assert record.cause == (
        "rank 0 on n0 exited with code 1 (ValueError), and rank 1 on n1 exited with code 1 (KeyError) (rank 0 first)"
    )
    assert (record.ranks, record.suspects, record.echoes) == ((0, 1), ("n0", "n1"), 1)


def test_what_two_scripts_raise_themselves_is_named_whatever_its_type() -> None:
    one, other = (error(at, rank, "RuntimeError", own=True, confidence=0.59) for rank, at in ((0, 10.0), (1, 10.3)))
    one, other = (msgspec.structs.replace(a, reason=f"failed {a.at}", signature=f"at {a.at}") for a in (one, other))
    unsure = error(10.4, 2, "RuntimeError")
    record = named(ONE_HOST, one, other, unsure, echo(10.4, "n3", 3))
    assert record.cause == "rank 0 on n0 failed 10.0, and rank 1 on n1 failed 10.3 (rank 0 first)"
    assert (record.ranks, record.echoes) == ((0, 1), 1), "the third error is of nobody knows what, and no echo"
    for klass in ("nan_divergence", "checkpoint_corrupt", "file_not_found", *ECHOES):
        assert named(ONE_HOST, one, msgspec.structs.replace(other, klass=klass)).ranks == (0,), klass


def test_an_error_that_may_come_from_another_rank_s_is_no_culprit() -> None:
    """Whoever loses a peer may raise anything of its own; a file may be missing because its writer has failed."""
    first = error(10.0, 0, "ValueError")
    for other in (
        error(10.3, 1, "RuntimeError"),
        error(10.3, 1, "trainer.PeerLostError"),
        error(10.3, 1, "KeyError", klass="peer_connection_lost"),
        error(10.3, 1, "FileNotFoundError", klass="file_not_found"),
        error(10.3, 1, "KeyError", confidence=0.5),
        error(10.3, 1, "KeyError", alone=False),
    ):
        record = named(ONE_HOST, first, other)
        assert (record.cause, record.ranks) == ("rank 0 on n0 exited with code 1 (ValueError)", (0,)), other
        assert record.echoes == is_echo(other)


def test_ranks_that_raise_the_same_error_are_told_together_and_are_no_echoes() -> None:
    """Nearly the same: each names its own sample, at the same place of the script."""
    bad = [
        msgspec.structs.replace(error(at, rank, "ValueError"), reason=f"exited with code 1 (ValueError: sample {rank})")
        for rank, at in ((3, 10.2), (0, 10.0))
    ]
    record = named(ONE_HOST, *bad, echo(10.4, "n1", 1), error(10.3, 2, "KeyError"))
    assert record.cause == (
        "rank 0 on n0 exited with code 1 (ValueError: sample 0; 2 ranks raised it: ranks 0, 3), "
        "and rank 2 on n2 exited with code 1 (KeyError) (rank 0 first)"
    )
    assert (record.ranks, record.suspects, record.echoes) == ((0, 2, 3), ("n0", "n2", "n3"), 1)
    bare = [msgspec.structs.replace(alarm, reason="failed") for alarm in bad]
    assert named(ONE_HOST, *bare).cause == "rank 0 on n0 failed (2 ranks raised it: ranks 0, 3)"
    assert named(ONE_HOST, *bad[1:]).cause == "rank 0 on n0 exited with code 1 (ValueError: sample 0)"
    elsewhere = msgspec.structs.replace(bad[0], signature="ValueError 1 at another place")
    assert "raised it" not in named(ONE_HOST, bad[1], elsewhere).cause


def test_of_hundreds_of_killed_ranks_all_are_named_and_the_first_is_judged_alone() -> None:
    record = named(ONE_HOST, *(killed(10.0 + rank, rank) for rank in range(300)))
    assert (record.ranks, record.echoes) == (tuple(range(300)), 0)
    case = incident()
    for rank in range(300):
        case.add_alarm(killed(10.0 + rank, rank))
    assert case.name_cause().suspects == ("n0",)


def test_what_ranks_of_several_nodes_say_by_themselves_is_no_nodes_own() -> None:
    cause = crash(10.0, "n0", 0)
    other = crash(10.2, "n1", 2)
    assert is_told_elsewhere(cause, [cause, other])
    assert not is_told_elsewhere(cause, [cause, crash(10.2, "n0", 1), echo(10.1, "n1", 2)]), "its own node, and an echo"
    assert not is_told_elsewhere(cause, [cause, msgspec.structs.replace(other, reason="failed otherwise")])
    killed = msgspec.structs.replace(cause, code=-9)
    assert not is_told_elsewhere(killed, [killed, msgspec.structs.replace(other, code=-9)]), "a signal says nothing"
    lost = echo(10.0)
    assert not is_told_elsewhere(lost, [lost, echo(10.1, "n1", 2)])


def raised(rank: int, name: str, words: str) -> Alarm:
    told = crash(10.0, f"n{rank}", rank, klass="python_exception")
    own = {
        "raised": name,
        "reason": f"exited with code 1 ({name}: {words})",
        "alone": True,
        "own": True,
        "confidence": 0.9,
    }
    return msgspec.structs.replace(told, code=1, signature="python_exception 1 train.py:5", **own)


def test_nearly_the_same_error_at_one_place_is_told_together_or_is_another_cause() -> None:
    cause, other, again = raised(0, "ValueError", "x"), raised(1, "KeyError", "x"), raised(2, "ValueError", "y")
    alarms = [cause, other, again, raised(3, "KeyError", "z")]
    assert list_alike(cause, alarms) == [again] and list_other_causes(cause, alarms) == [other]
    case = incident()
    for alarm in alarms:
        case.add_alarm(alarm)
    case.name_cause()
    assert case.echoes == 0 and all(f"rank {alarm.ranks[0]} on" in case.cause_text for alarm in (cause, other))
    assert all(words in case.cause_text for words in ("ranks 0, 2)", "ranks 1, 3)"))
