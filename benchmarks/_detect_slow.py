"""A rank that takes longer than the others, and windows in which none does: who is named."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks._detect_scene import RANKS, SCRIPT, Named, Scene, at_random
from benchmarks._harness import Job

WINDOW_S = 20.0
SETTLE_S = 14.0  # until what was seen of the last trial is forgotten
# The same rank is named again and again here; by default a person would not be told of it twice in ten minutes.
FLAGS = ("--set=slow.again_s=1",)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    times: float  # 1: nobody is slow
    rank: int
    node: str
    named: tuple[Named, ...]
    named_s: float | None  # the first
    load: float

    @property
    def right(self) -> bool:
        if self.times == 1.0:
            return not self.named
        return bool(self.named) and all((n.ranks, n.nodes) == ((self.rank,), (self.node,)) for n in self.named)


def window(scene: Scene, times: float, chance: random.Random) -> Window:
    time.sleep(SETTLE_S)
    at_random(chance, 1.0)
    rank = chance.randrange(RANKS)
    node = scene.node_of()[rank]
    scene.alarms()
    with scene.order("slow" if times > 1.0 else "none", rank, times=times) as id:
        at = scene.began(id, rank) if times > 1.0 else time.time()
        named: list[Named] = []
        while time.time() < at + WINDOW_S and not (named and times > 1.0):
            time.sleep(0.2)
            named += [alarm for alarm in scene.alarms() if alarm.ranks]
    return Window(
        times=times,
        rank=rank,
        node=node,
        named=tuple(named),
        named_s=round(named[0].at - at, 2) if named else None,
        load=os.getloadavg()[0],
    )


def windows(
    times: list[float],
    seed: int,
    script: Path = SCRIPT,
    flags: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> list[Window]:
    """These in a random order, in one job."""
    chance = random.Random(seed)
    order = list(times)
    chance.shuffle(order)
    with Job(RANKS) as job:
        scene = Scene(job, script)
        scene.start(*FLAGS, *flags, env=env)
        found = []
        for one in order:
            found.append(window(scene, one, chance))
            said(found[-1])
    return found


def said(one: Window) -> None:
    named = ", ".join(f"{n.ranks} after {one.named_s} s ({n.kind}: {n.reason})" for n in one.named[:2]) or "nobody"
    print(f"  {one.times:g} times, rank {one.rank}: named {named}{'' if one.right else '  WRONG'}", flush=True)
