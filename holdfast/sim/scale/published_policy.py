"""Simulates the published practices of others, loaded from TOML files, under the same schedule of failures."""

import tomllib
from collections import deque
from importlib import resources
from random import Random
from typing import Literal

import msgspec

from holdfast.core.membership.standby_sizing import binomial_quantile
from holdfast.sim.scale.failure_mixes import FailureMix, Shows
from holdfast.sim.scale.failure_schedule import ScaleSetup, ScheduledFailure, draw_schedule, draw_standby_failures
from holdfast.sim.scale.price_sheet import PriceDraws, PriceSheet
from holdfast.sim.scale.scale_result import ScaleResult, ScaleTally, make_result
from holdfast.sim.scale.time_book import TRAIN, TimeBook

KNOWN = ("byterobust", "megatron", "torchrun")
_WINDOW_S = 86400.0  # an update that may wait rides on a restart within this


class SymptomResponse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a published practice detects and handles one symptom."""

    shows: Shows
    source: str
    detect_s: tuple[float, float]
    locate_s: tuple[float, float] = (0.0, 0.0)
    mend_s: float | None = None  # from localization to restart in all, on average, where that was published
    most_s: float = 0.0
    names: float = 0.0  # chance that a bad machine is the one that goes
    group: bool = False  # its whole parallel group does
    by_hand: bool = False


class PublishedPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    standbys: Literal["p99", "none"]
    keeps: Literal["memory", "storage"]  # where a restart finds its state
    save_every_s: float  # 0: every step
    save_stall_s: float
    group: int
    rollback: bool
    updates: Literal["in place", "requeue"]
    tries: int  # failures alike before a person looks
    restart: str  # the price of it
    sees: tuple[SymptomResponse, ...]
    mend_gpus: int = 0  # that a job had whose `mend_s` were published; a larger one takes as much longer as its restart
    save_source: str = ""
    group_source: str = ""
    restart_source: str = ""


class PolicyRun:
    """Simulates one seed of a published practice."""

    def __init__(self, practice: PublishedPolicy, setup: ScaleSetup, mix: FailureMix, sheet: PriceSheet) -> None:
        self.practice, self.setup, self.mix = practice, setup, mix
        self.rng = Random(f"{practice.name} {setup.seed}")
        self.prices = PriceDraws(sheet, setup.gpus, self.rng)
        self.book, self.tally = TimeBook(), ScaleTally()
        self._sees = {sees.shows: sees for sees in practice.sees}
        rate = mix.rate if setup.rate is None else setup.rate
        held = setup.standbys if setup.standbys is not None else binomial_quantile(setup.nodes, rate)
        self.standbys = held if practice.standbys == "p99" else 0
        there = PriceDraws(sheet, practice.mend_gpus or setup.gpus, self.rng)
        self._larger_s = self.prices.mean_price(practice.restart) - there.mean_price(practice.restart)
        self._back_at: list[float] = []  # when used standbys are made up for
        self._idle = deque(
            strike.at for strike in draw_standby_failures(setup, mix, self.standbys)
        )  # when one fails while it waits
        self._redo_s = 0.0  # work that has to be done again before training gets further
        self._saved_at = 0.0  # in training time, and so is the next
        self._trained = 0.0
        self._waiting: list[float] = []  # updates that ride on the next restart

    @property
    def now(self) -> float:
        return self.book.at

    def play_job(self) -> ScaleResult:
        weather = draw_schedule(self.setup, self.mix)
        updates = list(weather.updates)
        for strike in weather.strikes:
            self.rng.seed(f"{self.practice.name} {self.setup.seed} {strike.at}")  # the same whatever went before
            while updates and updates[0] <= strike.at:
                self._update_code(updates.pop(0))
            self._train_until(strike.at, "")
            self._mend_failure(strike)
        for at in updates:
            self._update_code(at)
        self._train_until(self.setup.end_at, "")
        self.book.cut_at(self.setup.end_at)
        practice = self.practice
        stall = practice.save_stall_s / (practice.save_every_s or self.setup.step_s)
        stall += self.prices.share_value("backup_drag") if practice.keeps == "memory" else 0.0
        names = (practice.name, self.mix.name)
        return make_result(self.setup, names, self.standbys, self.book, self.tally, stall=min(stall, 0.9))

    # --- time --------------------------------------------------------------------------------------------------

    def _spend_time(self, use: str, seconds: float, cause: str) -> None:
        self.book.add_piece(use, self.now + seconds, cause)

    def _train_until(self, until: float, cause: str) -> None:
        """Train until this instant: first redo lost work, then make progress."""
        redone = min(self._redo_s, max(0.0, until - self.now))
        self._spend_time("redo", redone, cause or self._cause)
        self._redo_s -= redone
        self._trained += max(0.0, until - self.now)
        self.book.add_piece(TRAIN, until)

    _cause = ""

    def _lose_work(self, more_s: float = 0.0) -> None:
        """Discard the work since the last save, and at least the last `more_s` seconds of training."""
        every_s = self.practice.save_every_s
        lost_s = self._trained % every_s if every_s else self.setup.step_s * self.rng.random()
        lost_s = min(self._trained, max(lost_s, more_s))
        self._trained -= lost_s
        self._redo_s += lost_s

    # --- failures ----------------------------------------------------------------------------------------------

    def _mend_failure(self, strike: ScheduledFailure) -> None:
        self.tally.incidents += 1
        name = strike.name
        self._cause = name
        self.tally.count_failure(name)
        shows: Shows = "silence" if strike.blast else strike.fault.shows
        why = "machine" if strike.blast else strike.why
        sees = self._sees[shows]
        if why in ("passing", "outside") and self._is_down(strike.at):
            return  # the job was down anyway
        if why == "passing" and shows == "slow" and self._passes_unseen(sees, name):
            return
        for attempt in range(1, 1000):
            self._detect_failure(sees, name)
            last = attempt >= self.practice.tries
            if last and not sees.by_hand and why in ("machine", "release") and sees.names < 1:
                self.tally.people += 1
                self._spend_time("person", self.prices("person_corruption" if shows == "loss" else "person"), name)
            named = why == "machine" and (last or self.rng.random() < sees.names)
            self._restart_job(sees, self._nodes_gone(strike, sees) if named or sees.group else 0, name)
            solved = why == "passing" or named or (why == "release" and (self.practice.rollback or last))
            if why == "release" and solved and self.practice.rollback:
                self.tally.rolled_back += 1
            if why == "outside":
                self._spend_time("wait", max(0.0, self.prices("away") - self.prices(self.practice.restart)), name)
                return
            if solved or self.now >= self.setup.end_at:
                return
            self._train_until(self.now + self.prices("corrupts" if shows == "loss" else "relapse"), name)

    def _is_down(self, at: float) -> bool:
        """Return whether no rank ran at this instant; a failure at such an instant harms nothing."""
        piece = self.book.piece_at(at)
        return piece is not None and piece.use not in (TRAIN, "redo", "launch", "update")

    def _passes_unseen(self, sees: SymptomResponse, name: str) -> bool:
        """If a slow job recovers before anybody notices, record the slow stretch in the book. Return whether it did."""
        slow_s = self.prices("passes")
        if slow_s >= sees.detect_s[0]:
            return False
        self.book.add_slow_stretch(self.now, slow_s, self.prices.share_value("drag"), name)
        return True

    def _detect_failure(self, sees: SymptomResponse, name: str) -> None:
        detect_s = self.rng.uniform(*sees.detect_s)
        self.tally.people += sees.by_hand
        if sees.shows == "slow":  # steps go on, slowly
            self.book.add_slow_stretch(self.now, detect_s, self.prices.share_value("drag"), name)
            self._train_until(self.now + detect_s, name)
        else:
            self._spend_time("detect", detect_s, name)
        self._spend_time("diagnose", self.rng.uniform(*sees.locate_s), name)

    def _nodes_gone(self, strike: ScheduledFailure, sees: SymptomResponse) -> int:
        return strike.blast.nodes if strike.blast else self.practice.group if sees.group else 1

    def _restart_job(self, sees: SymptomResponse, gone: int, name: str) -> None:
        self._lose_work(sees.detect_s[1] if sees.shows == "loss" else 0.0)
        self._waiting.clear()
        short = gone - self._take_standbys(gone)
        if short > 0 and self.practice.standbys == "p99":
            self.tally.waits += 1
            self._spend_time("wait", self.prices("acquire", "boot"), name)
        if sees.mend_s is not None:
            drawn_s = sees.most_s * self.rng.random() ** (sees.most_s / sees.mend_s - 1)  # has that mean and that most
            self._spend_time("launch", max(0.0, drawn_s + self._larger_s), name)
        else:
            self._spend_time("launch", self.prices(self.practice.restart), name)

    def _take_standbys(self, gone: int) -> int:
        """Take up to `gone` standbys; return how many were available. Each is replaced after a delay."""
        while self._idle and self._idle[0] <= self.now:
            self._back_at.append(self._idle.popleft() + self.prices("acquire", "boot"))
            self.tally.standbys_lost += 1
        self._back_at = [at for at in self._back_at if at > self.now]
        taken = min(gone, max(0, self.standbys - len(self._back_at)))
        self._back_at += [self.now + self.prices("acquire", "boot") for _ in range(taken)]
        self.tally.evicted += gone
        self.tally.standbys_used += taken
        return taken

    def _update_code(self, at: float) -> None:
        """Update the code at the time `at`. A practice that requeues restarts the job at once. Otherwise the update
        waits for the next restart; an update that has waited for a day causes a restart of its own."""
        self.tally.updates += 1
        if self.practice.updates == "requeue":
            self._train_until(at, "")
            self._lose_work()
            self._spend_time("update", self.prices("requeue"), "update")
            return
        late = [asked for asked in self._waiting if asked + _WINDOW_S <= at]
        for asked in late:
            self._train_until(asked + _WINDOW_S, "")
            self._spend_time("update", self.prices("first_step"), "update")
        self._waiting = [] if late else self._waiting
        self._waiting.append(at)


def load_policy(name: str) -> PublishedPolicy:
    text = resources.files("holdfast.sim.scale").joinpath("practices", f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), PublishedPolicy)
