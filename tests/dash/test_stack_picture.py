"""What the page draws of a live job's stacks, from the controller's answer."""

from typing import Any

import msgspec
import pytest

from holdfast.controller.api_description import JobStacks
from holdfast.core.diagnose.blocking_ranks import find_blocking
from holdfast.dash.page_source import SourceError
from holdfast.dash.stack_picture import draw_rank, draw_stacks
from holdfast.model.rank_traces import Trace
from tests.core.diagnose.places import SLEEP, flight, process, trace


def answer(*traces: Trace) -> Any:
    """What the controller sends, as JSON has it."""
    found = JobStacks(at=9.0, naming=find_blocking(traces), traces=traces)
    return msgspec.json.decode(msgspec.json.encode(found))


def stalled() -> list[Trace]:
    ranks = [process(rank, SLEEP) if rank == 3 else process(rank) for rank in range(8)]
    flights = tuple(flight(rank, ("dp", 17, 16) if rank != 3 else ("dp", 16, 16)) for rank in range(8))
    return trace(*ranks, flights=flights)


def test_all_ranks_are_drawn_and_the_one_that_is_waited_for_is_marked() -> None:
    silent = Trace(node="n9", at=1.0, error="no answer within 6 s")
    told = answer(*stalled())
    told["traces"].append(msgspec.to_builtins(silent))
    drawn = draw_stacks(told)
    assert (drawn.at, drawn.ranks, drawn.untold) == (9.0, 8, ("n9: no answer within 6 s",))
    assert [row.ranks for row in drawn.rows if row.named] == ["rank 3"]
    assert drawn.reason == find_blocking(stalled()).reason


def test_one_rank_is_drawn_with_its_stack_and_where_it_is_in_its_groups() -> None:
    waits, late = draw_rank(answer(*stalled()), 2), draw_rank(answer(*stalled()), 3)
    assert waits.frames[-1].startswith("all_reduce (") and waits.absence == ""
    [inside], [over] = waits.collectives, late.collectives
    assert (inside.group, inside.op, inside.number, inside.inside, inside.since_s) == (
        "dp",
        "all_reduce",
        17,
        True,
        8.0,
    )
    assert (over.number, over.inside) == (16, False) and late.frames[-1].startswith("load (")


def test_a_rank_without_frames_says_why() -> None:
    mute = msgspec.structs.replace(process(0, ()), error="py-spy may not read the process")
    assert draw_rank(answer(*trace(mute)), 0).absence == "py-spy may not read the process"
    with pytest.raises(SourceError, match="rank 5"):
        draw_rank(answer(*trace(mute)), 5)


@pytest.mark.parametrize("told", [None, {}, {"at": 1.0, "naming": {}, "traces": [{"node": 3}]}])
def test_an_answer_that_is_none_is_one_sentence(told: Any) -> None:
    for draw in (draw_stacks, lambda told: draw_rank(told, 0)):
        with pytest.raises(SourceError):
            draw(told)
