"""What is done about links that are lost together, and about nodes that fall silent at once."""

import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.incident.ladder import GAVE_UP, find_verdict
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind
from holdfast.model.incident_record import Remedy
from holdfast.model.job_phase import Phase
from tests.core.diagnose.test_ladder import SILENCE, case, past
from tests.core.transcript import parse

NODES = ("n1", "n2")
CUT = Alarm(kind=Kind.HEALTH, at=100.0, suspects=(*NODES, "n9"), reason="lost", signature=SWITCH, hard=True)


@pytest.mark.parametrize(
    ("standbys", "may_lose", "remedy"),
    [(1, 16, Remedy.RESTART), (2, 16, Remedy.EVICT), (2, 1, Remedy.RESTART)],
)
def test_standbys_take_over_if_there_are_enough(standbys: int, may_lose: int, remedy: Remedy) -> None:
    verdict = find_verdict(case(CUT, seated=NODES, standbys=standbys, may_lose=may_lose))
    assert verdict.remedy is remedy
    assert verdict.nodes == (NODES if remedy is Remedy.EVICT else ()), "n9 has no seat"


def test_a_switch_is_not_waited_for_for_ever() -> None:
    assert find_verdict(case(CUT, seated=NODES, rounds=3)).code == GAVE_UP
    assert find_verdict(case(CUT, seated=NODES, max_restarts=0)).remedy is Remedy.GIVE_UP
    assert find_verdict(case(CUT, seated=NODES, max_restarts=1)).remedy is Remedy.RESTART


def test_a_release_on_trial_is_not_suspected_of_a_switch() -> None:
    assert find_verdict(case(CUT, seated=NODES, trial=True, back_to=1)).remedy is Remedy.RESTART


@pytest.mark.parametrize(
    "changes", [{"may_probe": True, "may_replay": True}, {"trial": True, "back_to": 1, "rounds": 1}]
)
def test_a_switch_that_is_down_again_is_waited_for_again(changes: dict[str, object]) -> None:
    again = find_verdict(case(CUT, seated=NODES, past=past(50, 50, at=90.0), **changes))
    assert again.remedy is Remedy.RESTART, "pairs of nodes would fail their probes, and no other release has links"


def test_a_link_of_another_node_is_not_the_same_failure_again() -> None:
    down = Alarm(kind=Kind.HEALTH, at=100.0, suspects=("n1",), reason="has no link", signature="net.down", hard=True)
    for node, remedy in (("n2", Remedy.RESTART), ("n1", Remedy.GIVE_UP)):
        verdict = find_verdict(case(down, past=past(40, node=node, at=90.0), replaceable=False))
        assert verdict.remedy is remedy, f"{node} had it before"


def test_nodes_that_fall_silent_at_once_are_one_loss() -> None:
    verdict = find_verdict(case(SILENCE, together=NODES, may_lose=1))
    assert (verdict.remedy, verdict.nodes) == (Remedy.EVICT, NODES)
    assert find_verdict(case(SILENCE, may_lose=0)).remedy is Remedy.GIVE_UP


def test_a_switch_that_comes_and_goes_does_not_use_up_the_hour() -> None:
    decider, nodes = Decider(), [f"m{i:02}" for i in range(18)]
    now, launch = 0.0, 1

    def hear(line: str) -> Phase:
        return decider.step(now, parse(line, now, decider.view.generation)).phase

    hear("begin nnodes 18 join")
    for coming, silent in ((nodes, nodes[2:]), (nodes[2:], nodes[2:]), (nodes[2:], nodes[2:3])):
        for node in coming:
            hear(f"ready {node}")
        hear(f"outcome {launch} ok")
        now += 10.0
        assert hear(f"progress {launch}") is Phase.TRAINING
        for node in silent:
            hear(f"alarm silence {node}")
        now += 1.0
        assert hear(f"outcome {launch + 1} ok") is Phase.WAITING, "they are waited for, and nobody gives up"
        launch, now = launch + 2, now + 60.0
