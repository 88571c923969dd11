"""The values of parameters as flat pieces, in order: cut from what data parallel ranks held, and cut anew for others.

DeepSpeed lays the parameters of a group one after the other and gives each rank an equal share of all (ZeRO 1 and 2),
or gives each rank an equal share of every parameter (ZeRO 3). What is left over at the end is filled with zeros.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from holdfast.checkpoint.trainer_checkpoint_export.kept_pickle import NotUnderstoodError

Shapes = Mapping[str, tuple[int, ...]]  # of parameters, in the order that a group has them in
Gaps = Mapping[str, int]  # how many zeros follow a parameter, so that the next one is aligned
Pieces = dict[str, list[torch.Tensor]]  # by parameter: flat, in order, without what fills up
_NCCL_ALIGNMENT = 2  # values; DeepSpeed fills up a group to a multiple of it for each rank


def place_parameters(shapes: Shapes, gaps: Gaps) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where each parameter of a group begins and ends among the values of all, and how many these are."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for name, shape in shapes.items():
        found[name] = at, at + math.prod(shape)
        at += math.prod(shape) + gaps.get(name, 0)
    return found, at


def group_share(values: int, ranks: int) -> int:
    """Return how many values of a group each rank holds under ZeRO 1 and 2, with those that fill up."""
    return -(-values // (_NCCL_ALIGNMENT * ranks)) * _NCCL_ALIGNMENT


def parameter_share(shape: Iterable[int], ranks: int) -> int:
    """Return how many values of a parameter each rank holds under ZeRO 3, with those that fill up."""
    return -(-math.prod(shape) // ranks)


def owned_values(values: int, share: int, rank: int) -> int:
    """Return how many values of a rank's share do not fill up."""
    return max(0, min(share, values - rank * share))


def cut_group(parts: Sequence[torch.Tensor], shapes: Shapes, gaps: Gaps, where: str) -> Pieces:
    """Cut a group, of which each rank has one part, into its parameters; parts may have been saved without filling."""
    places, total = place_parameters(shapes, gaps)
    share = group_share(total, len(parts))
    left: list[torch.Tensor] = []
    for rank, part in enumerate(parts):
        owned = owned_values(total, share, rank)
        if part.dim() != 1 or len(part) not in (owned, share):
            counts = " or ".join(map(str, sorted({owned, share})))
            raise NotUnderstoodError(
                f"{where} of rank {rank} has the shape {tuple(part.shape)}, and should have {counts} values"
            )
        left.append(part[:owned])
    return {name: slice_pieces(left, start, end) for name, (start, end) in places.items()}


def cut_shares(parts: Sequence[torch.Tensor], shapes: Shapes, where: str) -> Pieces:
    """Cut what each rank has of every parameter, under ZeRO 3, into the parameters."""
    ranks = len(parts)
    shares = {name: parameter_share(shape, ranks) for name, shape in shapes.items()}
    for rank, part in enumerate(parts):
        if part.dim() != 1 or len(part) != (values := sum(shares.values())):
            raise NotUnderstoodError(
                f"{where} of rank {rank} has the shape {tuple(part.shape)}, and should have {values} values"
            )
    pieces: Pieces = {}
    at = 0
    for name, shape in shapes.items():
        owned = [owned_values(math.prod(shape), shares[name], rank) for rank in range(ranks)]
        pieces[name] = [part[at : at + n] for part, n in zip(parts, owned, strict=True)]
        at += shares[name]
    return pieces


def slice_pieces(pieces: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """Return the values from `start` to `stop` of flat pieces that follow one another, without a copy."""
    found: list[torch.Tensor] = []
    at = 0
    for piece in pieces:
        end = at + len(piece)
        if max(at, start) < min(end, stop):
            found.append(piece[max(0, start - at) : stop - at])
        at = end
    return found


def join_share(pieces: Sequence[torch.Tensor], start: int, share: int) -> torch.Tensor:
    """Return `share` values from `start` on as one tensor, filled up with zeros."""
    found = slice_pieces(pieces, start, start + share)
    kind = pieces[0].dtype if pieces else torch.float32
    return torch.cat([*found, torch.zeros(share - sum(map(len, found)), dtype=kind)])


def join_whole(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Return a whole parameter."""
    return join_share(pieces, 0, math.prod(shape)).reshape(shape)


def in_turns(names: Sequence[str], ranks: int) -> list[str]:
    """Return parameters in the order that `round_robin_gradients` gives them: every n-th one, rank by rank."""
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def undo_turns(names: Sequence[str], ranks: int) -> list[str]:
    """Return parameters that are in such an order as the optimizer had them."""
    places = [place for rank in range(ranks) for place in range(len(names))[rank::ranks]]
    return [name for _, name in sorted(zip(places, names, strict=True))]
