"""Trains on a few gloo ranks in steps of a fifth of a second, and goes wrong as it is told to.

Orders come in one file, read by every rank and its data loader at every step; what they began, and when, ranks leave
beside it. So whoever gave an order knows who is at fault and since when, without trusting what is said about it.
"""

import ctypes
import itertools
import json
import math
import mmap
import multiprocessing
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import holdfast

STEP_S = 0.2
FOR_EVER_S = 3600.0
KEEPS = "BENCH_KEEPS"  # set: the script keeps its states in memory
SHORT_S = 8.0  # a sleep that is no hang: nobody can tell a longer one from a hang
WIDTH = 64
PAGE = struct.Struct("<qqqdd")  # generation, pid, steps in it, when the first and the newest were made
PAGE_BYTES = 4096
FAILURES: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}
Order = dict[str, Any]  # id, kind, ranks, at (a step), seconds, times


class Orders:
    """What this rank is to do wrong."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._changed = 0
        self._order: Order = {}
        self._begun = 0

    def read(self, step: int = 0) -> Order:
        """The order of this step, if it is this rank's too."""
        try:
            changed = os.stat(self._folder / "order").st_mtime_ns
            if changed != self._changed:
                self._order, self._changed = json.loads((self._folder / "order").read_text()), changed
        except (FileNotFoundError, ValueError):
            return {}
        order = self._order
        mine = self._rank in order["ranks"] or not order["ranks"]
        return order if mine and (not order["at"] or step == order["at"]) else {}

    def begin(self, order: Order) -> bool:
        """Note when it began; False: it was carried out before."""
        if order["id"] == self._begun or (self._folder / f"began-{order['id']}-{self._rank}").exists():
            return False
        self._begun = order["id"]
        self._note(order, "began")
        return True

    def end(self, order: Order) -> None:
        self._note(order, "ended")

    def _note(self, order: Order, what: str) -> None:
        path = self._folder / f"{what}-{order['id']}-{self._rank}"
        path.with_suffix(".part").write_text(str(time.time()))
        path.with_suffix(".part").replace(path)


class Batches(IterableDataset[torch.Tensor]):
    def __init__(self, folder: Path, rank: int) -> None:
        self._orders = Orders(folder, rank)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            order = self._orders.read()
            if order.get("kind") == "loader" and self._orders.begin(order):
                self._fetch_shard(order["seconds"])
                self._orders.end(order)
            yield torch.randn(8, WIDTH)

    def _fetch_shard(self, seconds: float) -> None:
        time.sleep(seconds)


class SlowFile:
    """Storage of so many bytes a second."""

    def __init__(self, path: Path, rate: float) -> None:
        self._file = path.open("wb")
        self._rate = rate

    def write(self, chunk: Any) -> int:
        piece = memoryview(chunk).cast("B")
        for at in range(0, len(piece), 1 << 18):
            part = piece[at : at + (1 << 18)]
            self._file.write(part)
            time.sleep(len(part) / self._rate)
        return len(piece)

    def flush(self) -> None:
        self._file.flush()


class Trainer:
    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.orders = Orders(folder, self.rank)
        pairs = list(itertools.combinations(range(dist.get_world_size()), 2))
        self.pairs = {pair: (dist.new_group(list(pair)), dist.new_group(list(pair))) for pair in pairs}
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batches = iter(DataLoader(Batches(folder, self.rank), batch_size=None, num_workers=1))
        self.kept = self._keep_states() if os.environ.get(KEEPS) else None
        self.step = self.kept.restore() if self.kept else 0
        self._spoilt = 0.0
        path = folder / f"page-{self.rank}"
        path.touch()
        os.truncate(path, PAGE_BYTES)
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._first_at = 0.0

    def train(self) -> None:
        over = torch.zeros(2, device=self.device)
        while not over[1]:
            batch = next(self.batches).to(self.device)
            self.compute(STEP_S)
            self._obey(self.orders.read(self.step))
            loss = self.loss_of(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            over[0], over[1] = loss.detach() + self._spoilt, float((self.folder / "finish").exists())
            dist.all_reduce(over)
            self.step += 1
            if self.kept:
                self.kept.save(self.step)
            holdfast.step(self.step, over[0].item())
            self._note()

    def _keep_states(self) -> holdfast.Checkpointer:
        """A copy in memory of every step, so that a restart costs little."""
        path = str(self.folder / "states")
        return holdfast.Checkpointer(model=self.model, optimizer=self.optimizer, path=path, every=1_000_000)

    def compute(self, seconds: float) -> None:
        """A stand-in, as there are more ranks than cores."""
        time.sleep(seconds)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).square().mean()
        return loss

    def _note(self) -> None:
        now = time.time()
        self._first_at = self._first_at or now
        generation = int(os.environ["HOLDFAST_GENERATION"])
        self._page[: PAGE.size] = PAGE.pack(generation, os.getpid(), self.step, self._first_at, now)

    def _obey(self, order: Order) -> None:
        kind = order.get("kind")
        if kind in (None, "loader", "none"):
            return
        fresh = self.orders.begin(order)
        if kind == "slow":
            self.compute(STEP_S * (order["times"] - 1))
        elif fresh:
            work = getattr(self, f"_{kind}")
            if order["seconds"] == FOR_EVER_S:
                work = at_own_place(work, order["id"])
            work(order)
            self.orders.end(order)

    # --- what ends it ------------------------------------------------------------------------------------------

    def _fail(self, order: Order) -> None:
        kind, _, text = order["error"].partition(": ")
        raise type(kind, (FAILURES.get(kind, Exception),), {})(text)

    def _nan(self, order: Order) -> None:
        self._spoilt = math.nan  # for good, as NaN in weights is; training goes on after a single one

    # --- hangs -------------------------------------------------------------------------------------------------

    def _sleep(self, order: Order) -> None:
        time.sleep(order["seconds"])

    def _writer(self, order: Order) -> None:
        """A child that writes a checkpoint, and never comes to an end."""
        child = multiprocessing.get_context("fork").Process(target=write_state, args=(order["seconds"],))
        child.start()
        child.join()

    def _crossed(self, order: Order) -> None:
        """Two ranks that meet in two groups, in different orders."""
        mine, other = self.rank, next(r for r in order["ranks"] if r != self.rank)
        for group in self.pairs[min(mine, other), max(mine, other)][:: 1 if mine < other else -1]:
            dist.all_reduce(torch.ones(1, device=self.device), group=group)

    def _astray(self, order: Order) -> None:
        """A collective with one other, who goes on to the next of all."""
        if self.rank == order["ranks"][0]:
            dist.all_reduce(torch.ones(1, device=self.device), group=self.pairs[tuple(sorted(order["ranks"]))][0])

    def _locked(self, order: Order) -> None:
        """A lock that nobody gives back."""
        threading.Event().wait(order["seconds"])

    def _other(self, order: Order) -> None:
        """Another operation than that of the others, under the same number."""
        dist.all_gather([torch.ones(4)] * dist.get_world_size(), torch.ones(4))

    def _spin(self, order: Order) -> None:
        """In C, for longer than anybody waits; no other thread runs any Python meanwhile."""
        re.match(r"(a+)+b", "a" * 64)

    def _lock(self, order: Order) -> None:
        """Asleep in C with the interpreter's lock held."""
        ctypes.PyDLL(None).usleep(int(min(order["seconds"], 4000.0) * 1e6))

    # --- what looks like one -----------------------------------------------------------------------------------

    def _evaluate(self, order: Order) -> None:
        """All ranks, with a collective now and then."""
        until = torch.tensor(time.time() + order["seconds"], dtype=torch.float64, device=self.device)
        dist.broadcast(until, 0)
        over = torch.zeros(1, device=self.device)
        while not over:
            with torch.no_grad():
                self.model.module(torch.randn(8, WIDTH, device=self.device))
            time.sleep(0.05)
            over.fill_(float(self.rank == 0 and time.time() > until.item()))
            dist.broadcast(over, 0)

    def _save(self, order: Order) -> None:
        """Rank 0 writes to slow storage, the others wait for it."""
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": [torch.zeros(1 << 20) for _ in range(4)]}
            torch.save(state, SlowFile(self.folder / "checkpoint.pt", (16 << 20) / order["seconds"]))  # type: ignore[arg-type]
        dist.barrier()

    def _prepare(self, order: Order) -> None:
        """Rank 0 reads a file again and again, and tells the others how many different words there are."""
        until, count = time.time() + order["seconds"], torch.zeros(1, device=self.device)
        while self.rank == 0 and time.time() < until:
            count += len(set(Path(__file__).read_text().split()))
            time.sleep(0.02)
        dist.broadcast(count, 0)

    def _service(self, order: Order) -> None:
        """One rank waits for an answer that takes its time."""
        ours, theirs = socket.socketpair()
        threading.Timer(order["seconds"], theirs.send, (b"shard",)).start()
        ours.recv(16)
        ours.close()
        theirs.close()

    def _prefetch(self, order: Order) -> None:
        """One rank waits for a thread of its own that reads."""
        read, write = os.pipe()
        threading.Timer(order["seconds"], os.write, (write, b"shard")).start()
        reader = threading.Thread(target=os.read, args=(read, 16))
        reader.start()
        reader.join()
        os.close(read)
        os.close(write)

    def _pause(self, order: Order) -> None:
        """One rank does nothing for a while, as before a second try."""
        time.sleep(min(order["seconds"], SHORT_S))

    def _compile(self, order: Order) -> None:
        """One rank compiles again and again, for shapes that it has not seen."""
        until = time.time() + order["seconds"]
        for width in itertools.count(8):
            torch.compile(deep, backend="aot_eager", dynamic=False)(torch.randn(width, WIDTH, requires_grad=True))
            torch._dynamo.reset()
            if time.time() > until:
                break


def at_own_place(work: Callable[[Order], None], id: int) -> Callable[[Order], None]:
    """The same work, called by a function with a name of its own. Where a restart has not helped, the next hang is
    waited for twice as long; but hangs of a study have nothing to do with one another."""

    def place(order: Order) -> None:
        work(order)

    place.__code__ = place.__code__.replace(co_name=f"place_{id}", co_qualname=f"place_{id}")
    return place


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        x = torch.tanh(x @ torch.ones(WIDTH, WIDTH)) + x
    return x


def write_state(seconds: float) -> None:
    time.sleep(seconds)


def main(trainer: type[Trainer] = Trainer) -> None:
    torch.set_num_threads(1)
    timeout_s = float(sys.argv[2])
    backend = "nccl" if trainer.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s) if timeout_s else None)
    trainer(Path(sys.argv[1])).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
