"""A rank accuses a machine, and nobody else does."""

import msgspec

from holdfast.core.incident.ladder import NO_REPLAY, find_verdict, verdict_after_probe
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import ECC, case, past


def test_it_is_probed_and_a_repeat_on_that_node_evicts() -> None:
    fabric = msgspec.structs.replace(ECC, klass="ib_rdma_error", action="run_diagnostics", confidence=0.91)
    first = find_verdict(case(fabric, may_probe=True))
    assert (first.remedy, first.nodes) == (Remedy.PROBE, ()) and "a rank accuses a machine" in first.reason
    assert find_verdict(case(fabric)).remedy is Remedy.RESTART, "where nobody can probe"
    assert verdict_after_probe(case(fabric), {"n4": "has a bad port"}, "", replaceable=True).nodes == ("n4",)
    assert verdict_after_probe(case(fabric), {}, "", replaceable=True).remedy is Remedy.RESTART
    again = find_verdict(case(fabric, may_probe=True, past=past(10)))
    assert (again.remedy, again.nodes) == (Remedy.EVICT, ("n1",))
    elsewhere = find_verdict(case(fabric, may_probe=True, past=past(10, node="n2")))
    assert elsewhere.remedy is Remedy.PROBE, "no node stands out"
    vague = msgspec.structs.replace(fabric, confidence=0.5)
    assert find_verdict(case(vague, may_probe=True)).remedy is Remedy.RESTART


def test_nothing_is_called_probed_that_was_not() -> None:
    refused = verdict_after_probe(case(ECC), {}, f"{NO_REPLAY}the script does not allow it", replaceable=True)
    assert refused.reason.startswith("no replay: the script does not allow it; ")
    assert verdict_after_probe(case(ECC), {}, "nobody stands out", replaceable=True).reason.startswith("probed: ")
