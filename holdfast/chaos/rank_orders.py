"""Orders to ranks: one file for each in the node's folder, and one reply file from each rank that has obeyed."""

import os
from pathlib import Path

import msgspec

from holdfast.decoding import from_json

FOLDER = "chaos"  # in the folder of a node
PRELOAD = "holdfast.chaos.inrank"
PLACES = ("weights", "optimizer", "gradients", "activations", "all_reduce")
BITS = ("sign", "exponent", "mantissa", "any", "nan")


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    ranks: tuple[int, ...]
    deed: str  # "raise", "exit", "hang", "bits"
    step: int = 0  # not before this one
    error: str = ""
    code: int = 1
    place: str = "weights"
    bits: str = "any"
    count: int = 1  # of bits
    chance: float = 0.0  # in every step; 0: once
    seed: int = 0


class RankDone(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to an order: what the rank did and at which step, or why it could not obey."""

    id: int
    rank: int
    pid: int
    step: int
    at: float
    what: str
    trouble: str = ""  # why it could not


def order_path(node_dir: Path, order: RankOrder) -> Path:
    return node_dir / FOLDER / f"order-{order.id}.json"


def done_path(node_dir: Path, id: int, rank: int) -> Path:
    return node_dir / FOLDER / f"done-{id}-{rank}.json"


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a struct as JSON, atomically."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(msgspec.json.encode(value))
    part.replace(path)


def read_orders(folder: Path) -> list[RankOrder]:
    found = []
    for path in sorted(folder.glob("order-*.json")):
        try:
            found.append(from_json(path.read_bytes(), RankOrder))
        except (OSError, msgspec.DecodeError):
            continue  # it is being taken back
    return found


def read_done(node_dir: Path, id: int, rank: int) -> RankDone | None:
    try:
        return from_json(done_path(node_dir, id, rank).read_bytes(), RankDone)
    except (OSError, msgspec.DecodeError):
        return None
