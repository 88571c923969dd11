"""Redone-loss detector: after a restart, steps that are made again must have the same losses as before.

This test checks the restored state, the code and the machines for free. A job is exact if all its redone steps have
been equal bit for bit. In an exact job, the first redone step that differs raises an alarm. In other jobs, a step must
differ by far more than redone steps did after earlier restarts. With too few such steps nothing is concluded. A
difference names no node, because either result may be wrong. So the step is made a third time, and the result that
comes twice counts.

Losses under another release are only reported, since a release may be meant to change them. Losses are not compared if
the job's size, its batches or its learning rate have changed, or if replicas proved the states wrong.
"""

from collections import OrderedDict
from math import isfinite

import msgspec

from holdfast.core.detect.loss_spikes import LossLimits
from holdfast.core.incident.alarm_rate_limit import cap_stance
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.node_errands import LaunchHere
from holdfast.model.observation import StepValues

SIGNATURE = "redone loss"
_KEPT = 2048  # steps of one rank; who resumes from further back is compared from there on
_LEAST = 8  # redone steps before anything is concluded from their losses
_TIMES = 10.0  # what redone steps differed by at most after earlier restarts
_ACTS = 2  # alarms to act on; a job that differs more often is not exact, whatever it seemed to be
_DIFFERS = "the restored state, the code or a machine differs"


class MadeStep(msgspec.Struct, frozen=True):
    """The loss of one step in one generation."""

    generation: int
    since: int  # the step of the value before: a logged loss may be the mean of all steps in between
    loss: float


class LossNoise:
    """By how much the losses of steps that were made again differ, relative to the loss, over all restarts."""

    def __init__(self) -> None:
        self._compared = 0  # steps
        self._unrounded = 0  # of these, whose losses have more digits than people read
        self._largest = self._earlier = 0.0  # of all, and of those before this launch
        self._settled = 0  # compared before this launch
        self._reach = self._earlier_reach = 0  # steps after a launch up to which it is known

    def on_launch(self) -> None:
        self._settled, self._earlier, self._earlier_reach = self._compared, self._largest, self._reach

    def add(self, part: float, offset: int, loss: float) -> None:
        """Record that the loss of a redone step, `offset` steps after the launch, differed by the share `part`."""
        self._compared += 1
        self._unrounded += float(f"{loss:.6g}") != loss
        self._largest, self._reach = max(self._largest, part), max(self._reach, offset)

    def limit(self, offset: int) -> float | None:
        """Return by what share a loss may differ `offset` steps after the launch. Return None if this is unknown."""
        if self._unrounded >= _LEAST and self._largest == 0.0:  # losses that a script rounds prove no exact job
            return 0.0
        if self._settled >= _LEAST and self._earlier > 0.0 and offset <= self._earlier_reach:
            return _TIMES * self._earlier
        return None


class RedoneLosses:
    """The newest losses of a node's ranks, compared with the losses that earlier generations had at the same steps."""

    def __init__(self, limits: LossLimits) -> None:
        self._limits = limits
        self._launch: LaunchHere | None = None
        self._made: dict[int, OrderedDict[int, tuple[MadeStep, ...]]] = {}  # by rank and step
        self._same_code = 0  # the first generation since which the release has not changed
        self._newest: dict[int, int] = {}  # by rank: the step of its last value in this generation
        self._began: dict[int, int] = {}  # by rank: the step that this generation went on from
        self._compared: set[int] = set()  # steps of this generation
        self._noise = LossNoise()
        self._doubted: set[int] = set()  # generations that differed: what they alone have made says nothing
        self._acts = 0
        self._said: set[str] = set()  # in this generation

    def on_launch(self, launch: LaunchHere) -> None:
        """Record a launch, and compare the losses that follow with earlier ones. Forget all earlier losses if the world
        size, the skipped steps or the steps with a lowered learning rate have changed."""
        before, self._launch = self._launch, launch
        if before and before.generation == launch.generation:
            return  # the same launch, told twice
        if before and _conditions(before) != _conditions(launch):
            self._made.clear()
        self._forget_wrong_steps(launch)
        if before is None or before.release.number != launch.release.number:
            self._same_code = launch.generation  # even a release that ran before goes on from another one's state
        for facts in (self._newest, self._began, self._compared, self._said):
            facts.clear()
        self._noise.on_launch()

    def _forget_wrong_steps(self, launch: LaunchHere) -> None:
        """Forget losses from states that were proved wrong, because a sound state has other losses there."""
        proved = [doubt for doubt in launch.restore.doubts if doubt.proved]
        for steps in self._made.values() if proved else ():
            for step, made in steps.items():
                steps[step] = tuple(
                    one for one in made if not any(doubt.bans_state(one.generation, step) for doubt in proved)
                )

    def on_values(self, told: StepValues, resumed: int | None) -> Alarm | None:
        """Return an alarm if this loss differs from earlier ones of its step. The job resumed from `resumed`."""
        launch = self._launch
        if launch is None or told.generation != launch.generation or not told.numbered or told.loss is None:
            return None
        since = self._newest.get(told.rank, resumed)
        self._newest[told.rank] = told.step
        self._began.setdefault(told.rank, told.step if since is None else since)
        if since is None or not isfinite(told.loss):
            return None
        now = MadeStep(told.generation, since, told.loss)
        steps = self._made.setdefault(told.rank, OrderedDict())
        earlier = tuple(one for one in steps.get(told.step, ()) if one.generation != told.generation)
        steps[told.step] = (*earlier, now)[-3:]
        steps.move_to_end(told.step)
        if len(steps) > _KEPT:
            steps.popitem(last=False)
        comparable = [one for one in earlier if one.since == since]
        if not comparable or SIGNATURE in self._said:  # what follows a difference differs, too
            return None
        ours = [one for one in comparable if one.generation >= self._same_code]
        if ours:
            return self._compare_step(told, now, ours)
        suspect = f"release {launch.release.number} came in since and may be the reason"
        why = f"{_describe_step(told, comparable[-1])}: {suspect}"
        return None if comparable[-1].loss == now.loss else self._make_alarm(told, "release", why, Stance.NOTIFY)

    def _compare_step(self, told: StepValues, now: MadeStep, ours: list[MadeStep]) -> Alarm | None:
        if all(one.generation in self._doubted for one in ours):
            return None
        limit = 0.0 if self._limits.exact else self._noise.limit(self._offset(told))
        parts = [abs(one.loss - now.loss) / max(abs(one.loss), 1e-300) for one in ours]
        if limit is None or min(parts) <= limit:
            self._learn(told, min(parts))
        if limit is None:
            why = f"{_describe_step(told, ours[-1])}: not comparable, as nobody knows yet how much redone steps differ"
            return None if parts[-1] == 0.0 else self._make_alarm(told, "unknown", why, Stance.OBSERVE)
        if min(parts) > limit:
            return self._on_difference(told, ours[-1], min(parts))
        wrong = [one for one, part in zip(ours, parts, strict=True) if part > limit]
        if not wrong:
            return None
        same = next(one for one, part in zip(ours, parts, strict=True) if part <= limit)
        self._doubted = self._doubted - {same.generation} | {one.generation for one in wrong}
        why = (
            f"step {told.step} has a loss of {now.loss:.9g} again, as in generation {same.generation}; "
            f"generation {wrong[-1].generation} had made it with {wrong[-1].loss:.9g}, and is taken to have been wrong"
        )
        return self._make_alarm(told, "settled", why, Stance.NOTIFY)

    def _learn(self, told: StepValues, part: float) -> None:
        if told.loss is not None and (told.step not in self._compared or part > 0.0):  # ranks may share a loss
            self._compared.add(told.step)
            self._noise.add(part, self._offset(told), told.loss)

    def _offset(self, told: StepValues) -> int:
        return told.step - self._began[told.rank]

    def _on_difference(self, told: StepValues, before: MadeStep, part: float) -> Alarm | None:
        if self._acts >= _ACTS and not self._limits.exact:
            self._learn(told, part)
            why = f"{_describe_step(told, before)}: no reason was found before, so its steps are taken to be inexact"
            return self._make_alarm(told, "inexact", why, Stance.NOTIFY)
        self._doubted.add(told.generation)
        alarm = self._make_alarm(told, SIGNATURE, f"{_describe_step(told, before)}: {_DIFFERS}", Stance.ACT)
        self._acts += alarm is not None
        return alarm

    def _make_alarm(self, told: StepValues, topic: str, why: str, most: Stance) -> Alarm | None:
        """Return an alarm without suspects; None if this generation already had an alarm on the same `topic`."""
        if topic in self._said:
            return None
        self._said.add(topic)
        return Alarm(
            kind=Kind.REDONE,
            at=told.at,
            suspects=(),
            generation=told.generation,
            reason=why,
            signature=topic,
            evidence=(f"rank {told.rank}",),
            stance=cap_stance(most, self._limits.redone_stance),
            not_after=told.step - 1 if most is Stance.ACT else None,
        )


def _conditions(launch: LaunchHere) -> tuple[object, ...]:
    """Return the conditions of a launch on which losses depend, besides the state, the code and the machines."""
    return launch.world_size, launch.skips, launch.eases


def _describe_step(told: StepValues, before: MadeStep) -> str:
    """Return a clause with both losses, in as many digits as it takes to tell them apart."""
    assert told.loss is not None
    digits = next((n for n in range(3, 17) if f"{told.loss:.{n}g}" != f"{before.loss:.{n}g}"), 17)
    return f"step {told.step} was made again with loss {told.loss:.{digits}g}, was {before.loss:.{digits}g}"
