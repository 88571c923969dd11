"""The cells of the matrix: which faults, in which ways of training, at which moments; and how to choose some."""

import itertools
from collections.abc import Iterable

import msgspec

from holdfast.chaos.injection_records import InjectedFault

HOWS = ("ddp", "fsdp", "pp")
STAGES = ("local", "wide", "storage", "disk", "hosts")  # kinds of jobs
WHENS = ("idle", "saving", "restoring", "updating")
RANK, OTHER = 3, 0  # who is struck, and who is killed first so that there is a restore to strike


class MatrixFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of the matrix, which has one row in the matrix's table."""

    name: str
    fault: InjectedFault
    stage: str = "local"  # the job that it needs
    whens: tuple[str, ...] = WHENS
    kept: str = ""  # why it is kept out of the moments that are missing in whens


_IN_STEP = "it happens inside a step, so it can be in no other moment"
_UPDATE = "a bad release is an update itself, so it makes its moment"
_NEVER = "it is never injected"
_RANK = {"rank": RANK}


def _rank_fault(name: str, **more: object) -> MatrixFault:
    return MatrixFault(name=name, fault=msgspec.convert({"kind": name, **_RANK, **more}, InjectedFault))


def _ordered_fault(name: str, kind: str, **more: object) -> MatrixFault:
    return _idle_fault(name, kind, _IN_STEP, **_RANK, **more)


def _bits_fault(place: str, bits: str, *, count: int = 1) -> MatrixFault:
    name = f"bits.{place}.{bits}" + (f"x{count}" if count > 1 else "")
    return _ordered_fault(name, "bits", place=place, bits=bits, count=count)


def _stage_fault(stage: str, name: str, kind: str, **more: object) -> MatrixFault:
    return MatrixFault(name=name, fault=msgspec.convert({"kind": kind, **more}, InjectedFault), stage=stage)


def _idle_fault(name: str, kind: str, kept: str, **more: object) -> MatrixFault:
    return MatrixFault(
        name=name, fault=msgspec.convert({"kind": kind, **more}, InjectedFault), whens=("idle",), kept=kept
    )


STRIKES = (
    _rank_fault("rank.kill"),
    _rank_fault("rank.segv"),
    _rank_fault("rank.stop"),
    _rank_fault("rank.slow", share=0.02, for_s=40.0),
    _rank_fault("rank.oom"),
    _ordered_fault("rank.raise", "rank.raise"),
    _ordered_fault("rank.exit", "rank.exit", code=7),
    _ordered_fault("rank.hang", "rank.hang"),
    _ordered_fault("loss.nan", "loss.nan"),
    _bits_fault("weights", "mantissa"),
    _bits_fault("weights", "sign", count=4),
    _bits_fault("optimizer", "exponent"),
    _bits_fault("gradients", "mantissa"),
    _bits_fault("activations", "mantissa"),
    _bits_fault("all_reduce", "mantissa"),
    _rank_fault("agent.kill"),
    _rank_fault("agent.stop", for_s=25.0),
    MatrixFault(name="controller.kill", fault=InjectedFault(kind="controller.kill")),
    MatrixFault(name="store.kill", fault=InjectedFault(kind="store.kill")),
    _rank_fault("node.kill"),
    MatrixFault(name="standby.kill", fault=InjectedFault(kind="standby.kill")),
    _stage_fault("wide", "blast", "blast", count=2),
    _stage_fault("local", "kernel.xid", "kernel.xid", rank=RANK),
    _stage_fault("local", "kernel.aer", "kernel.aer", rank=RANK),
    _stage_fault("local", "kernel.mce", "kernel.mce", rank=RANK),
    _stage_fault("local", "gpu.lost", "gpu", rank=RANK, reading="lost"),
    _stage_fault("local", "gpu.ecc", "gpu", rank=RANK, reading="ecc"),
    _stage_fault("local", "gpu.hot", "gpu", rank=RANK, reading="hot", for_s=10.0),
    _stage_fault("disk", "disk.full", "disk.full", for_s=10.0),
    _stage_fault("disk", "disk.readonly", "disk.readonly", for_s=10.0),
    _stage_fault("disk", "shm.full", "shm.full", for_s=10.0),
    _stage_fault("local", "disk.slow", "disk.slow", rank=RANK, for_s=10.0),
    _stage_fault("local", "checkpoint.flip", "checkpoint.flip"),
    _stage_fault("local", "snapshot.flip", "snapshot.flip", rank=RANK),
    _stage_fault("storage", "storage.eio", "storage", text="eio", for_s=10.0),
    _stage_fault("storage", "storage.hang", "storage", text="hang", for_s=10.0),
    _stage_fault("hosts", "link.slow", "link.slow", delay_s=0.02, for_s=10.0),
    _stage_fault("hosts", "link.lossy", "link.lossy", share=0.05, for_s=10.0),
    _stage_fault("hosts", "link.cut", "link.cut"),
    _stage_fault("hosts", "partition", "partition"),
    _idle_fault("release.syntax", "release.bad", _UPDATE, text="syntax"),
    _idle_fault("release.raise", "release.bad", _UPDATE, text="raise"),
    _idle_fault("release.late", "release.bad", _UPDATE, text="late"),
    _idle_fault("clock.jump", "clock.jump", _NEVER),
)
NAMED = {strike.name: strike for strike in STRIKES}


class MatrixCell(msgspec.Struct, frozen=True, order=True):
    strike: str
    how: str
    when: str

    @property
    def name(self) -> str:
        return f"{self.strike}/{self.how}/{self.when}"


def all_cells() -> list[MatrixCell]:
    return [
        MatrixCell(s.name, how, when)
        for s in STRIKES
        for how, when in itertools.product(HOWS, WHENS)
        if when in s.whens
    ]


def covering_cells() -> list[MatrixCell]:
    """Return a few cells that cover each pair of a fault and a way, a fault and a moment, or a way and a moment."""
    found = []
    for turn, strike in enumerate(STRIKES):
        for number in range(max(len(strike.whens), len(HOWS))):
            when = strike.whens[number % len(strike.whens)]
            found.append(MatrixCell(strike.name, HOWS[(turn + number) % len(HOWS)], when))
    return found


def uncovered_pairs(cells: Iterable[MatrixCell]) -> set[tuple[str, str]]:
    """Return the pairs (of fault, way and moment) that cells of the full matrix cover, but these cells do not."""

    def pairs(cells: Iterable[MatrixCell]) -> set[tuple[str, str]]:
        return {pair for c in cells for pair in ((c.strike, c.how), (c.strike, c.when), (c.how, c.when))}

    return pairs(all_cells()) - pairs(cells)


# Together they take a minute: one job of DDP, with the faults that happen most.
FAST = (
    MatrixCell("rank.kill", "ddp", "idle"),
    MatrixCell("rank.segv", "ddp", "saving"),
    MatrixCell("rank.kill", "ddp", "restoring"),
    MatrixCell("rank.raise", "ddp", "idle"),
    MatrixCell("agent.kill", "ddp", "idle"),
    MatrixCell("controller.kill", "ddp", "saving"),
    MatrixCell("bits.weights.mantissa", "ddp", "idle"),
)


# Together they take half a minute: two restarts in a row with state from memory, and nobody who has to notice.
QUICK = (
    MatrixCell("rank.kill", "ddp", "restoring"),
    MatrixCell("controller.kill", "ddp", "saving"),
)


def choose_cells(words: list[str]) -> list[MatrixCell]:
    """Return cells by set name, or by a part of their names: "rank.kill", "/ddp/", "rank.kill/ddp/idle"."""
    sets = {"quick": list(QUICK), "fast": list(FAST), "covering": covering_cells(), "all": all_cells()}
    found: list[MatrixCell] = []
    for word in words:
        these = sets.get(word) or [
            cell for cell in all_cells() if word in (cell.strike, cell.name) or word in cell.name
        ]
        if not these:
            raise ValueError(f"no cell has '{word}' in its name; names are like rank.kill/ddp/idle")
        found += these
    return list(dict.fromkeys(found))
