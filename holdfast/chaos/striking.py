"""Strikes a running job, fault by fault, and writes down the truth and what the job made of it."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.chaos import moment
from holdfast.chaos.catalog import kind_of
from holdfast.chaos.fault import Cannot, Fault, Line, Result, Skipped, Told, Truth, Undone
from holdfast.chaos.guard import Guard
from holdfast.chaos.scenario import Scenario
from holdfast.chaos.scene import Scene
from holdfast.chaos.sight import Sight
from holdfast.model.alarm import Alarm
from holdfast.model.verdict import Change, Record

NAME = "chaos.jsonl"
_LOOK_S = 0.1
_QUIET_STEPS, _QUIET_S = 5, 3.0  # a fault that nobody is to notice is over after so many steps and so long
_LATE_S = 10.0  # an alarm may come so long after what it is about was undone
_encode = msgspec.json.Encoder().encode
L = TypeVar("L", Truth, Skipped, Result, Undone)


class Open:
    """A fault whose result is not known yet."""

    def __init__(self, truth: Truth, began: float, fault: Fault) -> None:
        self.truth, self.began = truth, began
        self.ends = began + fault.for_s if fault.for_s else None
        self.alarms: list[Told] = []
        self.closed: list[Record] = []
        self.back_s: float | None = None
        self.undone_at: float | None = None

    def heard(self, alarm: Alarm, at: float) -> None:
        if at < self.truth.at:
            return  # of something that was before
        self.alarms.append(
            Told(
                kind=alarm.kind,
                at=at,
                suspects=alarm.suspects,
                ranks=alarm.ranks,
                stance=alarm.stance,
                reason=alarm.reason,
            )
        )

    def right(self) -> list[Told]:
        return [told for told in self.alarms if told.kind in self.truth.alarms]

    def result(self) -> Result:
        right = self.right()
        nodes = set(self.truth.nodes)
        wanted = bool(self.truth.alarms)
        return Result(
            id=self.truth.id,
            kind=self.truth.fault.kind,
            seen=bool(right) if wanted else None,
            named=any(nodes & set(told.suspects) for told in right) if right and nodes else None,
            seen_s=round(min(told.at for told in right) - self.truth.at, 3) if right else None,
            back_s=round(self.back_s, 3) if self.back_s is not None else None,
            alarms=tuple(self.alarms),
            evicted=tuple(node for record in self.closed for node in record.evicted),
            sentences=tuple(record.sentence for record in self.closed),
        )


class Striker:
    """One job under fire; `say` tells a person."""

    def __init__(self, sight: Sight, guard: Guard, seed: int, say: Callable[[str], None] = print) -> None:
        self.scene = Scene(sight, guard, random.Random(seed))
        self.lines: list[Line] = []
        self._sight, self._guard, self._say = sight, guard, say
        self._path = Path(sight.run_dir) / NAME
        self._id = 0
        self._open: list[Open] = []
        self.closed: list[Record] = []  # incidents, since we began
        self.changed: list[Change] = []  # and restarts that were wanted
        sight.news()  # what was before is none of our doing

    def run(self, scenario: Scenario) -> list[Result]:
        """All of it, undone at the end."""
        for fault in scenario.fault:
            if self._sight.ended():
                self._say("the job has ended; the rest of the scenario is left out")
                break
            self.strike(fault, scenario.patience_s)
            if not fault.overlap:
                self.settle(scenario.patience_s)
        self.settle(scenario.patience_s)
        self.undo()
        return [line for line in self.lines if isinstance(line, Result)]

    def strike(self, fault: Fault, patience_s: float) -> Truth | Skipped:
        """Wait for its moment and do it."""
        self._id += 1
        self.scene.id = self._id
        self._wait(fault.after_s)
        try:
            kind = kind_of(fault)
            if why := kind.lacks():
                raise Cannot(why)
            if fault.when in ("", "saving") or fault.at_step:
                moment.await_step(self.scene, fault, lambda: not self._sight.ended(), patience_s)
            with moment.seized(self.scene, fault, patience_s) as pids:
                status = self.scene.status()
                at, began = time.time(), time.monotonic()
                struck = kind.strike(self.scene, fault)
                pids.update(struck.pids)
        except (Cannot, OSError) as e:
            skipped = Skipped(id=self._id, fault=fault, at=time.time(), why=str(e))
            self._say(f"skipped {fault.kind}: {e}")
            self._undo(self._id)
            return self._noted(skipped)
        truth = Truth(
            id=self._id,
            fault=struck.fault,
            at=struck.at or at,
            generation=status.generation,
            step=status.step,
            what=struck.what,
            ranks=struck.ranks,
            nodes=struck.nodes,
            pids=struck.pids,
            alarms=kind.alarms if struck.alarms is None else struck.alarms,
            blind=kind.blind or struck.blind,
        )
        self._say(f"step {status.step}: {struck.what}")
        self._open.append(Open(truth, began, fault))
        return self._noted(truth)

    def settle(self, patience_s: float) -> None:
        """Until the job has come back from everything that was done to it, or patience ends."""
        until = max((one.began for one in self._open), default=0.0) + patience_s
        while self._open and time.monotonic() < until and not self._sight.ended():
            time.sleep(_LOOK_S)
            self.look()
        for one in self._open:
            self._noted(result := one.result())
            self._say(said(result))
        self._open = []

    def undo(self) -> None:
        for id in range(1, self._id + 1):
            self._undo(id)

    # --- looking -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what is new, undo what has lasted long enough, and note what is over."""
        now = time.monotonic()
        for one in self._open:
            if one.ends is not None and now > one.ends:
                self._undo(one.truth.id)
                one.ends, one.undone_at = None, now
        for entry in self._sight.news():
            if entry.decision.closed:
                self.closed.append(entry.decision.closed)
            if entry.decision.changed:
                self.changed.append(entry.decision.changed)
            for one in self._open:
                if isinstance(entry.event, Alarm):
                    one.heard(entry.event, entry.at)
                if entry.decision.closed:
                    one.closed.append(entry.decision.closed)
        for one in [one for one in self._open if one.ends is None and self._is_back(one, now)]:
            self._open.remove(one)
            self._noted(result := one.result())
            self._say(said(result))

    def _is_back(self, one: Open, now: float) -> bool:
        """The whole job makes steps, after what was to be noticed has been."""
        status = self._sight.status()
        if status is None or status.phase != "training":
            one.back_s = None
            return False
        truth = one.truth
        newer = status.generation > truth.generation and status.step > 0
        further = status.generation == truth.generation and status.step >= truth.step + _QUIET_STEPS
        if not newer and not further:
            return False
        if one.back_s is None:
            one.back_s = now - one.began
        if not truth.alarms:
            return now - one.began > _QUIET_S
        if not one.right():
            return one.undone_at is not None and now > one.undone_at + _LATE_S
        # A standby is parted with, and no incident is made of it.
        aside = truth.fault.kind == "standby.kill"
        return aside or bool(one.closed) or not any(told.stance == "act" for told in one.right())

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not self._sight.ended():
            time.sleep(min(_LOOK_S, left_s))
            self.look()

    def _undo(self, id: int) -> None:
        if self._guard.holds(id):
            self._noted(Undone(id=id, at=time.time(), trouble=self._guard.drop(id)))

    def _noted(self, line: L) -> L:
        self.lines.append(line)
        try:
            with self._path.open("ab") as file:
                file.write(_encode(line) + b"\n")
        except OSError as e:
            self._say(f"{self._path} cannot be written: {e.strerror}")
        return line


def said(result: Result) -> str:
    seen = {None: "nobody had to notice", False: "NOT NOTICED", True: f"noticed after {result.seen_s or 0:.1f} s"}
    back = f"stepping again after {result.back_s:.1f} s" if result.back_s is not None else "NOT BACK"
    wrong = "" if result.named is not False else ", ANOTHER NODE WAS NAMED"
    return f"{result.kind}: {seen[result.seen]}{wrong}, {back}"


def good(results: list[Result]) -> bool:
    """Of those that were struck; where none was, there is nothing to be good."""
    return bool(results) and all(
        result.seen is not False and result.named is not False and result.back_s is not None for result in results
    )
