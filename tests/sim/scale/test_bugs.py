"""Releases that fail: which do, and when what runs is mended."""

from holdfast.sim.scale.bugs import Bugs
from holdfast.sim.scale.mixes import Fault

TYPO = Fault(name="typo", weight=1, shows="crash", code=1, source="")
LEAK = Fault(name="leak", weight=1, shows="oom", code=1, source="")


def test_every_bad_release_has_its_own_name() -> None:
    bugs = Bugs()
    first = bugs.bring(TYPO)
    bugs.mend("typo")
    assert bugs.bring(LEAK) != first


def test_only_what_runs_needs_a_person() -> None:
    bugs = Bugs()
    digest = bugs.bring(TYPO)
    bugs.running = "good"
    assert bugs.of(digest) is TYPO and bugs.of("good") is None
    assert not bugs.mend("typo"), "it was rolled back"
    bugs.running = bugs.bring(LEAK)
    assert bugs.mend("leak") and bugs.of(bugs.running) is None


def test_what_lasts_is_in_every_release_until_it_is_mended() -> None:
    bugs = Bugs()
    bugs.last(LEAK)
    assert bugs.of("good") is LEAK
    assert not bugs.mend("typo") and bugs.of("good") is LEAK, "another failure's mending is no help"
    assert bugs.mend("leak") and bugs.of("good") is None
