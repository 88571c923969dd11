"""The time book of a simulated job: it divides wall time into pieces, each with a use and a cause."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import TypeAlias

import msgspec

TRAIN = "train"
HOUR_S = 3600.0
Curves: TypeAlias = tuple[list[float], list[float], list[float]]


class TimePiece(msgspec.Struct, frozen=True, kw_only=True):
    use: str  # as the account's spans, and: person, requeue
    start_at: float
    end_at: float
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end_at - self.start_at


class SlowStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in which steps are slow."""

    start_at: float
    end_at: float
    part: float  # of the time that is lost by it
    cause: str

    @property
    def lost_s(self) -> float:
        return (self.end_at - self.start_at) * self.part


class TimeBook:
    """Collects pieces of time, each beginning where the last one ended."""

    def __init__(self) -> None:
        self.pieces: list[TimePiece] = []
        self.drags: list[SlowStretch] = []

    @property
    def at(self) -> float:
        return self.pieces[-1].end_at if self.pieces else 0.0

    def add_piece(self, use: str, end_at: float, cause: str = "") -> None:
        """Add the time from the end of the last piece to `end_at`. Do nothing if the last piece ends later."""
        if end_at > self.at:
            self.pieces.append(TimePiece(use=use, start_at=self.at, end_at=end_at, cause=cause if use != TRAIN else ""))

    def add_slow_stretch(self, at: float, seconds: float, part: float, cause: str) -> None:
        self.drags.append(SlowStretch(start_at=at, end_at=at + seconds, part=part, cause=cause))

    def piece_at(self, at: float) -> TimePiece | None:
        """Return the piece that contains this instant; None if the book does not reach that far."""
        number = bisect_right(self.pieces, at, key=lambda piece: piece.start_at) - 1
        return self.pieces[number] if number >= 0 and at < self.at else None

    def cut_at(self, end_at: float) -> None:
        """Discard everything after this instant."""
        while self.pieces and self.pieces[-1].start_at >= end_at:
            self.pieces.pop()
        if self.pieces and self.pieces[-1].end_at > end_at:
            self.pieces[-1] = msgspec.structs.replace(self.pieces[-1], end_at=end_at)
        drags = (drag for drag in self.drags if drag.start_at < end_at)
        self.drags = [msgspec.structs.replace(drag, end_at=min(drag.end_at, end_at)) for drag in drags]

    @property
    def wall_s(self) -> float:
        return self.pieces[-1].end_at - self.pieces[0].start_at if self.pieces else 0.0

    def productive_s(self, stall: float) -> float:
        """Return the training time less the time lost to slow steps and saving; `stall` is the share lost to saving."""
        trained = sum(piece.seconds for piece in self.pieces if piece.use == TRAIN)
        dragged = sum(drag.lost_s for drag in self.drags)
        return max(0.0, trained - dragged) * (1 - stall)

    def by_use(self, stall: float) -> dict[str, float]:
        """Return the seconds spent on each use other than training, largest first."""
        found: dict[str, float] = {}
        for piece in self.pieces:
            if piece.use != TRAIN:
                found[piece.use] = found.get(piece.use, 0.0) + piece.seconds
        if dragged := sum(drag.lost_s for drag in self.drags):
            found["slow"] = dragged
        if stall:
            found["save"] = self.productive_s(0.0) * stall
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def by_cause(self, stall: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for piece in self.pieces:
            if piece.use != TRAIN:
                cause = piece.cause or "start"
                found[cause] = found.get(cause, 0.0) + piece.seconds
        for drag in self.drags:
            found[drag.cause] = found.get(drag.cause, 0.0) + drag.lost_s
        if stall:
            found["saving state"] = self.productive_s(0.0) * stall
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def productive_until(self, stall: float, instants: Sequence[float]) -> list[float]:
        """Return productive seconds up to each of these ordered instants; `stall` is the share lost to saving."""
        assert all(a.end_at == b.start_at for a, b in pairwise(self.pieces)), "pieces leave a gap or overlap"
        paces = [(piece.start_at, piece.end_at, 1.0) for piece in self.pieces if piece.use == TRAIN]
        paces += [(drag.start_at, drag.end_at, -drag.part) for drag in self.drags]
        turns = deque(sorted(turn for start, end, pace in paces for turn in ((start, pace), (end, -pace))))
        found, at, pace, made = [], 0.0, 0.0, 0.0
        for instant in instants:
            while turns and turns[0][0] <= instant:
                turn_at, more = turns.popleft()
                made, at, pace = made + pace * (turn_at - at), turn_at, pace + more
            found.append(max(0.0, made + pace * (instant - at)) * (1 - stall))
        return found

    def ettr_curves(self, stall: float, every_s: float = HOUR_S) -> Curves:
        """Return a list of instants, the ETTR from the start to each, and the ETTR of the hour before each."""
        if not self.pieces:
            return [], [], []
        start_at, end_at = self.pieces[0].start_at, self.pieces[-1].end_at
        count = ceil((end_at - start_at) / every_s)
        instants = [min(end_at, start_at + every_s * number) for number in range(1, count + 1)]
        made = self.productive_until(stall, instants)
        earlier = self.productive_until(stall, [max(start_at, at - HOUR_S) for at in instants])
        total = [done / (at - start_at) for at, done in zip(instants, made, strict=True)]
        sliding = [  # a drag that outlasts the training it began in takes no more than there was
            max(0.0, done - then) / min(HOUR_S, at - start_at)
            for at, done, then in zip(instants, made, earlier, strict=True)
        ]
        return instants, total, sliding
