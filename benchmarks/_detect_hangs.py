"""Hangs of many kinds in one running job: who was named, when, and how soon it stepped again where that was acted on.

A hang does not end by itself, and here none does: the rank is killed once it was named, or was not for long enough, and
the job goes on in its next generation.
"""

import os
import random
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from benchmarks._detect_rank import KEEPS
from benchmarks._detect_scene import RANKS, Failed, Named, Scene, at_random
from benchmarks._harness import Job

# kind -> the forms it takes by chance, as the script knows them
KINDS = {
    "stopped": ("stop",),
    "user code": ("sleep", "locked"),
    "data loader": ("loader",),
    "checkpoint writer": ("writer",),
    "deadlock": ("crossed", "astray"),
    "mismatch": ("other",),
    "GIL held": ("spin", "lock"),
}
SLEEPERS = ("sleep", "locked", "lock")  # acted on when waiting has cost a restart
ENDLESS = ("crossed", "astray", "other")  # acted on at the second look
ACTED = ("stop", *SLEEPERS, *ENDLESS)
LIMIT_S = 30.0
STEPPING_LIMIT_S = 150.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    form: str
    ranks: tuple[int, ...]  # at fault
    nodes: tuple[str, ...]
    named: Named | None  # the first alarm
    named_s: float | None
    stepping_s: float | None = None  # where it is to be acted on
    load: float

    @property
    def right(self) -> bool:
        return self.named is not None and (self.named.ranks, self.named.nodes) == (self.ranks, self.nodes)


class Hangs:
    def __init__(self, scene: Scene, chance: random.Random) -> None:
        self.scene = scene
        self.chance = chance

    def trial(self, kind: str) -> Trial:
        scene, form = self.scene, self.chance.choice(KINDS[kind])
        ranks = tuple(sorted(self.chance.sample(range(RANKS), 2 if kind == "deadlock" else 1)))
        scene.steady()
        scene.until(scene.has_standby, "a standby")
        at_random(self.chance, 2.0)
        generation, node_of = scene.generation(), scene.node_of()
        scene.alarms()
        with self._inflicted(form, ranks) as at:
            found = self._awaited()
            stepping = self._stepping(generation) if form in ACTED and found else None
        if stepping is None:
            scene.signal(ranks[0], signal.SIGKILL)
        scene.steady(after=generation)
        return Trial(
            kind=kind,
            form=form,
            ranks=ranks,
            nodes=tuple(sorted({node_of[rank] for rank in ranks})),
            named=found,
            named_s=round(found.at - at, 2) if found else None,
            stepping_s=round(stepping - at, 2) if stepping else None,
            load=os.getloadavg()[0],
        )

    @contextmanager
    def _inflicted(self, form: str, ranks: tuple[int, ...]) -> Iterator[float]:
        """Since when it lasts."""
        scene = self.scene
        if form == "stop":
            yield scene.signal(ranks[0], signal.SIGSTOP)
            return
        # Who is to go astray is told in the order's first place; two that are to cross must do so in the same step.
        told = self.chance.sample(ranks, len(ranks))
        with scene.order(form, *told, at=scene.step() + 8 if len(ranks) > 1 else 0) as id:
            yield max(scene.began(id, rank) for rank in ranks)

    def _stepping(self, generation: int) -> float | None:
        try:
            return self.scene.stepped(generation, STEPPING_LIMIT_S)
        except Failed:
            return None

    def _awaited(self) -> Named | None:
        try:
            return self.scene.until(self.scene.alarms, "an alarm", LIMIT_S)[0]
        except Failed:
            return None


def hangs(each: int, seed: int, of: Collection[str] = tuple(KINDS)) -> list[Trial]:
    """So many of each of these kinds, in a random order, in one job."""
    chance = random.Random(seed)
    kinds = [kind for kind in of for _ in range(each)]
    chance.shuffle(kinds)
    with Job(RANKS) as job:
        scene = Scene(job)
        # The same failure again and again would be probed for; and a script that always begins anew would count as its
        # cause after the third.
        scene.start("--standbys=1", "--set=probe.allow=false", env={KEEPS: "1"})
        trials = []
        for kind in kinds:
            trials.append(Hangs(scene, chance).trial(kind))
            said(trials[-1])
    return trials


def said(trial: Trial) -> None:
    named = trial.named
    found = f"named {named.ranks} on {named.nodes} ({named.stance}) after {trial.named_s} s" if named else "not named"
    back = f", stepping after {trial.stepping_s} s" if trial.stepping_s else ""
    wrong = "" if trial.right else f"  WRONG: {named.reason if named else ''}"
    print(f"  {trial.form} {trial.ranks} on {trial.nodes}: {found}{back}{wrong}", flush=True)
