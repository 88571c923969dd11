"""What people want of nodes: who leaves at the next restart."""

from holdfast.core.decide.pending_operator_requests import OpenRequests


def test_who_must_leave_does_and_others_as_far_as_they_can_be_replaced() -> None:
    requests = OpenRequests()
    requests.evicting["a"] = "ann"
    requests.draining |= {"b": "bob", "c": "bob"}
    active = {"a", "b", "c", "d"}
    assert requests.nodes_to_leave(active, 0) == {"a"}
    assert requests.nodes_to_leave(active, 1) == {"a"}
    assert requests.nodes_to_leave(active, 2) == {"a", "b"}
    requests.on_nodes_left(("a", "b"))
    assert requests.nodes_to_leave(active, 2) == {"c"}
    assert requests.who_wants_gone("c") == "bob" and requests.who_wants_gone("a") == ""
