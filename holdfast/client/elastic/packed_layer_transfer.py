"""Sends packed layers from one worker's host memory to another's, with a sum over each by which it is checked.

An abort ends a message early, and no error says so. A layer that comes without its whole content is refused."""

from collections.abc import Sequence

import torch

from holdfast.client.elastic.rank_traffic import MARK, GroupsBrokenError, RankTraffic


def send_packed(packed: torch.Tensor, to: int, traffic: RankTraffic) -> None:
    """Send one packed layer without waiting for its receiver."""
    traffic.post([(_describe([packed], 1).to(traffic.device), to)], [])
    traffic.post([(packed.to(traffic.device), to)], [])


def receive_packed(source: int, traffic: RankTraffic) -> torch.Tensor:
    told = traffic.receive(torch.zeros(2, 2, dtype=torch.int64, device=traffic.device), source)
    [(size, total)] = _read_sizes(told, source)
    into = torch.empty(size, dtype=torch.uint8, device=traffic.device)
    return _check_sum(traffic.receive(into, source), total, source)


def swap_packed(
    mine: Sequence[torch.Tensor], to: int, source: int, most: int, traffic: RankTraffic
) -> list[torch.Tensor]:
    """Send these packed layers to one worker, and return those that another one sends to this one. All workers call
    this; none of them sends more than `most`."""
    told = torch.zeros(most + 1, 2, dtype=torch.int64, device=traffic.device)
    sizes = _read_sizes(traffic.receive(told, source, [(_describe(mine, most).to(traffic.device), to)]), source)
    came: list[torch.Tensor] = []
    for place in range(max(len(mine), len(sizes))):
        sends = [(packed.to(traffic.device), to) for packed in mine[place : place + 1]]
        if place < len(sizes):
            size, total = sizes[place]
            into = torch.empty(size, dtype=torch.uint8, device=traffic.device)
            came.append(_check_sum(traffic.receive(into, source, sends), total, source))
        else:
            traffic.post(sends, [])
    traffic.settle()
    return came


def _describe(packed: Sequence[torch.Tensor], most: int) -> torch.Tensor:
    """Return the table that is sent before packed layers: the mark and their number, then size and sum of each."""
    rows = [(MARK, len(packed)), *((one.numel(), _sum_up(one)) for one in packed)]
    return torch.tensor(rows + [(0, 0)] * (most + 1 - len(rows)), dtype=torch.int64)


def _read_sizes(told: torch.Tensor, source: int) -> list[tuple[int, int]]:
    (mark, count), *sizes = told.tolist()
    if mark != MARK:
        raise GroupsBrokenError(f"a message of rank {source} ended without its content")
    return [(size, total) for size, total in sizes[:count]]


def _check_sum(came: torch.Tensor, total: int, source: int) -> torch.Tensor:
    packed = came.cpu()
    if _sum_up(packed) != total:
        raise GroupsBrokenError(f"a layer of rank {source} came without its whole content")
    return packed


def _sum_up(packed: torch.Tensor) -> int:
    """Return a sum over a packed layer, whose length is a multiple of eight bytes."""
    return int(packed.view(torch.int64).sum())
