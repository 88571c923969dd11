"""One word for every node."""

from holdfast.core.decide.decider import Decider
from holdfast.core.decide.node_roles import NodeRole
from holdfast.model.detector_alarm import Kind
from tests.core.transcript import parse

START = (
    "begin nnodes 2 standbys 1",
    "outcome 1 ok nodes n0 n1 n2",
)
TRAINING = (
    *START,
    "ready n0 nproc 1",
    "ready n1 nproc 1 order 1",
    "ready n2 nproc 1 order 2",
    "outcome 2 ok",
    "progress 1",
)


def roles(*lines: str, admitting: frozenset[str] = frozenset()) -> dict[str, NodeRole]:
    decider = Decider()
    for at, line in enumerate(lines):
        decider.step(float(at), parse(line, float(at), decider.view.generation))
    return decider.view.assign_roles(admitting)


def test_from_the_fleet_to_a_seat() -> None:
    assert roles(*START) == {"n0": "acquiring", "n1": "acquiring", "n2": "acquiring"}
    assert roles(*START, "ready n2 nproc 1") == {"n0": "acquiring", "n1": "acquiring", "n2": "ready"}
    assert roles(*TRAINING) == {"n0": "active", "n1": "active", "n2": "ready"}


def test_evicted_and_admitted() -> None:
    lost = (*TRAINING, "alarm silence n1", "outcome 3 ok")
    found = roles(*lost, admitting=frozenset({"n2"}))
    assert (found["n0"], found["n1"], found["n2"]) == ("active", "evicted", "admitting")


def test_a_standby_that_is_lost_was_not_evicted() -> None:
    assert roles(*TRAINING, "alarm silence n2")["n2"] == "lost"
    assert roles(*TRAINING, "alarm health n2 hard said lost a GPU")["n2"] == "dismissed"
    silent_twice = (*TRAINING, "alarm silence n1", "outcome 3 ok", "outcome 5 ok", "progress 2")
    assert roles(*silent_twice)["n1"] == "evicted", "it had a seat"


def test_those_that_have_left_are_bounded() -> None:
    decider = Decider()
    for at, line in enumerate(TRAINING):
        decider.step(float(at), parse(line, float(at), decider.view.generation))
    decider._state.nodes.standbys.gone.update({f"x{n}": None if n % 2 else Kind.SILENCE for n in range(200)})
    found = decider.view.assign_roles(frozenset())
    assert sum(role is NodeRole.EVICTED for role in found.values()) == 16
    assert "x198" in found and "x199" not in found and "x0" not in found
