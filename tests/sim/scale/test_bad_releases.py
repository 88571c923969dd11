"""Releases that fail: which do, and when what runs is mended."""

from holdfast.sim.scale.bad_releases import BadReleases
from holdfast.sim.scale.failure_mixes import FailureMode

TYPO = FailureMode(name="typo", weight=1, shows="crash", code=1, source="")
LEAK = FailureMode(name="leak", weight=1, shows="oom", code=1, source="")


def test_every_bad_release_has_its_own_name() -> None:
    bugs = BadReleases()
    first = bugs.add_release(TYPO)
    bugs.mend_fault("typo")
    assert bugs.add_release(LEAK) != first


def test_only_what_runs_needs_a_person() -> None:
    bugs = BadReleases()
    digest = bugs.add_release(TYPO)
    bugs.running = "good"
    assert bugs.find_fault(digest) is TYPO and bugs.find_fault("good") is None
    assert not bugs.mend_fault("typo"), "it was rolled back"
    bugs.running = bugs.add_release(LEAK)
    assert bugs.mend_fault("leak") and bugs.find_fault(bugs.running) is None


def test_what_lasts_is_in_every_release_until_it_is_mended() -> None:
    bugs = BadReleases()
    bugs.make_lasting(LEAK)
    assert bugs.find_fault("good") is LEAK
    assert not bugs.mend_fault("typo") and bugs.find_fault("good") is LEAK, "another failure's mending is no help"
    assert bugs.mend_fault("leak") and bugs.find_fault("good") is None
