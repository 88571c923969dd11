"""The benchmark of updates and standbys: what it compares, and the trees it makes."""

from benchmarks._exact_scene import SCRIPT, Scene
from benchmarks._harness import Job
from benchmarks.update import Pause, Pauses, judge


def pauses(first: float, second: float) -> Pauses:
    """A lost node costs the same 3 s both times, until it is known."""
    told = [[Pause(seconds=took + 3.0, known_s=took)] * 3 for took in (first, second)]
    return Pauses(*told)


def test_ratios_are_of_pauses_and_of_the_time_since_a_loss_was_known() -> None:
    findings, runs = judge(pauses(first=1.0, second=37.0), pauses(first=1.0, second=5.0))
    assert findings.figures["update_ratio"] == 10.0
    assert findings.figures["standby_ratio"] == 5.0
    assert all(findings.goals.values())
    assert all(len(times) == 3 for times in runs.values())
    findings, _ = judge(pauses(first=1.0, second=36.0), pauses(first=1.0, second=4.9))
    assert not any(findings.goals.values())


def test_trees_differ_in_their_release_and_in_nothing_else() -> None:
    with Job(4) as job:
        scene = Scene(job)
        one, two, bad = scene.tree(1), scene.tree(2), scene.tree(3, broken=True)
        told = [(tree / SCRIPT.name).read_text().splitlines() for tree in (one, two, bad)]
    assert told[0] == SCRIPT.read_text().splitlines()
    assert changed(told[0], told[1]) == ["RELEASE = 2"]
    assert changed(told[0], told[2]) == ["RELEASE = 3", "BROKEN = True"]


def changed(before: list[str], after: list[str]) -> list[str]:
    return [new.partition("  #")[0] for old, new in zip(before, after, strict=True) if old != new]
