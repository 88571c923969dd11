"""What of many checkpoints, and of strangers' texts, goes into one message."""

import msgspec
import pytest

from holdfast.core.snapshots.checkpoint_listing import (
    MOST_LISTED,
    CheckpointListing,
    ListedCheckpoint,
    fit_number,
    fit_text,
    make_listing,
)
from holdfast.model.message_bounds import MOST
from holdfast.wire import agent_messages


def steps_of(listing: CheckpointListing) -> list[int]:
    return [one.step for one in listing.checkpoints]


def test_few_are_told_as_they_are() -> None:
    told = make_listing(3, "/ckpt", tuple(ListedCheckpoint(name=f"step-{step}", step=step) for step in (20, 10)))
    assert (steps_of(told), told.since, told.generation, told.base) == ([20, 10], 0, 3, "/ckpt")


def test_of_many_the_newest_are_told_and_from_which_step_on() -> None:
    found = tuple(ListedCheckpoint(name=f"step-{step}", step=step) for step in range(2 * MOST_LISTED, 0, -1))
    told = make_listing(1, "/ckpt", found)
    assert steps_of(told) == [*range(2 * MOST_LISTED, told.since - 1, -1)] and len(told.checkpoints) == MOST_LISTED - 1
    same = tuple(ListedCheckpoint(name=f"{at}", step=7) for at in range(MOST_LISTED + 1))
    told = make_listing(1, "/ckpt", same)
    assert (told.checkpoints, told.since) == ((), 8), "no step is told by halves, as the rest would be removed"


def test_the_largest_listing_fits_into_a_message() -> None:
    texts = fit_text("\U0001f600" * 10_000)
    most = fit_number(1 << 80)
    one = ListedCheckpoint(
        name=texts, step=most, at=1e11, generation=most, run=texts, world=most, bytes=most, why=texts
    )
    told = make_listing(most, "\U0001f600" * 10_000, (one,) * MOST_LISTED)
    packet = agent_messages.encode(told)
    assert agent_messages.decode_from_agent(packet) == told
    assert len(packet) < agent_messages.MAX_BYTES
    more = agent_messages.encode(msgspec.structs.replace(told, checkpoints=(one,) * (MOST_LISTED + 1)))
    with pytest.raises(msgspec.DecodeError):
        agent_messages.decode_from_agent(more)


def test_texts_and_numbers_that_no_table_takes() -> None:
    assert fit_text("a\0b\udcff") == "a?b?"
    assert (fit_number(-(1 << 70)), fit_number(5)) == (-MOST, 5)
