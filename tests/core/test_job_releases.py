from itertools import count

from holdfast.core.release.job_releases import JobReleases
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Order, Outcome, Progress

NODES = ("a", "b")


def fresh() -> JobReleases:
    releases = JobReleases(Release(number=1, digest="d1"), trial_steps=20)
    releases.next_release(0.0, machines=False, guess=False)
    return releases


def bring(releases: JobReleases, digest: str, *, now: float = 1.0, at_once: bool = False) -> None:
    order = Order(verb="update", who="ann", release=Release(number=0, digest=digest), now=at_once, window_s=100.0)
    _, (action,) = releases.order_update(order, NODES, count(max(releases.known) * 10))
    releases.on_staged(now, Outcome(action=action.id, ok=True), set(NODES))  # type: ignore[union-attr]


def made(steps: int) -> Progress:
    return Progress(generation=1, step=steps, at=1.0, first_step=1, first_at=0.5, counted=False)


def before(releases: JobReleases) -> int:
    return releases.previous_release.number if releases.previous_release else 0


def test_the_first_release_is_never_on_trial() -> None:
    releases = fresh()
    assert not releases.on_trial and before(releases) == 0 and not releases.is_suspect(1.0)
    assert releases.rollback_refusal(0)


def test_a_new_one_is_on_trial_until_it_has_made_its_steps() -> None:
    releases = fresh()
    releases.on_progress(made(3))
    bring(releases, "d2")
    assert releases.next_release(5.0, machines=False, guess=False).number == 2
    assert before(releases) == 1
    trial = []
    for steps in (1, 19, 20):
        releases.on_progress(made(steps))
        trial.append(releases.on_trial)
    assert trial == [True, True, False]
    assert releases.is_suspect(5.0 + 86399) and not releases.is_suspect(5.0 + 86401)


def test_one_that_is_gone_back_to_is_as_old_as_it_is() -> None:
    """Else one failure that no release has made would take them all back, one by one."""
    releases = fresh()
    releases.on_progress(made(30))
    for number in (2, 3):
        bring(releases, f"d{number}")
        releases.next_release(86400.0 * number, machines=False, guess=False)
        releases.on_progress(made(30))
    now = 86400.0 * 3 + 100
    assert before(releases) == 2 and releases.is_suspect(now)
    releases.roll_back(2, "it failed")
    assert releases.next_release(now, machines=False, guess=False).number == 2
    assert before(releases) == 1 and not releases.is_suspect(now + 10), "it has run for a day before"


def test_a_predecessor_that_never_stepped_is_nothing_to_go_back_to() -> None:
    releases = fresh()
    bring(releases, "d2")
    releases.next_release(5.0, machines=False, guess=False)
    assert before(releases) == 0 and not releases.on_trial


def test_going_back_gives_the_newer_one_up_for_good() -> None:
    releases = fresh()
    releases.on_progress(made(30))
    bring(releases, "d2")
    releases.next_release(5.0, machines=True, guess=False)
    mixed = [releases.mixed]
    assert releases.roll_back(1, "it raised") == 2
    assert releases.next_release(6.0, machines=False, guess=False).number == 1
    assert (releases.fates[2], releases.told[2]) == (Fate.ROLLED_BACK, "it raised")
    mixed.append(releases.mixed)
    assert mixed == [True, False] and not releases.on_trial and before(releases) == 0
    again = Order(verb="update", who="ann", release=Release(number=0, digest="d2"))
    reason, _ = releases.order_update(again, NODES, count(50))
    assert "release 2 again" in reason and max(releases.known) == 2


def test_machines_on_a_guess_leave_the_code_alone() -> None:
    releases = fresh()
    releases.on_progress(made(1))
    bring(releases, "d2")
    assert releases.next_release(5.0, machines=True, guess=True).number == 1
    assert releases.next_release(6.0, machines=False, guess=True).number == 2


def test_waiting_ones_merge_into_the_newest() -> None:
    releases = fresh()
    bring(releases, "d2", now=1.0)
    bring(releases, "d3", now=2.0)
    assert releases.waiting is not None and releases.waiting.number == 3
    assert releases.fates[2] is Fate.MERGED
    assert not releases.is_due(101.9) and releases.is_due(102.0)


def test_a_person_may_go_back_to_any_that_is_staged() -> None:
    releases = fresh()
    releases.on_progress(made(30))
    bring(releases, "d2")
    releases.next_release(5.0, machines=False, guess=False)
    assert "release 7" in releases.rollback_refusal(7) and "release 2" in releases.rollback_refusal(2)
    assert releases.rollback_refusal(1) == ""
    releases.order_rollback(9.0, 1, "ann")
    assert releases.is_due(9.0)
    assert releases.next_release(9.5, machines=False, guess=False).number == 1
    assert releases.told[2] == "rolled back by ann"


def test_what_fails_on_a_node_that_has_left_refuses_nothing() -> None:
    releases = fresh()
    order = Order(verb="update", who="ann", release=Release(number=0, digest="d2"))
    releases.order_update(order, NODES, count(9))
    releases.on_staged(1.0, Outcome(action=9, ok=False, failed={"b": "it fell silent"}), {"a"})
    assert releases.fates[2] is Fate.WAITING
