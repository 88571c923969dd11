"""Nobody leaves without proof together with the last copy of a state."""

import msgspec

from holdfast.core.incident.incident_case import PastFailure
from holdfast.core.incident.ladder import find_verdict
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import case

GROUP = Alarm(kind=Kind.HANG, at=100.0, suspects=("n0", "n2"), ranks=(4,), reason="keeps the others waiting")
PAIRED = {
    one: {frozenset({other})} for one, other in ("n0 n2".split(), "n2 n0".split(), "n1 n3".split(), "n3 n1".split())
}


def test_without_proof_nobody_goes_together_with_its_last_copy() -> None:
    asked = case(GROUP, standbys=4, bonds=PAIRED, near=("n2",))
    verdict = find_verdict(asked)
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, ("n2",)), "whose rank was named goes first"
    assert "not n0" in verdict.reason
    free = find_verdict(msgspec.structs.replace(asked, bonds={}))
    assert free.nodes == ("n0", "n2")


def test_the_one_that_stayed_goes_the_next_time() -> None:
    past = PastFailure(signature=GROUP.signature, nodes=("n0", "n2"), at=50.0, step=3, counted=False)
    again = msgspec.structs.replace(GROUP, suspects=("n0", "n4"))  # n4 has come for n2
    verdict = find_verdict(
        case(again, standbys=4, bonds={"n0": {frozenset({"n4"})}, "n4": {frozenset({"n0"})}}, past=(past,))
    )
    assert verdict.nodes == ("n0",)


def test_a_suspect_stays_while_the_other_copy_of_its_state_is_lost() -> None:
    one = msgspec.structs.replace(GROUP, suspects=("n0",), ranks=(0,))
    verdict = find_verdict(case(one, standbys=4, bonds=PAIRED, lost=("n2",)))
    assert verdict.remedy is Remedy.RESTART
    assert verdict.reason.startswith("n0 not evicted")
    assert find_verdict(case(one, standbys=4, bonds=PAIRED, lost=("n1",))).nodes == ("n0",)


def test_proof_counts_more_than_a_copy() -> None:
    """A node with a dead GPU trains nothing, whatever it holds; it hands that over as it goes."""
    dead = Alarm(kind=Kind.HEALTH, at=100.0, suspects=("n0", "n2"), reason="a GPU is lost", hard=True)
    assert find_verdict(case(dead, bonds=PAIRED)).nodes == ("n0", "n2")


def test_of_a_group_that_cannot_be_refilled_those_go_whose_ranks_were_named() -> None:
    assert find_verdict(case(GROUP, standbys=1, near=("n2",))).nodes == ("n2",)
    assert find_verdict(case(GROUP, standbys=1, near=("n0", "n2"))).remedy is Remedy.RESTART
