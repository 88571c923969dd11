"""Who is named when a job is at its end and does not end, how soon, and when it has ended well without them."""

from typing import Any

import msgspec
import pytest

from holdfast.core.detect.hang import HangLimits
from holdfast.core.detect.hang_at_exit import ExitHangDetector
from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Alarm, Stance
from holdfast.model.job_and_seats import Seat
from holdfast.model.rank_traces import Process, Trace
from tests.core.diagnose.places import SLEEP, process, trace

LIMITS = HangLimits()
SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(2))
JOIN = (("_shutdown", "/usr/lib/python3.11/threading.py", 1590),)


def at_end(rank: int, ending: str = "returned", **more: Any) -> Process:
    return msgspec.structs.replace(process(rank, JOIN), ending=ending, **more)


def goes_on(
    *looks: list[Trace], every_s: float = 5.0, limits: HangLimits = LIMITS
) -> list[tuple[float, Alarm | Ended]]:
    """What is said of these looks, and when."""
    ending = ExitHangDetector(limits)
    ending.on_launch(3)
    return [
        (every_s * number, news)
        for number, look in enumerate(looks)
        for news in ending.on_traces(100.0 + every_s * number, look, SEATS)[1]
    ]


def test_a_rank_that_has_returned_is_named_and_then_not_waited_for() -> None:
    (named_at, named), *rest = goes_on(*[trace(at_end(1))] * 40)
    assert isinstance(named, Alarm) and (named.stance, named.ranks, named.suspects) == (Stance.NOTIFY, (1,), ())
    assert named_at == 10.0
    assert named.reason.startswith("rank 1 ") and "_shutdown (threading" in named.reason
    ended_at, ended = rest[0]
    assert isinstance(ended, Ended) and (ended.node, ended.generation, ended.left) == ("n0", 3, (1,))
    assert ended_at == LIMITS.act_s and ended.reason


def test_all_ranks_of_all_nodes_may_stand() -> None:
    limits = HangLimits(act_s=9.0)
    looks = [trace(at_end(0), at_end(1, "parting"), at_end(2, "parting"))] * 3
    (_, first), (_, second) = goes_on(*looks, limits=limits)
    assert isinstance(first, Ended) and isinstance(second, Ended)
    assert [(e.node, e.left) for e in (first, second)] == [("n0", (0, 1)), ("n1", (2,))]
    assert first.reason.startswith("ranks 0-2 ") and "destroy_process_group" in first.reason and second.reason == ""


@pytest.mark.parametrize("life", ["cpu_s", "io_bytes"])
def test_who_shows_life_is_waited_for(life: str) -> None:
    lives: list[dict[str, Any]] = [{life: 100_000 * number} for number in range(100)]
    looks = [trace(at_end(1, **one)) for one in lives]
    assert goes_on(*looks) == []


def test_who_spins_is_not_waited_for_for_ever_but_who_writes_is() -> None:
    spins = [trace(at_end(1, cpu_s=5.0 * number)) for number in range(400)]
    at, ended = goes_on(*spins)[0]
    assert isinstance(ended, Ended) and at == LIMITS.last_s
    writes = [trace(at_end(1, cpu_s=5.0 * number, io_bytes=100_000 * number)) for number in range(400)]
    assert goes_on(*writes) == []


def test_a_rank_that_stands_after_its_groups_are_gone_is_not_waited_for() -> None:
    """As in torch's destructors, which run when the script's last function returns."""
    (_, named), (at, ended), *_ = goes_on(*[trace(at_end(1, "parted"))] * 40)
    assert isinstance(named, Alarm) and isinstance(ended, Ended)
    assert (at, ended.left) == (LIMITS.act_s, (1,)) and "past destroy_process_group" in ended.reason


def test_a_rank_that_works_on_after_its_groups_are_gone_is_waited_for() -> None:
    """It may evaluate the model, on its own and for long."""
    works = [trace(at_end(1, "parted", cpu_s=5.0 * number)) for number in range(400)]
    assert goes_on(*works) == []


def test_a_rank_that_is_not_at_its_end_is_the_scripts_trouble() -> None:
    (_, named), (at, acted), *_ = goes_on(*[trace(process(0, SLEEP), at_end(1))] * 40)
    assert isinstance(named, Alarm) and isinstance(acted, Alarm)
    assert (named.stance, named.ranks, acted.stance, acted.ranks) == (Stance.NOTIFY, (0,), Stance.ACT, (0,))
    assert at == LIMITS.act_s and (acted.group, acted.suspects, acted.hard) == ("script", (), False)
    assert acted.reason.startswith("rank 0 ") and " load" in acted.reason


def test_a_job_that_trains_is_not_at_its_end() -> None:
    looks = [trace(process(0), at_end(1), process(2), process(3))] * 60
    assert goes_on(*looks) == []
    ending = ExitHangDetector(LIMITS)
    assert ending.on_traces(1.0, looks[0], SEATS) == (False, ())


@pytest.mark.parametrize("odd", [at_end(1, state="X"), None])
def test_who_is_gone_or_was_not_seen_is_not_judged(odd: Process | None) -> None:
    look = trace(odd) if odd else [*trace(at_end(1)), Trace(node="n1", at=1.0, error="it did not answer")]
    assert goes_on(*[look] * 60) == []


def test_shadow_mode_ends_nobody() -> None:
    (_, named), *rest = goes_on(*[trace(at_end(1))] * 60, limits=HangLimits(stance="notify"))
    assert isinstance(named, Alarm) and rest == []
