"""The cells: which faults, in which ways of training, at which moments; and which of them to run."""

import itertools
from collections.abc import Iterable

import msgspec

from holdfast.chaos.fault import Fault

HOWS = ("ddp", "fsdp", "pp")
STAGES = ("local", "wide", "storage", "disk", "hosts")  # kinds of jobs
WHENS = ("idle", "saving", "restoring", "updating")
RANK, OTHER = 3, 0  # who is struck, and who is killed first so that there is a restore to strike


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the matrix."""

    name: str
    fault: Fault
    stage: str = "local"  # the job that it needs
    whens: tuple[str, ...] = WHENS
    kept: str = ""  # why it is kept out of the moments that are missing in whens


_IN_STEP = "it happens inside a step, so it can be in no other moment"
_UPDATE = "a bad release is an update itself, so it makes its moment"
_NEVER = "it is never injected"
_RANK = {"rank": RANK}


def _rank(name: str, **more: object) -> Strike:
    return Strike(name=name, fault=msgspec.convert({"kind": name, **_RANK, **more}, Fault))


def _ordered(name: str, kind: str, **more: object) -> Strike:
    return _idle(name, kind, _IN_STEP, **_RANK, **more)


def _bits(place: str, bits: str, *, count: int = 1) -> Strike:
    name = f"bits.{place}.{bits}" + (f"x{count}" if count > 1 else "")
    return _ordered(name, "bits", place=place, bits=bits, count=count)


def _at(stage: str, name: str, kind: str, **more: object) -> Strike:
    return Strike(name=name, fault=msgspec.convert({"kind": kind, **more}, Fault), stage=stage)


def _idle(name: str, kind: str, kept: str, **more: object) -> Strike:
    return Strike(name=name, fault=msgspec.convert({"kind": kind, **more}, Fault), whens=("idle",), kept=kept)


STRIKES = (
    _rank("rank.kill"),
    _rank("rank.segv"),
    _rank("rank.stop"),
    _rank("rank.slow", for_s=20.0),
    _rank("rank.oom"),
    _ordered("rank.raise", "rank.raise"),
    _ordered("rank.exit", "rank.exit", code=7),
    _ordered("rank.hang", "rank.hang"),
    _ordered("loss.nan", "loss.nan"),
    _bits("weights", "mantissa"),
    _bits("weights", "sign", count=4),
    _bits("optimizer", "exponent"),
    _bits("gradients", "mantissa"),
    _bits("activations", "mantissa"),
    _bits("all_reduce", "mantissa"),
    _rank("agent.kill"),
    _rank("agent.stop", for_s=25.0),
    Strike(name="controller.kill", fault=Fault(kind="controller.kill")),
    Strike(name="store.kill", fault=Fault(kind="store.kill")),
    _rank("node.kill"),
    Strike(name="standby.kill", fault=Fault(kind="standby.kill")),
    _at("wide", "blast", "blast", count=2),
    _at("local", "kernel.xid", "kernel.xid", rank=RANK),
    _at("local", "kernel.aer", "kernel.aer", rank=RANK),
    _at("local", "kernel.mce", "kernel.mce", rank=RANK),
    _at("local", "gpu.lost", "gpu", rank=RANK, reading="lost"),
    _at("local", "gpu.ecc", "gpu", rank=RANK, reading="ecc"),
    _at("local", "gpu.hot", "gpu", rank=RANK, reading="hot", for_s=10.0),
    _at("disk", "disk.full", "disk.full", for_s=10.0),
    _at("disk", "disk.readonly", "disk.readonly", for_s=10.0),
    _at("disk", "shm.full", "shm.full", for_s=10.0),
    _at("local", "disk.slow", "disk.slow", rank=RANK, for_s=10.0),
    _at("local", "checkpoint.flip", "checkpoint.flip"),
    _at("local", "snapshot.flip", "snapshot.flip", rank=RANK),
    _at("storage", "storage.eio", "storage", text="eio", for_s=10.0),
    _at("storage", "storage.hang", "storage", text="hang", for_s=10.0),
    _at("hosts", "link.slow", "link.slow", delay_s=0.02, for_s=10.0),
    _at("hosts", "link.lossy", "link.lossy", share=0.05, for_s=10.0),
    _at("hosts", "link.cut", "link.cut"),
    _at("hosts", "partition", "partition"),
    _idle("release.syntax", "release.bad", _UPDATE, text="syntax"),
    _idle("release.raise", "release.bad", _UPDATE, text="raise"),
    _idle("release.late", "release.bad", _UPDATE, text="late"),
    _idle("clock.jump", "clock.jump", _NEVER),
)
NAMED = {strike.name: strike for strike in STRIKES}


class Cell(msgspec.Struct, frozen=True, order=True):
    strike: str
    how: str
    when: str

    @property
    def name(self) -> str:
        return f"{self.strike}/{self.how}/{self.when}"


def product() -> list[Cell]:
    return [Cell(s.name, how, when) for s in STRIKES for how, when in itertools.product(HOWS, WHENS) if when in s.whens]


def covering() -> list[Cell]:
    """Every pair of fault and way, of fault and moment, and of way and moment, in as few cells as that takes."""
    found = []
    for turn, strike in enumerate(STRIKES):
        for number in range(max(len(strike.whens), len(HOWS))):
            when = strike.whens[number % len(strike.whens)]
            found.append(Cell(strike.name, HOWS[(turn + number) % len(HOWS)], when))
    return found


def uncovered(cells: Iterable[Cell]) -> set[tuple[str, str]]:
    """Pairs that some cell of the product has, and none of these."""

    def pairs(cells: Iterable[Cell]) -> set[tuple[str, str]]:
        return {pair for c in cells for pair in ((c.strike, c.how), (c.strike, c.when), (c.how, c.when))}

    return pairs(product()) - pairs(cells)


# Together they take a minute: one job of DDP, with the faults that happen most.
FAST = (
    Cell("rank.kill", "ddp", "idle"),
    Cell("rank.segv", "ddp", "saving"),
    Cell("rank.kill", "ddp", "restoring"),
    Cell("rank.raise", "ddp", "idle"),
    Cell("agent.kill", "ddp", "idle"),
    Cell("controller.kill", "ddp", "saving"),
    Cell("bits.weights.mantissa", "ddp", "idle"),
)


# Together they take half a minute: two restarts in a row with state from memory, and nobody who has to notice.
QUICK = (
    Cell("rank.kill", "ddp", "restoring"),
    Cell("controller.kill", "ddp", "saving"),
)


def chosen(words: list[str]) -> list[Cell]:
    """Cells by name, or by a part of it: "rank.kill", "/ddp/", "rank.kill/ddp/idle"; or all of a set."""
    sets = {"quick": list(QUICK), "fast": list(FAST), "covering": covering(), "all": product()}
    found: list[Cell] = []
    for word in words:
        these = sets.get(word) or [cell for cell in product() if word in (cell.strike, cell.name) or word in cell.name]
        if not these:
            raise ValueError(f"no cell has '{word}' in its name; a name is like rank.kill/ddp/idle")
        found += these
    return list(dict.fromkeys(found))
