"""Who reaches whom: a network that is down is not one node's fault."""

from holdfast.core.detect.reachability import ReachDetector, choose_peers
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.observation import Reach

NODES = tuple(f"n{number}" for number in range(8))


class Network:
    """Eight nodes that try each other in rounds; groups that a switch keeps together reach each other."""

    def __init__(self) -> None:
        self.made, self.now = ReachDetector(), 0.0
        self.silent: tuple[str, ...] = ()
        self.islands: tuple[tuple[str, ...], ...] = ()  # of the last round
        self.tried = choose_peers(NODES, {node: node for node in NODES})
        self.try_all(NODES)

    def try_all(self, *groups: tuple[str, ...], gateways: bool | None = True) -> list[Alarm]:
        """One round; nodes of no group reach nobody. Those in the first group reach their gateway, if it can tell."""
        self.now += 30.0
        for node, peers in self.tried.items():
            own = next((group for group in groups if node in group), ())
            reached = tuple(peer for peer in peers if peer in own)
            missed = tuple(peer for peer in peers if peer not in own)
            gateway = None if gateways is None else bool(groups) and node in groups[0]
            if node in self.silent:
                continue
            self.made.on_reach(Reach(node=node, reached=reached, missed=missed, gateway=gateway))
        self.islands = self.made.find_islands()
        alarm = self.made.check_islands(self.now, 1)
        return [alarm] if alarm else []


def without(*nodes: str) -> tuple[str, ...]:
    return tuple(node for node in NODES if node not in nodes)


def test_everybody_is_tried_by_somebody_and_nobody_by_his_own_host() -> None:
    tried = choose_peers(NODES, {node: node for node in NODES})
    assert all(len(peers) == 3 and node not in peers for node, peers in tried.items())
    assert {peer for peers in tried.values() for peer in peers} == set(NODES)
    assert tried["n0"] == ("n4", "n1", "n2")
    assert choose_peers(("a", "b"), {"a": "one", "b": "two"}) == {"a": ("b",), "b": ("a",)}
    assert choose_peers(("a", "b"), {"a": "one", "b": "one"}) == {"a": (), "b": ()}


def test_a_network_that_is_whole() -> None:
    network = Network()
    assert network.try_all(NODES) == network.try_all(NODES) == []


def test_one_miss_is_forgiven() -> None:
    network = Network()
    assert network.try_all(NODES) + network.try_all(without("n3", "n4")) + network.try_all(NODES) == []
    assert network.try_all(without("n3", "n4")) == []


def test_a_switch_that_is_down() -> None:
    network = Network()
    assert network.try_all(without("n3", "n4")) == []
    [alarm] = network.try_all(without("n3", "n4"))
    assert alarm.reason == "n3 and n4 reach neither their gateway nor a peer: the network between is down"
    assert (alarm.suspects, alarm.stance, alarm.hard) == ((), Stance.NOTIFY, False)
    assert network.now == 90.0, "two misses, half a minute apart"
    assert network.try_all(without("n3", "n4")) == [], "it is said once"
    assert network.try_all(NODES) == []
    network.try_all(without("n5"))
    assert network.try_all(without("n5"))[-1].suspects == ("n5",)


def test_what_is_not_known_of_gateways_is_not_said() -> None:
    network = Network()
    network.try_all(without("n3", "n4"), gateways=None)
    [alarm] = network.try_all(without("n3", "n4"), gateways=None)
    assert alarm.reason == "n3 and n4 do not reach a peer: the network between is down"


def test_an_uplink_that_is_down() -> None:
    network = Network()
    network.try_all(without("n6", "n7"), ("n6", "n7"))
    [alarm] = network.try_all(without("n6", "n7"), ("n6", "n7"))
    assert (alarm.suspects, alarm.signature) == ((), "reach n6 n7")
    assert alarm.reason == (
        "n6 and n7 reach neither their gateway nor a node beyond their own group: the network between is down"
    )


def test_one_node_alone() -> None:
    network = Network()
    network.try_all(without("n3"))
    [alarm] = network.try_all(without("n3"))
    assert (alarm.suspects, alarm.stance) == (("n3",), Stance.NOTIFY)


def test_of_two_halves_none_is_the_rest() -> None:
    network = Network()
    network.try_all(NODES[:4], NODES[4:])
    [alarm] = network.try_all(NODES[:4], NODES[4:])
    assert (alarm.suspects, network.islands) == ((), (NODES[:4], NODES[4:]))


def test_nobody_reaches_anybody() -> None:
    network = Network()
    network.try_all()
    [alarm] = network.try_all()
    assert alarm.suspects == () and alarm.signature == "reach n0 n1 n2 n3 n4 n5 n6 n7"
    assert network.islands == tuple((node,) for node in NODES)


def test_a_node_that_says_nothing_is_known_by_the_others() -> None:
    network = Network()
    network.silent = ("n3",)
    network.try_all(without("n3"))
    [alarm] = network.try_all(without("n3"))
    assert alarm.suspects == ("n3",) and "gateway" not in alarm.reason, "what it would say itself is not known"


def test_a_round_without_answers_proves_nothing() -> None:
    network = Network()
    network.silent = NODES
    assert network.try_all() == network.try_all() == network.try_all() == []


def test_who_was_never_reached_may_be_behind_a_firewall() -> None:
    detector = ReachDetector()
    for _ in range(5):
        for node in "ab":
            detector.on_reach(Reach(node=node, reached=(), missed=("b",) if node == "a" else ("a",), gateway=False))
    assert detector.find_islands() == () and detector.check_islands(1.0, 1) is None


def test_after_a_launch_all_begins_anew() -> None:
    network = Network()
    network.try_all(without("n3", "n4"))
    network.made.on_launch()
    assert network.try_all(without("n3", "n4")) == []
