"""The ladder for hangs whose cause is known to be the code."""

import msgspec

from holdfast.core.incident.incident_case import CODE
from holdfast.core.incident.ladder import GAVE_UP, find_verdict
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import HANG, case, past


def test_ranks_in_different_collectives_are_no_fault_of_a_node() -> None:
    deadlock = msgspec.structs.replace(HANG, action=CODE, confidence=1.0)
    assert find_verdict(case(HANG, standbys=1)).remedy is Remedy.EVICT
    first = find_verdict(case(deadlock, standbys=1))
    assert (first.remedy, first.nodes) == (Remedy.RESTART, ())
    assert first.reason == (
        "the script has ranks wait for each other for ever, after steps were made: restarted in place"
    )
    again = find_verdict(case(deadlock, standbys=1, past=past(50, at=90.0)))
    assert (again.remedy, again.code) == (Remedy.GIVE_UP, GAVE_UP)
    assert find_verdict(case(deadlock, standbys=1, back_to=1, trial=True)).remedy is Remedy.ROLLBACK
