"""Where the time of a simulated job went: pieces by use and cause that tile the wall clock."""

from bisect import bisect_right
from itertools import accumulate, pairwise

import msgspec

TRAIN = "train"
HOUR_S = 3600.0


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    use: str  # as the account's spans, and: person, requeue
    start_at: float
    end_at: float
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end_at - self.start_at


class Book:
    """Told every piece in the order of time."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.drags: list[tuple[float, float, str]] = []  # (when, seconds, cause): slower steps

    @property
    def at(self) -> float:
        return self.pieces[-1].end_at if self.pieces else 0.0

    def add(self, use: str, end_at: float, cause: str = "") -> None:
        """From where the last piece ended."""
        if end_at > self.at:
            self.pieces.append(Piece(use=use, start_at=self.at, end_at=end_at, cause=cause if use != TRAIN else ""))

    def drag(self, at: float, seconds: float, cause: str) -> None:
        if seconds > 0:
            self.drags.append((at, seconds, cause))

    def on(self, at: float) -> Piece | None:
        """What this instant, if it is past, was spent on."""
        number = bisect_right(self.pieces, at, key=lambda piece: piece.start_at) - 1
        return self.pieces[number] if number >= 0 and at < self.at else None

    def cut(self, end_at: float) -> None:
        """Nothing after this instant counts."""
        while self.pieces and self.pieces[-1].start_at >= end_at:
            self.pieces.pop()
        if self.pieces and self.pieces[-1].end_at > end_at:
            self.pieces[-1] = msgspec.structs.replace(self.pieces[-1], end_at=end_at)
        self.drags = [drag for drag in self.drags if drag[0] < end_at]

    @property
    def wall_s(self) -> float:
        return self.pieces[-1].end_at - self.pieces[0].start_at if self.pieces else 0.0

    def productive_s(self, stall: float) -> float:
        """Training, less what slow steps and the saving of state took of it; `stall` is the part of a step for that."""
        trained = sum(piece.seconds for piece in self.pieces if piece.use == TRAIN)
        dragged = sum(seconds for _, seconds, _ in self.drags)
        return max(0.0, trained - dragged) * (1 - stall)

    def by_use(self, stall: float) -> dict[str, float]:
        """Seconds lost, by what they were spent on."""
        found: dict[str, float] = {}
        for piece in self.pieces:
            if piece.use != TRAIN:
                found[piece.use] = found.get(piece.use, 0.0) + piece.seconds
        if dragged := sum(seconds for _, seconds, _ in self.drags):
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
        for _, seconds, cause in self.drags:
            found[cause] = found.get(cause, 0.0) + seconds
        if stall:
            found["saving state"] = self.productive_s(0.0) * stall
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def trained(self, instants: list[float]) -> list[float]:
        """Seconds of training up to each of these instants; slow steps count in full here."""
        assert all(a.end_at == b.start_at for a, b in pairwise(self.pieces)), "pieces leave a gap or overlap"
        starts = [piece.start_at for piece in self.pieces]
        before = [0.0, *accumulate(piece.seconds if piece.use == TRAIN else 0.0 for piece in self.pieces)]
        found = []
        for instant in instants:
            number = max(0, bisect_right(starts, instant) - 1)
            piece = self.pieces[number]
            inside = min(instant, piece.end_at) - piece.start_at if piece.use == TRAIN else 0.0
            found.append(before[number] + inside)
        return found

    def curves(self, every_s: float = HOUR_S) -> tuple[list[float], list[float], list[float]]:
        """Instants, ETTR from the start up to each, and ETTR of the hour before each."""
        start_at, end_at = self.pieces[0].start_at, self.pieces[-1].end_at
        count = int((end_at - start_at) / every_s)
        instants = [start_at + every_s * number for number in range(1, count + 1)]
        made = self.trained(instants)
        earlier = self.trained([max(start_at, at - HOUR_S) for at in instants])
        total = [done / (at - start_at) for at, done in zip(instants, made, strict=True)]
        sliding = [
            (done - then) / min(HOUR_S, at - start_at) for at, done, then in zip(instants, made, earlier, strict=True)
        ]
        return instants, total, sliding
