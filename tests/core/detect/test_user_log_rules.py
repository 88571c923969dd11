"""Detectors made of a script's own log lines."""

import pytest

from holdfast.core.detect.user_log_rules import Rule, RuleDetector, RuleLimits, find_rule_fault
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Line

STEP = Rule(name="pace", kind="hang", pattern=r"step (\d+)", every_s=30.0)
SLOW = Rule(name="slow", kind="slow", pattern=r"tokens/s: ([\d.,]+)", below=1000.0, times=3)
LOSS = Rule(name="nan", kind="loss", pattern=r"loss[= ](\S+)", above=50.0)


class Told:
    def __init__(self, *rules: Rule, stance: Stance = Stance.ACT, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.rules = RuleDetector(RuleLimits(stance=stance, rule=rules))
        self.rules.on_launch(0.0, ranks)

    def write(self, text: str, at: float = 0.0, rank: int = 0) -> list[Alarm]:
        return [*self.rules.on_line(Line(text=text, at=at, rank=rank))]


def test_a_line_that_no_longer_comes() -> None:
    told = Told(STEP)
    assert told.rules.tick(1000.0) == (), "nobody has written such a line"
    told.write("step 1", at=1000.0)
    assert told.rules.tick(1030.0) == ()
    told.write("step 2", at=1029.0)
    assert told.rules.tick(1059.0) == ()
    [alarm] = told.rules.tick(1060.0)
    assert (alarm.kind, alarm.suspects, alarm.stance, alarm.hard) == (Kind.HANG, (), Stance.ACT, False)
    assert alarm.reason.startswith("rule 'pace': ") and alarm.reason.endswith(" 31 s") and "rank 0" in alarm.reason
    assert told.rules.tick(1061.0) == (), "once in a generation"
    told.rules.on_launch(2000.0, (0, 1))
    assert told.rules.tick(2100.0) == ()


def test_a_first_line_that_must_come() -> None:
    must = Rule(name="pace", kind="hang", pattern=r"step (\d+)", every_s=30.0, start_s=60.0)
    assert Told(must).rules.tick(59.0) == ()
    [alarm] = Told(must).rules.tick(61.0)
    assert " 60 s " in alarm.reason
    assert Told(must, ranks=(2, 3)).rules.tick(61.0) == (), "rank 0 is elsewhere, and is watched there"


def test_a_number_that_stays_too_low() -> None:
    told = Told(SLOW)
    assert not told.write("tokens/s: 900.5")
    assert not told.write("tokens/s: 900.5", rank=1), "ranks are counted apart"
    assert not told.write("tokens/s: 1,200")
    assert not told.write("tokens/s: 900") and not told.write("tokens/s: 900")
    [alarm] = told.write("tokens/s: 900")
    assert (alarm.kind, alarm.stance) == (Kind.SLOW, Stance.NOTIFY), "a restart would mend nothing"


@pytest.mark.parametrize("text", ["loss=nan", "loss inf", "loss=-inf", "loss=51", "loss=NaN"])
def test_a_loss_that_is_none(text: str) -> None:
    [alarm] = Told(LOSS).write(f"[rank0] step 3 {text}")
    assert (alarm.kind, alarm.klass, alarm.not_after) == (Kind.LOSS, "nan_divergence", None)


def test_a_loss_that_is_fine() -> None:
    assert Told(LOSS).write("loss=3.2") == []
    assert Told(LOSS).write("no such thing") == []
    assert Told(LOSS).write("loss=nan", rank=-1) == [], "the kernel writes no losses"
    assert Told(LOSS).write("x" * (10 << 20) + "loss=nan") == []


@pytest.mark.parametrize("stance", list(Stance))
def test_shadow_mode(stance: Stance) -> None:
    assert Told(LOSS, stance=stance).write("loss=nan")[0].stance is stance


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(name="a", kind="loss", pattern="("), "has a bad pattern"),
        (Rule(name="a", kind="loss", pattern="loss"), "needs a group around the number"),
        (Rule(name="a", kind="hang", pattern="(x)"), "needs every_s"),
        (Rule(name="a", kind="slow", pattern="(x)"), "needs above or below"),
        (Rule(name="a", kind="loss", pattern="(x)", times=0), "times must be at least 1"),
    ],
)
def test_rules_that_cannot_be(rule: Rule, words: str) -> None:
    assert words in find_rule_fault(RuleLimits(rule=(rule,)))


def test_two_rules_of_one_name() -> None:
    assert LOSS.name in find_rule_fault(RuleLimits(rule=(LOSS, LOSS)))
    assert find_rule_fault(RuleLimits(rule=(STEP, SLOW, LOSS))) == ""
