"""Decides whether copies to peers go into the gaps between collectives, when a gap is open, and how much fits into it.

Copies that go into gaps are complete after one step if a step's gaps take a whole copy. Then the newest complete copy
is at most two steps old. Where they do not, or gaps are not known, `backup.duty` alone paces copies.
"""

from collections.abc import Iterable
from enum import StrEnum
from math import inf
from typing import NamedTuple

import msgspec

from holdfast.core.snapshots.step_network_profile import StepGaps

_FILLED = 0.8  # of a step's gaps a copy may take: what is left is for gaps that come late, and for the controller
_STANDS = 3.0  # usual steps: a rank that has made none for so long is not in a step like the others
_AGAIN_S = 0.004  # how often one looks for a step that is late
LEAST_PIECE_BYTES = 16 << 10  # what is sent at once, at least


class PacingChoice(StrEnum):
    """The setting `backup.pacing`."""

    AUTO = "auto"  # gaps where copies are then at most two steps old, else duty
    GAPS = "gaps"  # gaps where they are known
    DUTY = "duty"


class CopyPacing(msgspec.Struct, frozen=True, kw_only=True):
    """How copies are paced, and why they do not go into gaps."""

    gaps: bool = False
    why: str = ""


class StepMoment(NamedTuple):
    """The gaps of a rank, and when it began the step that it is in."""

    begun_at: float
    gaps: StepGaps


class GapWindow(NamedTuple):
    open_until: float  # a gap of all ranks is open until then; 0: none is
    again_at: float  # when to look again, if none is


def choose_pacing(choice: PacingChoice, gaps: StepGaps, duty: float, copy_bytes: int, bytes_s: float) -> CopyPacing:
    """Decide how a copy of so many bytes is paced, over links that take `bytes_s`; 0: that has not been measured."""
    if choice is PacingChoice.DUTY:
        return CopyPacing(why="backup.pacing is duty")
    if gaps.why:
        return CopyPacing(why=gaps.why)
    if bytes_s <= 0:
        return CopyPacing(why="the speed of the links to peers is not known yet")
    took_s = copy_bytes / bytes_s
    if choice is PacingChoice.GAPS:
        return CopyPacing(gaps=True)
    if took_s > _FILLED * gaps.idle_s:
        return CopyPacing(why="a step's gaps are too small for a copy")
    if took_s > duty * gaps.step_s:
        return CopyPacing(why="a copy in each step would take more of the time than backup.duty")
    return CopyPacing(gaps=True)


def find_window(now: float, ranks: Iterable[StepMoment]) -> GapWindow:
    """Return until when a gap of all ranks is open, or when to look for one again."""
    open_until, again_at = inf, 0.0
    for begun_at, gaps in ranks:
        into_s = now - begun_at
        if into_s >= _STANDS * gaps.step_s:
            continue  # it validates, saves or has ended: its profile says nothing of that
        end_s = next((end for start, end in gaps.gaps if start <= into_s < end), None)
        if end_s is not None:
            open_until = min(open_until, begun_at + end_s)
            continue
        later = [start for start, _ in gaps.gaps if start > into_s] or [gaps.step_s + gaps.gaps[0][0]]
        open_until, again_at = 0.0, max(again_at, begun_at + later[0], now + _AGAIN_S)
    return GapWindow(open_until, again_at)


def fit_piece(left_s: float, bytes_s: float, queued_bytes: int, most_bytes: int) -> int:
    """Return how many bytes may be sent now, so that they and those that are queued already have left in `left_s`; 0 if
    they are too few to be worth it."""
    if left_s == inf:
        return most_bytes
    room = int(left_s * bytes_s) - queued_bytes
    return min(most_bytes, room) if room >= min(LEAST_PIECE_BYTES, most_bytes) else 0


def rest_after(took_s: float, sent_s: float, step_s: float, duty: float) -> float:
    """Return how long the next copy is to wait after one that was sent for `sent_s` of the `took_s` that it took, so
    that sending takes `duty` of the time at most. As each step has one copy at most, a step counts in any case."""
    return max(0.0, sent_s / duty - max(took_s, step_s))
