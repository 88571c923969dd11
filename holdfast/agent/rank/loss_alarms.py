"""Runs the loss detectors on losses from the ranks' progress slots and log lines; also collects state hashes."""

from collections.abc import Iterator
from math import isfinite

import msgspec

from holdfast.agent.agent_interfaces import RankSlots
from holdfast.core.detect import nonfinite_loss
from holdfast.core.detect.loss_spikes import LossLimits, SpikeDetector, SpikeRule, alarm_of, policy_hindrance
from holdfast.core.detect.redone_losses import RedoneLosses
from holdfast.core.incident.alarm_rate_limit import cap_stance
from holdfast.model.detector_alarm import Alarm
from holdfast.model.loss_response import Ease
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import Loss, Mark, StepValues
from holdfast.wire.rank_memory.slot_reader import SlotReading

_READERS = 1 << 10  # of ranks, dead ones among them


class LossAlarms:
    """Holds one loss detector for every rank of every generation that runs here."""

    def __init__(self, node: str, limits: LossLimits) -> None:
        self._node = node
        self._limits = limits
        self._read: dict[tuple[int, int, int], tuple[int, int]] = {}  # up to which write, and entry of a rank's ring
        self._spikes: dict[tuple[int, int, int], SpikeDetector] = {}
        self._said: dict[str, int] = {}  # until which step a rule has nothing more to say, whichever rank it is about
        self._marks: list[Mark] = []
        self._logged: list[tuple[StepValues, str]] = []  # from log lines, and which; not judged yet
        self._logged_bad: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # by generation and rank: first step, how many in a row
        self._single = 0  # the generation of which a single loss has been told
        self._skipping = 0  # the generation of which skipped updates have been told
        self.source = ""  # the lines that losses were read from
        self._redone = RedoneLosses(limits)
        self._ranks = 0  # of the generation that runs
        self._differing: list[Alarm] = []  # redone steps, until every rank has made one
        self._eases: tuple[Ease, ...] = ()  # of the generation that runs

    def on_launch(self, launch: LaunchHere) -> None:
        """Prepare for the next generation, from its launch errand."""
        self._eases = launch.eases
        self._redone.on_launch(launch)
        self._ranks, self._differing, self._logged_bad = launch.seat.nproc, [], {}

    def take_marks(self) -> tuple[Mark, ...]:
        """Return the state hashes that ranks have reported since the last call."""
        marks, self._marks = tuple(self._marks), []
        return marks

    def on_logged(self, told: StepValues, source: str) -> None:
        """Queue the loss and other values that a log line gives for a step; `source` is the kind of line."""
        self._logged.append((told, source))

    def read_losses(self, slots: RankSlots, offset_s: float) -> Iterator[Alarm | Loss]:
        """Yield new losses and alarms from the slots; `offset_s` converts their times to the controller's time.

        Ranks with bad losses come in the order in which their losses went bad, as all-reduces spread bad values.
        """
        readings = slots.read_slots()
        spoilt = [r for _, r in readings if r.lasting_bad_step >= 0]
        spoilt.sort(key=lambda r: r.lasting_bad_step)
        yield from nonfinite_loss.add_alike([self._nonfinite_loss(r, r.lasting_bad_step, offset_s) for r in spoilt])
        for _, reading in readings:
            if reading.loss is not None and -1 < reading.first_bad_step < reading.loss_step and reading not in spoilt:
                yield from self._tell_single(self._nonfinite_loss(reading, reading.first_bad_step, offset_s))
        yield from self._tell_skipping([reading for _, reading in readings], offset_s)
        for index, reading in readings:
            yield from self._new_alarms(slots, index, reading, offset_s)
        yield from self._judge_logged({r.rank: r for _, r in readings})
        stepped = sum(reading.step >= 0 for _, reading in readings)
        if stepped >= self._ranks or not readings:  # earlier the job would seem to have made no step at all
            differing, self._differing = self._differing, []
            yield from differing

    def _tell_single(self, told: Loss) -> Iterator[Alarm]:
        """Yield an alarm, once per generation, about a loss that was not finite though later losses were."""
        if told.generation > self._single:
            self._single = told.generation
            alarm = nonfinite_loss.single_alarm_of(told)
            yield msgspec.structs.replace(alarm, stance=cap_stance(alarm.stance, self._limits.stance))

    def _tell_skipping(self, readings: list[SlotReading], offset_s: float) -> Iterator[Alarm]:
        """Yield, once per generation, an alarm about a rank whose GradScaler skips every optimizer update."""
        for reading in readings:
            if reading.skipped_updates >= nonfinite_loss.SKIPPED_UPDATES and reading.generation > self._skipping:
                self._skipping = reading.generation
                told = self._nonfinite_loss(reading, max(reading.step, reading.first_step), offset_s)
                alarm = nonfinite_loss.skipping_alarm_of(told, reading.skipped_updates)
                yield msgspec.structs.replace(alarm, stance=cap_stance(alarm.stance, self._limits.stance))

    def _nonfinite_loss(self, reading: SlotReading, step: int, offset_s: float) -> Loss:
        return Loss(
            node=self._node,
            generation=reading.generation,
            rank=reading.rank,
            step=step + max(0, _step_origin(reading)),
            loss=0.0 if reading.loss is None else reading.loss,
            at=reading.at + offset_s,
            numbered=_step_origin(reading) >= 0,
        )

    def _judge_logged(self, readings: dict[int, SlotReading]) -> Iterator[Alarm | Loss]:
        """Yield losses and alarms from log lines of ranks that report no loss in any other way."""
        logged, self._logged = self._logged, []
        for told, source in logged:
            reading = readings.get(told.rank)
            if reading is not None and (reading.generation != told.generation or reading.loss is not None):
                continue
            self.source = source
            if told.loss is not None:
                yield from self._judge_logged_loss(told, told.loss)
            yield from self._judge_values(told, 0, reading is not None and reading.skippable)
            self._compare_redone(told, None)

    def _judge_logged_loss(self, told: StepValues, loss: float) -> Iterator[Alarm | Loss]:
        """Yield each non-finite loss that follows another; if a finite loss follows a single one, yield an alarm."""
        owner = (told.generation, told.rank)
        first, count = self._logged_bad.pop(owner, (told.step, 0))
        bad = Loss(node=self._node, generation=told.generation, rank=told.rank, step=first, loss=loss, at=told.at)
        if not isfinite(loss):
            self._logged_bad[owner] = first, count + 1
            yield from (bad,) * (count > 0)
        elif count == 1:
            yield from self._tell_single(bad)

    def _new_alarms(self, slots: RankSlots, index: int, reading: SlotReading, offset_s: float) -> Iterator[Alarm]:
        owner = (reading.generation, reading.rank, reading.pid)
        seq, count = self._read.get(owner, (0, 0))
        if seq == reading.seq:
            return  # what goes into the ring is followed by a write of the step
        count, news = slots.read_entries(index, reading, count)
        self._read[owner] = reading.seq, count
        for one in news:
            if isinstance(one, Mark):
                self._marks.append(one)
                continue
            origin = _step_origin(reading)
            numbered = {"step": one.step + max(0, origin), "numbered": origin >= 0}
            told = msgspec.structs.replace(one, at=one.at + offset_s, **numbered)
            yield from self._judge_values(told, reading.pid, reading.skippable)
            resumed = reading.first_step - 1 + max(0, origin) if reading.first_step >= 0 else None
            self._compare_redone(told, resumed)

    def _compare_redone(self, told: StepValues, resumed: int | None) -> None:
        if alarm := self._redone.on_values(told, resumed):
            self._differing.append(alarm)

    def _judge_values(self, told: StepValues, pid: int, skippable: bool) -> Iterator[Alarm]:
        owner = (told.generation, told.rank, pid)
        if owner not in self._spikes:
            if len(self._spikes) >= _READERS:
                self._spikes.clear()
                self._read.clear()
            self._spikes[owner] = SpikeDetector(self._limits)
        if rules := [found for found in self._spikes[owner].on_values(told) if self._is_new(found[0], told)]:
            hindered = policy_hindrance(self._limits, told, skippable, self._eases)
            yield alarm_of(self._node, told, rules, self._limits, hindered)

    def _is_new(self, rule: SpikeRule, told: StepValues) -> bool:
        """Return whether this is the rule's first match in `window` steps; record the match. Matches of all ranks are
        counted together, except those of OWN_TIMES: it is about a rank's own gradient norm."""
        key = f"{rule} {told.generation}" + (f" {told.rank}" if rule is SpikeRule.OWN_TIMES else "")
        fresh = told.step >= self._said.get(key, -1)
        self._said[key] = told.step + self._limits.window
        return fresh


def _step_origin(reading: SlotReading) -> int:
    """Return by how much the script's step numbers exceed this rank's; -1 if this is unknown."""
    return reading.origin if reading.counted else 0
