"""Strikes a running job, fault by fault, and records the ground truth and how the job reacted."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.chaos import phase_catcher
from holdfast.chaos.fault_catalog import find_kind
from holdfast.chaos.injection_records import (
    CannotInject,
    ChaosRecord,
    FaultResult,
    GroundTruth,
    InjectedFault,
    NoticedAlarm,
    SkippedFault,
    UndoRecord,
)
from holdfast.chaos.injection_scene import InjectionScene
from holdfast.chaos.job_observer import JobObserver
from holdfast.chaos.scenario import Scenario
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import Change, Record

NAME = "chaos.jsonl"
_LOOK_S = 0.1
_QUIET_STEPS, _QUIET_S = 5, 3.0  # a fault that nobody is to notice is over after so many steps and so long
_LATE_S = 10.0  # an alarm may come so long after what it is about was undone
_encode = msgspec.json.Encoder().encode
L = TypeVar("L", GroundTruth, SkippedFault, FaultResult, UndoRecord)


class OpenFault:
    """A fault whose result is not known yet."""

    def __init__(self, truth: GroundTruth, began: float, fault: InjectedFault) -> None:
        self.truth, self.began = truth, began
        self.ends = began + fault.for_s if fault.for_s else None
        self.alarms: list[NoticedAlarm] = []
        self.closed: list[Record] = []
        self.back_s: float | None = None
        self.undone_at: float | None = None

    def on_alarm(self, alarm: Alarm, at: float) -> None:
        if at < self.truth.at:
            return  # of something that was before
        self.alarms.append(
            NoticedAlarm(
                kind=alarm.kind,
                at=at,
                suspects=alarm.suspects,
                ranks=alarm.ranks,
                stance=alarm.stance,
                reason=alarm.reason,
            )
        )

    def right_alarms(self) -> list[NoticedAlarm]:
        return [told for told in self.alarms if told.kind in self.truth.alarms]

    def make_result(self) -> FaultResult:
        right = self.right_alarms()
        nodes = set(self.truth.nodes)
        wanted = bool(self.truth.alarms)
        return FaultResult(
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
    """Strikes one job and records what follows; `say` prints a line for a person."""

    def __init__(self, sight: JobObserver, guard: UndoGuard, seed: int, say: Callable[[str], None] = print) -> None:
        self.scene = InjectionScene(sight, guard, random.Random(seed))
        self.lines: list[ChaosRecord] = []
        self._sight, self._guard, self._say = sight, guard, say
        self._path = Path(sight.run_dir) / NAME
        self._id = 0
        self._open: list[OpenFault] = []
        self.closed: list[Record] = []  # incidents, since we began
        self.changed: list[Change] = []  # and restarts that were wanted
        sight.new_entries()  # what was before is none of our doing

    def run(self, scenario: Scenario) -> list[FaultResult]:
        """Inject all faults of a scenario, undo them at the end, and return the results."""
        for fault in scenario.fault:
            if self._sight.has_ended():
                self._say("the job has ended; the rest of the scenario is left out")
                break
            self.strike_fault(fault, scenario.patience_s)
            if not fault.overlap:
                self.await_recovery(scenario.patience_s)
        self.await_recovery(scenario.patience_s)
        self.undo_all()
        return [line for line in self.lines if isinstance(line, FaultResult)]

    def strike_fault(self, fault: InjectedFault, patience_s: float) -> GroundTruth | SkippedFault:
        """Wait for the fault's moment and inject it; returns a SkippedFault if that is not possible."""
        self._id += 1
        self.scene.id = self._id
        self._wait_and_poll(fault.after_s)
        try:
            kind = find_kind(fault)
            if why := kind.lacks():
                raise CannotInject(why)
            if fault.when in ("", "saving") or fault.at_step:
                phase_catcher.await_step(self.scene, fault, lambda: not self._sight.has_ended(), patience_s)
            with phase_catcher.seize_moment(self.scene, fault, patience_s) as pids:
                status = self.scene.read_status()
                at, began = time.time(), time.monotonic()
                struck = kind.strike(self.scene, fault)
                pids.update(struck.pids)
        except (CannotInject, OSError) as e:
            skipped = SkippedFault(id=self._id, fault=fault, at=time.time(), why=str(e))
            self._say(f"skipped {fault.kind}: {e}")
            self._undo_one(self._id)
            return self._append_record(skipped)
        truth = GroundTruth(
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
        self._open.append(OpenFault(truth, began, fault))
        return self._append_record(truth)

    def await_recovery(self, patience_s: float) -> None:
        """Wait until the job has recovered from all open faults, or patience ends; then record their results."""
        until = max((one.began for one in self._open), default=0.0) + patience_s
        while self._open and time.monotonic() < until and not self._sight.has_ended():
            time.sleep(_LOOK_S)
            self.poll_job()
        for one in self._open:
            self._append_record(result := one.make_result())
            self._say(result_text(result))
        self._open = []

    def undo_all(self) -> None:
        for id in range(1, self._id + 1):
            self._undo_one(id)

    # --- looking -----------------------------------------------------------------------------------------------

    def poll_job(self) -> None:
        """Read new journal entries, undo faults whose time is up, and record the results of finished ones."""
        now = time.monotonic()
        for one in self._open:
            if one.ends is not None and now > one.ends:
                self._undo_one(one.truth.id)
                one.ends, one.undone_at = None, now
        for entry in self._sight.new_entries():
            if entry.decision.closed:
                self.closed.append(entry.decision.closed)
            if entry.decision.changed:
                self.changed.append(entry.decision.changed)
            for one in self._open:
                if isinstance(entry.event, Alarm):
                    one.on_alarm(entry.event, entry.at)
                if entry.decision.closed:
                    one.closed.append(entry.decision.closed)
        for one in [one for one in self._open if one.ends is None and self._is_back(one, now)]:
            self._open.remove(one)
            self._append_record(result := one.make_result())
            self._say(result_text(result))

    def _is_back(self, one: OpenFault, now: float) -> bool:
        """Return whether the whole job makes steps again and the expected alarms, if any, have come or are overdue."""
        status = self._sight.read_status()
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
        if not one.right_alarms():
            return one.undone_at is not None and now > one.undone_at + _LATE_S
        # A standby is parted with, and no incident is made of it.
        aside = truth.fault.kind == "standby.kill"
        return aside or bool(one.closed) or not any(told.stance == "act" for told in one.right_alarms())

    def _wait_and_poll(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not self._sight.has_ended():
            time.sleep(min(_LOOK_S, left_s))
            self.poll_job()

    def _undo_one(self, id: int) -> None:
        if self._guard.has_undo(id):
            self._append_record(UndoRecord(id=id, at=time.time(), trouble=self._guard.run_undo(id)))

    def _append_record(self, line: L) -> L:
        self.lines.append(line)
        try:
            with self._path.open("ab") as file:
                file.write(_encode(line) + b"\n")
        except OSError as e:
            self._say(f"{self._path} cannot be written: {e.strerror}")
        return line


def result_text(result: FaultResult) -> str:
    seen = {None: "nobody had to notice", False: "NOT NOTICED", True: f"noticed after {result.seen_s or 0:.1f} s"}
    back = f"stepping again after {result.back_s:.1f} s" if result.back_s is not None else "NOT BACK"
    wrong = "" if result.named is not False else ", ANOTHER NODE WAS NAMED"
    return f"{result.kind}: {seen[result.seen]}{wrong}, {back}"


def is_good(results: list[FaultResult]) -> bool:
    """Return whether every fault was detected, located and recovered from; False if there are no results."""
    return bool(results) and all(
        result.seen is not False and result.named is not False and result.back_s is not None for result in results
    )
