"""The one sentence that an incident ends in."""

import msgspec
import pytest

from holdfast.core import story
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.verdict import Record, Remedy, Verdict

RECORD = Record(
    number=1, generation=1, cause="rank 5 on n2 was killed by SIGKILL", kind="crash", klass="host_oom_kill",
    verdict=Verdict(remedy=Remedy.RESTART, reason="no node is to blame: restarted in place"),
    good_step=41, good_at=100.0, alarm_at=100.2, stopped_at=100.5, launched_at=100.6, resumed_at=101.2, resumed_from=40,
)  # fmt: skip


def told(**changes: object) -> str:
    return story.sentence(msgspec.structs.replace(RECORD, **changes))


def test_a_restart_in_place() -> None:
    assert told() == (
        "rank 5 on n2 was killed by SIGKILL at step 41; restarted in place from step 40, lost 1 step and 1.2 s"
        " (detect 0.2, stop 0.3, launch 0.1, first step 0.6)"
    )


def test_an_eviction() -> None:
    evict = Verdict(remedy=Remedy.EVICT, reason="evicted", nodes=("n2",))
    assert "; evicted n2, admitted n9 and resumed from step 40, lost" in told(
        verdict=evict, evicted=("n2",), admitted=("n9",)
    )
    assert "; evicted n2 and resumed on fewer nodes from step 40" in told(verdict=evict, evicted=("n2",))


def test_what_was_evicted_on_the_way_is_told_though_the_last_verdict_was_a_restart() -> None:
    text = told(evicted=("n2",), admitted=("n9",), failures=3)
    assert " at step 41, then failed 2 times more before the next step; evicted n2, admitted n9 and resumed" in text
    assert "then failed once more" in told(failures=2)


def test_a_standby_that_joins_at_a_restart_is_told() -> None:
    assert "restarted in place with n9 admitted from step 40" in told(admitted=("n9",))


def test_a_script_that_restores_itself_gets_a_bound() -> None:
    text = told(resumed_from=None)
    assert "restarted in place (the script restores itself, at most 41 steps redone), lost 1.2 s" in text
    assert "at most 1 step redone" in told(resumed_from=None, good_step=1)


def test_before_the_first_step_nothing_can_be_redone() -> None:
    text = told(good_step=-1, resumed_from=None)
    assert " before its first step; restarted in place, lost 1.2 s (" in text


def test_giving_up_says_why() -> None:
    text = told(verdict=Verdict(remedy=Remedy.GIVE_UP, reason="--max-restarts 1 used up", code=137))
    assert text == "rank 5 on n2 was killed by SIGKILL at step 41; gave up: --max-restarts 1 used up"


def test_nothing_negative_is_redone() -> None:
    assert "lost 0 steps" in told(resumed_from=45)


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exited with code 1"), (-9, "was killed by SIGKILL"), (-35, "was killed by signal 35")],
)
def test_endings(code: int, words: str) -> None:
    assert story.ending(code) == words


def test_causes() -> None:
    crash = Alarm(kind=Kind.CRASH, at=0.0, suspects=("n1",), ranks=(2, 3), reason="failed")
    assert story.cause(crash) == "rank 2, 3 on n1 failed"
    assert story.cause(msgspec.structs.replace(crash, ranks=())) == "n1 failed"
    assert story.cause(msgspec.structs.replace(crash, kind=Kind.SILENCE, suspects=("n1", "n2"))) == "n1, n2 failed"
