"""Who left in an incident, who wanted that, and who stayed."""

import msgspec

from holdfast.core.incident.node_swap_text import describe_evicted, describe_swap, staying_nodes
from holdfast.model.incident_record import Remedy, Verdict
from tests.core.test_incident_text import RECORD
from tests.core.test_ledger import account
from tests.core.test_open_trouble import CRASH

EVICT = Verdict(remedy=Remedy.EVICT, reason="n4 is gone: evicted", nodes=("n4",))
TWO = ("0 begin nnodes 2 standbys 1 limits ask_s=600", "1 outcome 1 ok nodes a b c", "2 ready a", "2 ready b order 1")
ASKED = (
    *(*TWO, "2 ready c order 2", "3 outcome 2 ok", "4 progress 10", f"5 {CRASH}", "5.1 outcome 3 ok"),
    *("6 outcome 4 ok", "7 progress 10", f"8 {CRASH}", "8.1 outcome 5 ok"),
)


def swap(verdict: Verdict, **changes: object) -> str:
    return describe_swap(msgspec.structs.replace(RECORD, verdict=verdict, **changes))


def test_who_left_and_who_took_the_seats() -> None:
    assert swap(EVICT, evicted=("n4",), admitted=("n5",)) == "; n5 took its place"
    assert swap(EVICT, evicted=("n4",)) == ""
    assert swap(EVICT, admitted=("n5",)) == "; n5 admitted"
    assert swap(EVICT, evicted=("n3", "n4"), admitted=("n5", "n6")) == "; n3, n4 evicted; n5, n6 took their places"
    assert swap(EVICT, evicted=("n3", "n4"), admitted=("n5",)) == "; n3, n4 evicted; n5 took one of their places"
    one_seat = {"evicted": ("n3", "n4"), "admitted": ("n4", "n5"), "passed": ("n4",)}
    assert swap(EVICT, **one_seat) == "; n3, n4 evicted; n5 took the seat"
    back = {"evicted": ("n4",), "admitted": ("n4",)}
    assert swap(EVICT, **back) == "; n4 took its place", "it is back in its own seat"


def test_whom_somebody_wanted_gone() -> None:
    restart = Verdict(remedy=Remedy.RESTART, reason="approved by ann: restarted in place")
    ordered = {"evicted": ("n1",), "admitted": ("n3",), "ordered": {"n1": "evicted by root"}}
    assert swap(restart, **ordered) == "; n1 evicted by root; n3 took its place"
    both = msgspec.structs.replace(RECORD, evicted=("n2", "n1"), ordered={"n1": "evicted by root"})
    assert describe_evicted(both, first="evicted ") == ("evicted n2", "n1 evicted by root")


def test_a_node_that_a_person_evicts_while_the_job_asks() -> None:
    on = ("9 order evict node a by root", "10 order approve by root", "11 outcome 6 ok", "11.5 outcome 8 ok")
    *_, last = account(*ASKED, *on, "13 progress 10").incidents
    assert (last.evicted, last.admitted, last.ordered) == (("a",), ("c",), {"a": "evicted by root"})


def test_a_node_that_is_evicted_in_the_seat_that_it_took() -> None:
    lines = (*TWO, "2 ready c order 2", "3 outcome 2 ok", "4 progress 10", "5 alarm silence b", "5.1 outcome 3 ok")
    more = ("6 outcome 5 ok nodes d", "6.5 ready d order 3", "6.6 outcome 6 ok", "7 alarm silence c")
    found = account(
        *lines, *more, "7.1 outcome 7 ok", "7.2 outcome 8 ok", "7.3 outcome 9 ok", "7.4 outcome 10 ok", "9 progress 11"
    ).incidents
    [record] = found
    assert (record.evicted, record.admitted, record.passed) == (("b", "c"), ("c", "d"), ("c",))
    assert staying_nodes(record) == ("d",)
