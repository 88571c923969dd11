"""A mutant: a bug to plant into the real code, and a seed that finds it."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from holdfast.core.snapshots import lineage
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.sim.dst.seed_parameters import SeedSetup, draw_setup

Patch = pytest.MonkeyPatch


def draw_rough(seed: int) -> SeedSetup:
    """More faults, closer together, and nobody ends the job before they are over."""
    return msgspec.structs.replace(draw_setup(seed), pause_s=1.5, faults_s=120.0, stop_s=0.0, last_step=0)


def draw_stalled(seed: int) -> SeedSetup:
    """The same as `draw_setup`, with hellos that come late by links that their agents have left."""
    return msgspec.structs.replace(draw_setup(seed), stalls_hellos=True, stop_s=0.0, last_step=0)


def draw_forgetful(seed: int) -> SeedSetup:
    """The same, with a journal that loses its end."""
    return msgspec.structs.replace(draw_rough(seed), forgets=True)


def draw_with_disks(seed: int) -> SeedSetup:
    """Machines keep states on their disks, and often lose all their memory."""
    setup = draw_setup(seed)
    settings = msgspec.structs.replace(setup.settings, disk=DiskLimits(path="/disk", every_s=2.0 + seed % 5))
    job = msgspec.structs.replace(setup.job, can_acquire=False)  # the machine that was lost comes back with its disk
    return msgspec.structs.replace(setup, settings=settings, job=job)


def draw_grouped(seed: int) -> SeedSetup:
    """The script reports pipelines of two ranks, and the job may go on with fewer of its four nodes of one rank."""
    setup = draw_rough(seed)
    job = msgspec.structs.replace(setup.job, min_nodes=2 + seed % 2, max_nodes=4, standbys=seed % 3 // 2)
    return msgspec.structs.replace(setup, job=job, nproc=1, reports_mesh=True)


def lines_are_unknown(patch: Patch) -> None:
    """Nobody knows of which line a state is, as if every plan were lost: what else keeps lines apart must do so."""
    patch.setattr(lineage, "find_maker", lambda line, generation, step: 0)


def draw_surviving(seed: int) -> SeedSetup:
    """The same as `draw_rough`, with ranks that survive; every third with a journal that loses its end."""
    return msgspec.structs.replace(draw_rough(seed), survives=True, forgets=seed % 3 == 0)


class Mutant(NamedTuple):
    plant: Callable[[Patch], None]
    seed: int | None  # one that finds it; None: only the search looks for it, and nobody has noted a seed yet
    draw: Callable[[int], SeedSetup] = draw_rough
