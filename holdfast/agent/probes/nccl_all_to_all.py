"""Probe of the path that training uses between the node's devices: all send to all by NCCL and check what arrives."""

import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_team import LIMIT_S, TeamError, TeamSeat, TeamTask, find_seats, run_team, team_refusal
from holdfast.agent.probes.probe_tools import integer_tensor, new_finding, sync_device
from holdfast.model.probe_findings import Finding

_PROBE, _MODULE = "group_all_to_all", "nccl_all_to_all"
_TIMES = 10
_LONGEST_S = 10.0  # after which no round is begun


class ExchangeRound(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's timing and result of one exchange round."""

    took_s: float
    sent_bytes: int  # to all others together
    wrong: tuple[int, ...] = ()  # ranks whose bytes arrived changed


def run(asked: ProbeRequest) -> Iterator[Finding]:
    seats = find_seats(cores=False)
    if why := team_refusal(seats, asked.left_s):
        yield Finding(probe=_PROBE, level=2, ok=None, detail=why)
        return
    yield probe_exchange(seats, small=asked.small, limit_s=min(LIMIT_S, asked.left_s))


def probe_exchange(seats: Sequence[TeamSeat], *, small: bool, limit_s: float) -> Finding:
    """Have all devices exchange bytes in rounds; report the rates, and each pair whose bytes changed on the way."""
    task = TeamTask(module=_MODULE, rank=0, world=0, port=0, device="", small=small, limit_s=limit_s)
    model = replace(new_finding(_PROBE, torch.device(seats[0].device), f"{len(seats)} devices"), place="", rough=small)
    try:
        told = run_team(seats, task, ExchangeRound)
    except TeamError as e:
        return e.to_finding(model)
    names = [seat.place for seat in seats]
    wrong = {(names[sender], names[rank]) for rank, rounds in enumerate(told) for one in rounds for sender in one.wrong}
    rates = tuple(
        round(min(one.sent_bytes / 1e9 / one.took_s for one in rounds), 4) for rounds in zip(*told, strict=True)
    )[1:]  # the first round also connects
    pairs = ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(wrong))
    return replace(
        model,
        ok=not wrong,
        place=_shared_device(wrong),
        detail=f"bytes changed on the way: {pairs}" if wrong else "",
        value=median(rates),
        unit="GB/s",
        samples=rates,
    )


def _shared_device(pairs: set[tuple[str, str]]) -> str:
    """Return the one device that is in all bad pairs; empty if there is no such device, or only one bad pair."""
    shared = set.intersection(*map(set, pairs)) if len(pairs) > 1 else set()
    return shared.pop() if len(shared) == 1 else ""


def run_rank(task: TeamTask, device: torch.device) -> Iterator[ExchangeRound]:
    words = (1 << 20 if task.small or device.type == "cpu" else 32 << 20) // 8
    mine = integer_tensor((task.world, words), device, 70 + task.rank)
    right = torch.stack([integer_tensor((task.world, words), device, 70 + s)[task.rank] for s in range(task.world)])
    got, spent = torch.empty_like(mine), torch.zeros(1, device=device)
    for number in range(_TIMES):
        sent = mine + number  # no round may take what an earlier one has left
        dist.barrier()
        sync_device(device)
        began = time.perf_counter()
        dist.all_to_all_single(got, sent)
        sync_device(device)
        took_s = time.perf_counter() - began
        same = (got == right + number).all(-1).tolist()
        wrong = tuple(sender for sender, holds in enumerate(same) if not holds)
        yield ExchangeRound(took_s=took_s, sent_bytes=(task.world - 1) * words * 8, wrong=wrong)
        spent += took_s
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if number and float(spent) > _LONGEST_S:
            break
