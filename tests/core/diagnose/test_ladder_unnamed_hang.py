"""A hang for which nobody is named: nodes are tried, and none leaves for a guess."""

from holdfast.core.incident.ladder import find_verdict, verdict_after_probe
from holdfast.model.detector_alarm import UNNAMED, Alarm, Kind
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import case, past

HANG = Alarm(kind=Kind.HANG, at=100.0, suspects=(), reason="the job has stood for 200 s", signature=UNNAMED)


def test_all_nodes_are_probed_at_once_and_nobody_is_evicted_on_a_guess() -> None:
    hang = case(HANG, may_probe=True, standbys=8)
    first = find_verdict(hang)
    assert (first.remedy, first.nodes, first.level) == (Remedy.PROBE, (), 2) and hang.is_unnamed_hang
    assert first.reason == "the job stood still, no culprit: probing every node (level 2)"
    assert verdict_after_probe(case(HANG), {"n4": "is slow"}, "", replaceable=True).nodes == ("n4",)
    found = verdict_after_probe(case(HANG, standbys=8), {}, "", replaceable=True)
    assert (found.remedy, found.nodes) == (Remedy.RESTART, ())
    assert find_verdict(case(HANG, standbys=8)).remedy is Remedy.RESTART, "where nobody can probe"


def test_the_same_again_goes_on_to_code_and_then_to_people() -> None:
    again = past(60, node="n2")
    assert find_verdict(case(HANG, past=again, may_probe=True, back_to=3, trial=True)).remedy is Remedy.ROLLBACK
    often = find_verdict(case(HANG, past=past(60, 60, 60), standbys=8))
    assert often.remedy is Remedy.GIVE_UP, "it is told to a person, and no node is guessed"


def test_a_rule_of_the_user_has_the_job_restarted_in_place() -> None:
    rule = Alarm(kind=Kind.HANG, at=100.0, suspects=(), reason="no such line", signature="rule pace")
    assert find_verdict(case(rule, may_probe=True)).remedy is Remedy.RESTART
