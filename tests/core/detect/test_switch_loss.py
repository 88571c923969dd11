"""Links that several machines lose together are a switch's, and one that a machine loses alone is its own."""

from holdfast.core.detect.switch_loss import SwitchDetector
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind, Stance
from holdfast.model.observation import Beat, Strain, StrainKind

DOWN = "net.down eth0"


def cut(*nodes: str, since: float, kind: StrainKind = StrainKind.CUT, sign: str = DOWN) -> Strain:
    return Strain(kind=kind, sign=sign, nodes=nodes, since=since, text="has no link at eth0")


def detector(*strains: Strain) -> SwitchDetector:
    made = SwitchDetector(30.0)
    for one in strains:
        made.on_beat(Beat(node=one.nodes[0], generation=1, step=1, at=0.0, strains=(one,)))
    return made


def alarm(*nodes: str, sign: str = DOWN, hard: bool = True) -> Alarm:
    return Alarm(kind=Kind.HEALTH, at=160.0, suspects=nodes, reason="has no link at eth0", signature=sign, hard=hard)


def test_a_link_of_one_machine_is_its_own() -> None:
    alone = alarm("n1")
    assert detector(cut("n1", since=100.0)).judge_alarm(alone, 4) is alone
    assert detector().judge_alarm(alone, 4) is alone
    both = alarm("n1", "n2")  # on one host
    assert detector(cut("n1", "n2", since=100.0)).judge_alarm(both, 4) is both


def test_links_of_several_machines_are_a_switch() -> None:
    made = detector(cut("n1", since=100.0), cut("n2", since=97.0), cut("n3", "n4", since=104.0))
    told = made.judge_alarm(alarm("n2"), 4)
    assert told is not None
    assert (told.kind, told.signature, told.hard, told.stance) == (Kind.HEALTH, SWITCH, True, Stance.ACT)
    assert (told.suspects, told.generation, told.at) == (("n1", "n2", "n3", "n4"), 4, 97.0)
    assert told.reason == "4 nodes lost their links within 7 s (n1, n2, n3, n4: a switch)"
    assert made.judge_alarm(alarm("n1"), 4) is None, "it was told"
    made.on_beat(Beat(node="n5", generation=1, step=1, at=0.0, strains=(cut("n5", since=110.0),)))
    more = made.judge_alarm(alarm("n5"), 4)
    assert more is not None and "n5" in more.suspects
    made.on_launch()
    assert made.judge_alarm(alarm("n5"), 5) is not None


def test_a_second_outage_is_told_too() -> None:
    lost = [cut("n1", "n2", since=100.0), cut("n3", since=100.0)]
    made = detector(*lost)
    assert made.judge_alarm(alarm("n1", "n2"), 4) is not None
    assert made.judge_alarm(alarm("n3"), 4) is None, "it was told"
    for node in ("n1", "n3"):
        made.on_beat(Beat(node=node, generation=1, step=1, at=0.0))
    for one in (cut("n1", "n2", since=500.0), cut("n3", since=500.0)):
        made.on_beat(Beat(node=one.nodes[0], generation=1, step=1, at=0.0, strains=(one,)))
    again = made.judge_alarm(alarm("n3"), 4)
    assert again is not None and (again.suspects, again.at) == (("n1", "n2", "n3"), 500.0)


def test_a_link_that_was_lost_long_before_is_another_matter() -> None:
    own = alarm("n1")
    assert detector(cut("n1", since=100.0), cut("n2", since=40.0)).judge_alarm(own, 4) is own


def test_links_that_flap_together() -> None:
    flaps = [cut(node, since=100.0, kind=StrainKind.FLAPPED, sign="net.flaps eth0") for node in ("n1", "n2")]
    made = detector(*flaps)
    told = made.judge_alarm(alarm("n1", sign="net.flaps eth0"), 4)
    assert told is not None and told.signature == SWITCH
    assert not made.is_cut("n1"), "there is nothing to wait for"


def test_other_alarms_pass() -> None:
    made = detector(cut("n1", since=100.0), cut("n2", since=100.0))
    for other in (alarm("n1", sign="gpu.lost GPU 0"), alarm("n1", hard=False), alarm("n7")):
        assert made.judge_alarm(other, 4) is other


def test_what_is_back_or_gone_does_not_count() -> None:
    made = detector(cut("n1", since=100.0), cut("n2", since=100.0), cut("n3", since=100.0))
    made.on_beat(Beat(node="n2", generation=1, step=1, at=0.0))
    made.forget_node("n3")
    own = alarm("n1")
    assert made.judge_alarm(own, 4) is own
    assert made.is_cut("n1") and not made.is_cut("n2") and not made.is_cut("n3")
