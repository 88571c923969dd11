"""One end of a pair test over the job's own backend, which tests joining, latency, bandwidth, content and lost
segments. Both ends know the bytes that are sent. The sender also puts a checksum of its buffer into the store, so that
an error in the sender's memory can be told from an error on the way. The kernel counts lost segments for each
connection."""

import argparse
import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.agent.probes import ProbeLine
from holdfast.agent.probes.probe_tools import integer_tensor, sync_device, tensor_digest
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.decoding import from_json
from holdfast.linux import own_process_settings
from holdfast.logs.secret_masking import make_secret_masker, trim_line
from holdfast.model.probe_findings import Finding, PairMeeting

_FIRST_BYTES, _MOST_BYTES = 16 << 10, 16 << 20
_ROUND_S = 0.1  # what one round is to take
_PINGS = 30
_ROUNDS = 200
_TCP_INFO_BYTES = 144
_TOTAL_RETRANS, _SEGS_OUT = 100, 136  # where struct tcp_info has them
_LISTENS = 10  # TCP_LISTEN
_REASON_CHARS = 200


def main() -> None:
    args = _make_parser().parse_args()
    if args.parent:
        own_process_settings.die_with_parent(args.parent)
    os.nice(args.nice)
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def tell(told: ProbeLine) -> None:
        print(msgspec.json.encode(told).decode(), file=out)

    meeting = from_json(args.meeting, PairMeeting)
    tell(ProbeLine(began="link"))
    PairTestEnd(meeting, lambda finding: tell(ProbeLine(finding=finding))).run()
    os._exit(0)  # groups and stores may wait for one another when they are taken down


class PairTestEnd:
    def __init__(self, meeting: PairMeeting, tell: Callable[[Finding], None]) -> None:
        self._m = meeting
        self._tell = tell
        self._device = torch.device("cuda", 0) if meeting.backend == "nccl" else torch.device("cpu")
        self._until = time.monotonic() + meeting.deadline_s
        self._began = time.monotonic()
        self._wrong: list[str] = []

    def run(self) -> None:
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # NCCL takes the current one where it is not told
        doing = "the other nodes did not join"
        try:
            store = self._join_group()
            doing = "the other nodes stopped answering"
            before = _count_segments()
            self._measure_latency()
            self._measure_bandwidth(store)
            self._measure_loss(before)
            store.set(f"done/{self._m.rank}", "1")
            if self._m.serve and self._m.rank == 0:  # who serves the store leaves last
                store.wait([f"done/{rank}" for rank in range(self._m.world)])
        except RuntimeError as e:  # what torch.distributed raises is of this kind, DistError included
            self._report_finding("link", ok=False, detail=f"{doing}: {_first_line(e)}")

    def _join_group(self) -> dist.Store:
        m = self._m
        limit = timedelta(seconds=m.deadline_s)
        serves = m.serve and m.rank == 0
        server = dist.TCPStore(m.host, m.port, is_master=serves, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(m.name, server)
        backend = _gloo_over(m.rail) if m.rail and m.backend == "gloo" else m.backend
        dist.init_process_group(backend, store=store, rank=m.rank, world_size=m.world, timeout=limit)
        dist.all_reduce(torch.zeros(1, device=self._device))
        self._report_finding("link", detail=f"all joined after {time.monotonic() - self._began:.2f} s")
        return store

    def _measure_latency(self) -> None:
        took = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            dist.all_reduce(torch.zeros(1, device=self._device))
            sync_device(self._device)
            took.append(round(1e3 * (time.perf_counter() - began), 4))
        self._report_finding("link_latency", value=median(took), unit="ms", lower=True, samples=tuple(took))

    def _measure_bandwidth(self, store: dist.Store) -> None:
        """Measure bandwidth and check content in rounds. The slowest end's time decides the size of the next round."""
        m = self._m
        sent = [integer_tensor((_MOST_BYTES // 8,), self._device, 60 + rank) for rank in range(m.world)]
        got = [torch.empty_like(one) for one in sent]
        size, spent_s, rates = _FIRST_BYTES, 0.0, []
        for number in range(_ROUNDS):
            words = size // 8
            mine = sent[m.rank][:words] + number  # no round may take what an earlier one has left
            store.set(f"sum/{number}/{m.rank}", tensor_digest(mine))
            dist.barrier()
            began = time.perf_counter()
            dist.all_gather([one[:words] for one in got], mine)
            sync_device(self._device)
            took_s = time.perf_counter() - began
            self._compare_content(
                store, number, [(one[:words], of[:words] + number) for one, of in zip(got, sent, strict=True)]
            )
            slowest = torch.tensor([took_s], dtype=torch.float64, device=self._device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            spent_s += float(slowest)
            rates.append((size, round(size * (m.world - 1) / 1e6 / took_s, 4)))
            if spent_s > m.seconds:
                break
            size = max(size, min(_MOST_BYTES, 4 * size, int(size * _ROUND_S / float(slowest)) & ~7))
        full = tuple(rate for of, rate in rates if 2 * of >= size)
        self._report_finding("link_bandwidth", value=median(full), unit="MB/s", samples=full)
        detail = "; ".join(list(dict.fromkeys(self._wrong))[:3])
        self._report_finding("link_integrity", ok=not self._wrong, detail=detail or f"{len(rates)} rounds")

    def _compare_content(self, store: dist.Store, number: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for rank, (got, expected) in enumerate(pairs):
            if torch.equal(got, expected):
                continue
            told = store.get(f"sum/{number}/{rank}").decode()
            if told != tensor_digest(expected):
                self._wrong.append(f"rank {rank} sent wrong content")
            else:
                self._wrong.append(f"the content of rank {rank} changed on the way")

    def _measure_loss(self, before: tuple[int, int] | None) -> None:
        after = _count_segments()
        if before is None or after is None or after[1] <= before[1]:
            self._report_finding("link_loss", ok=None, detail="no TCP connection to measure")
            return
        lost, sent = after[0] - before[0], after[1] - before[1]
        detail = f"{lost} of {sent} segments were retransmitted"
        self._report_finding(
            "link_loss", value=lost / sent, unit="of segments", lower=True, samples=(lost, sent), detail=detail
        )

    def _report_finding(self, probe: str, **rest: object) -> None:
        form = f"{self._m.backend}, world of {self._m.world}"
        took_s = round(time.monotonic() - self._began, 4)
        self._tell(msgspec.structs.replace(Finding(probe=probe, level=2, ok=True, form=form, took_s=took_s), **rest))


def _first_line(error: Exception) -> str:
    """Return the first line of what torch says, masked, then cut: it may quote an environment."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return cut_words(make_secret_masker()(trim_line(first)), _REASON_CHARS)


def _gloo_over(rail: str) -> str:
    """Register a gloo backend that uses only this interface or address; return the backend's name."""

    gloo: Any = dist.ProcessGroupGloo  # its options are known to torch, but not to its types

    def make_group(store: dist.Store, rank: int, world: int, limit: timedelta) -> Any:
        try:
            where = {"hostname": str(ipaddress.ip_address(rail))}
        except ValueError:
            where = {"interface": rail}
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(**where)], limit
        return gloo(store, rank, world, options)

    dist.Backend.register_backend("holdfast_rail", make_group, devices=["cpu"])
    return "holdfast_rail"


def _count_segments() -> tuple[int, int] | None:
    """Return the TCP segments that this process has retransmitted and sent; None if it has no TCP connection."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(_socket_segments(int(name)))
        except OSError:
            continue  # closed meanwhile, or no socket of TCP
    known = [one for one in found if one]
    return (sum(lost for lost, _ in known), sum(sent for _, sent in known)) if known else None


def _socket_segments(fd: int) -> tuple[int, int] | None:
    with socket.socket(fileno=os.dup(fd)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return None
        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(told) < _TCP_INFO_BYTES or told[0] == _LISTENS:
        return None
    return struct.unpack_from("I", told, _TOTAL_RETRANS)[0], struct.unpack_from("I", told, _SEGS_OUT)[0]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.agent.probes.link", description=__doc__)
    parser.add_argument("--meeting", required=True, help="as JSON")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the only output format")
    return parser


if __name__ == "__main__":
    main()
