"""A healthy run with all in it that looks like a hang: who is named while it lasts, and that nobody is acted on."""

import os
import random
import time
from collections.abc import Callable

import msgspec

from benchmarks._detect_hangs import Hangs, Trial
from benchmarks._detect_hangs import said as trial_said
from benchmarks._detect_rank import KEEPS
from benchmarks._detect_scene import RANKS, Named, Scene, at_random
from benchmarks._harness import Job

# What it is called, what the script knows it as, who keeps the others waiting (None: nobody; "any": one by chance).
STALLS: list[tuple[str, str, int | str | None]] = [
    ("evaluation", "evaluate", None),
    ("save on rank 0", "save", 0),
    ("preprocessing on rank 0", "prepare", 0),
    ("recompilation", "compile", "any"),
    ("data-loader stall", "loader", "any"),
    ("wait for a service", "service", "any"),
    ("wait for a reading thread", "prefetch", "any"),
    ("short sleep", "pause", "any"),
]
NEWS_S = 1.0  # an alarm may be written this much later than what it is about ended


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    rank: int | None  # that keeps the others waiting
    began: float
    ended: float
    named: tuple[Named, ...]  # alarms of any sort since the last stall ended

    @property
    def mistakes(self) -> list[Named]:
        return [one for one in self.named if one.ranks and not self._is_right(one)]

    def _is_right(self, one: Named) -> bool:
        return one.ranks == (self.rank,) and self.began <= one.at <= self.ended + NEWS_S


class Healthy(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    steps: int
    generation: int
    stalls: list[Stall]
    load: float
    after: Trial  # a hang at the end of it: learned pauses must not hide it


def stall(scene: Scene, which: tuple[str, str, int | str | None], seconds: float, chance: random.Random) -> Stall:
    """One of them, and who was named since the last one."""
    kind, form, who = which
    rank = chance.randrange(RANKS) if who == "any" else who
    ranks = (rank,) if who == "any" and isinstance(rank, int) else ()
    watched = rank if isinstance(rank, int) else 0
    # What all ranks do together must begin in the same step.
    with scene.order(form, *ranks, at=0 if ranks else scene.step() + 8, seconds=seconds) as id:
        began = scene.began(id, watched)
        ended = scene.until(lambda: scene.noted("ended", id, watched), f"the end of {kind}", seconds + 60.0)
    step = scene.step()
    scene.until(lambda: scene.step() > step + 5, f"steps after {kind}")
    time.sleep(1.5)
    found = Stall(
        kind=kind, rank=watched if who is not None else None, began=began, ended=ended, named=tuple(scene.alarms())
    )
    said(found)
    return found


def said(one: Stall) -> None:
    named = "; ".join(f"{n.kind} {n.ranks} {n.stance} at {n.at - one.began:.1f} s" for n in one.named) or "nobody"
    wrong = "  MISTAKE: " + "; ".join(n.reason for n in one.mistakes) if one.mistakes else ""
    print(f"  {one.kind} of rank {one.rank}, {one.ended - one.began:.1f} s: named {named}{wrong}", flush=True)


def healthy(seconds: float, save_s: float, other_s: Callable[[random.Random], float], seed: int) -> Healthy:
    """All stalls in turn for so long, then one hang."""
    chance = random.Random(seed)
    with Job(RANKS) as job:
        scene = Scene(job)
        # A restart must be cheap: where it costs minutes, all pauses are waited for.
        scene.start("--standbys=1", env={KEEPS: "1"})
        began, first = time.time(), scene.step()
        stalls: list[Stall] = []
        while not stalls or time.time() < began + seconds:
            for which in STALLS:
                at_random(chance, 8.0)
                stalls.append(stall(scene, which, save_s if which[1] == "save" else other_s(chance), chance))
        took, steps, generation = time.time() - began, scene.step() - first, scene.generation()
        after = Hangs(scene, chance).trial("user code")
        trial_said(after)
    return Healthy(
        seconds=took, steps=steps, generation=generation, stalls=stalls, load=os.getloadavg()[0], after=after
    )
