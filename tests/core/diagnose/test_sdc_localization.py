"""Which of several devices computed wrongly, though afterwards all of them have wrong results."""

import pytest

from holdfast.core.diagnose.sdc_localization import PlayedPart, TraceAssessment, TracePoint, assess_traces

STEPS = 3
ROUNDS = {2: ((0, 1), (1, 0)), 4: ((0, 1, 2, 3), (1, 2, 3, 0)), 3: ((0, 1), (1, 2), (2, 0))}


def play_all(devices: int, faults: dict[tuple[int, int, int], str], *, repeats: int = 2) -> list[PlayedPart]:
    """Play steps of a model of this: a pair adds up what both send. `faults` are wrong sums, by play (-1: all), device
    and collective; "got" spoils what arrives."""
    told, play = [], 0
    for seats in ROUNDS[devices]:
        for _ in range(repeats):
            for first in range(0, len(seats), 2):
                told += play_pair(play, seats[first : first + 2], faults)
            play += 1
    return told


def play_pair(play: int, pair: tuple[int, ...], faults: dict[tuple[int, int, int], str]) -> list[PlayedPart]:
    points: dict[int, list[TracePoint]] = {device: [] for device in pair}
    inputs = dict.fromkeys(pair, "0")
    for number in range(STEPS):
        fault = {d: faults.get((play, d, number)) or faults.get((-1, d, number), "") for d in pair}
        sent = {d: f"{p}({inputs[d]}{'!' if fault[d] == 'sent' else ''})" for p, d in enumerate(pair)}
        total = "+".join(sent[device] for device in pair)
        inputs = {d: total + ("?" if fault[d] == "got" else "") for d in pair}
        for device in pair:
            points[device].append(TracePoint(name=f"sum {number}", sent=sent[device], got=inputs[device]))
    return [
        PlayedPart(play=play, part=part, device=f"cuda:{device}", points=tuple(points[device]))
        for part, device in enumerate(pair)
    ]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_sound_devices_accuse_nobody(devices: int) -> None:
    assert assess_traces(play_all(devices, {})) == TraceAssessment()


@pytest.mark.parametrize("bad", range(4))
@pytest.mark.parametrize("at", range(STEPS))
def test_one_of_four_that_is_always_wrong_is_named(bad: int, at: int) -> None:
    found = assess_traces(play_all(4, {(-1, bad, at): "sent"}))
    assert (found.bad, found.suspects) == ((f"cuda:{bad}",), ())
    assert found.reason == f"cuda:{bad} computed other bits than 3 others before 'sum {at}'"


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_one_wrong_result_is_named(devices: int) -> None:
    found = assess_traces(play_all(devices, {(1, 1, 0): "sent"}))
    assert found.bad == ("cuda:1",) and not found.suspects


def test_of_two_that_always_differ_both_are_suspects() -> None:
    found = assess_traces(play_all(2, {(-1, 1, 0): "sent"}))
    assert (found.bad, found.suspects) == ((), ("cuda:0", "cuda:1"))
    assert "no majority" in found.reason


def test_of_three_the_one_is_named() -> None:
    assert assess_traces(play_all(3, {(-1, 2, 1): "sent"})).bad == ("cuda:2",)


def test_two_of_four_are_both_named() -> None:
    found = assess_traces(play_all(4, {(1, 1, 1): "sent", (2, 3, 0): "sent"}))
    assert found.bad == ("cuda:1", "cuda:3")


@pytest.mark.parametrize("play", [-1, 0])
def test_what_arrives_wrong_names_where(play: int) -> None:
    found = assess_traces(play_all(4, {(play, 2, 1): "got"}))
    assert found.bad == ("cuda:2",) and "what arrived at cuda:2 in 'sum 1' is not what was sent" == found.reason


def test_a_device_that_broke_off_has_other_points() -> None:
    told = play_all(4, {})
    short = PlayedPart(play=0, part=0, device="cuda:0", points=told[0].points[:1])
    assert assess_traces([short, *told[1:]]).bad == ("cuda:0",)
