"""Dumps of torch's flight recorder from four NCCL ranks that share one GPU: `python -m tests.gpu.nccl_dumps FOLDER`.

Each rank counts as a host of its own for NCCL, so all four may share the device. In each scene something stops on rank
2 in one way. Six seconds later every rank writes what its recorder says as JSON to FOLDER/SCENE/RANK.json. The tests of
what holdfast makes of such dumps use trimmed copies of them. What NCCL's own RAS says meanwhile goes to
FOLDER/SCENE/ras.txt. With names of scenes after FOLDER only these are played.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.client.training.rank_flight_recorder import _read_dumps

WORLD, STRUCK = 4, 2
STEPS = 20  # before the strike
AFTER_S = 6.0
LIMIT_S = 150.0
RAS_S = 12.0  # for an answer: it waits for ranks that do not answer
TOGETHER = 3  # scenes
FOREVER = 10**14  # cycles of the GPU

Strike = Callable[[], None]
Scene = Callable[[int, Strike], None]  # plays the steps, and calls the strike when it is due


def block_gpu() -> None:
    torch.cuda._sleep(FOREVER)


def block_host() -> None:
    time.sleep(3600)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def vector(rank: int) -> torch.Tensor:
    return torch.full((1 << 16,), float(rank), device="cuda")


def play_sums(rank: int, strike: Strike) -> None:
    """Step by step; the host waits for its GPU after each."""
    for step in range(10**6):
        if step == STEPS:
            strike()
        sums = vector(rank)
        dist.all_reduce(sums)
        sums.sum().item()


def play_ahead(rank: int, strike: Strike) -> None:
    """Hosts queue more than the recorder holds before they wait for their GPUs."""
    for step in range(STEPS + 200):
        if step == STEPS:
            strike()
        dist.all_reduce(vector(rank))
    torch.cuda.synchronize()


def play_backward(rank: int, strike: Strike) -> None:
    """DDP with several buckets; the strike comes in the middle of a backward pass."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
    net = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.3)
    step = 0
    layers[3].register_full_backward_hook(lambda *_: strike() if step == STEPS else None)
    for step in range(10**6):  # noqa: B007 - the hook reads it
        net(torch.randn(8, 256, device="cuda")).sum().backward()
        torch.cuda.synchronize()


def play_groups(rank: int, strike: Strike) -> None:
    """Two groups of all ranks; the struck one enters them in the other order."""
    groups = [dist.new_group(), dist.new_group()]
    for step in range(10**6):
        if step == STEPS:
            strike()  # on the struck rank it only turns the order round
        for group in groups[::-1] if step >= STEPS and rank == STRUCK else groups:
            dist.all_reduce(vector(rank), group=group)
        torch.cuda.synchronize()


def play_ring(rank: int, strike: Strike) -> None:
    """Messages one by one, around all ranks; then a sum in the same group."""
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    for step in range(10**6):
        if step == STEPS:
            strike()
        sent, got = vector(rank), vector(rank)
        calls: list[Callable[[], object]] = [partial(dist.send, sent, after), partial(dist.recv, got, before)]
        for call in calls if rank % 2 == 0 else calls[::-1]:
            call()
        dist.all_reduce(got)
        got.sum().item()


def play_batch(rank: int, strike: Strike) -> None:
    """The same in batches, to both sides."""
    sides = [(rank + 1) % WORLD, (rank - 1) % WORLD]
    for step in range(10**6):
        if step == STEPS:
            strike()
        ops = [dist.P2POp(dist.isend, vector(rank), side) for side in sides]
        ops += [dist.P2POp(dist.irecv, vector(rank), side) for side in sides]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        torch.cuda.synchronize()


def play_graph(rank: int, strike: Strike) -> None:
    """The sum is captured once and replayed; one more sum follows outside of the graph."""
    sums = vector(rank)
    dist.all_reduce(sums)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(sums)
    for step in range(10**6):
        if step == STEPS:
            strike()
        graph.replay()
        if step < 3:
            dist.all_reduce(vector(rank))
        torch.cuda.synchronize()


def play_mixed(rank: int, strike: Strike) -> None:
    """The struck one enters another operation under the same number."""
    for step in range(10**6):
        if step == STEPS:
            strike()
        sums = vector(rank)
        if step >= STEPS and rank == STRUCK:
            dist.broadcast(sums, STRUCK)
        else:
            dist.all_reduce(sums)
        sums.sum().item()


def do_nothing() -> None:
    return


SCENES: dict[str, tuple[Scene, Strike]] = {
    "healthy": (play_sums, do_nothing),
    "blocked": (play_sums, block_gpu),
    "host": (play_sums, block_host),
    "stopped": (play_sums, stop_process),
    "ahead": (play_ahead, block_gpu),
    "backward": (play_backward, block_gpu),
    "groups": (play_groups, do_nothing),
    "ring": (play_ring, block_gpu),
    "ring_host": (play_ring, block_host),
    "batch": (play_batch, block_gpu),
    "batch_host": (play_batch, block_host),
    "graph": (play_graph, block_gpu),
    "graph_host": (play_graph, block_host),
    "mixed": (play_mixed, do_nothing),
}


def watch_strike(folder: Path, rank: int, struck: threading.Event) -> None:
    """Dump some time after the strike, and end when all ranks have done so."""
    struck.wait(60)
    time.sleep(AFTER_S)
    told = {"rank": rank, "at": time.time(), "torch": torch.__version__, "nccl": torch.cuda.nccl.version()}
    if rank == 0:
        (folder / "ras.txt").write_text(read_ras(os.environ["NCCL_RAS_ADDR"]))
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(told | {"dump": _read_dumps()[-1]}, default=repr))
    partial.rename(folder / f"{rank}.json")
    until = time.monotonic() + 8 + RAS_S
    while time.monotonic() < until and len(list(folder.glob("*.json"))) < WORLD:
        time.sleep(0.05)
    os._exit(0)


def read_ras(address: str) -> str:
    """All that RAS says about the job's communicators, or why it says nothing."""
    host, _, port = address.rpartition(":")
    found = b""
    try:
        with socket.create_connection((host, int(port)), timeout=2) as link:
            link.settimeout(RAS_S)
            link.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 4\nVERBOSE STATUS\n")
            while piece := link.recv(1 << 16):
                found += piece
    except OSError as e:
        found += f"\n{type(e).__name__}: {e}".encode()
    return found.decode(errors="replace")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def run_rank(folder: Path, scene: str, rank: int) -> None:
    play, blow = SCENES[scene]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    struck = threading.Event()
    threading.Thread(target=watch_strike, args=(folder, rank, struck), daemon=True).start()

    def strike() -> None:
        struck.set()
        if rank == STRUCK:
            blow()

    try:
        play(rank, strike)
        time.sleep(60)  # until the watcher ends this process
    except Exception as e:  # a scene that cannot be played leaves its reason
        (folder / f"{rank}.error").write_text(f"{type(e).__name__}: {e}")
        os._exit(1)


def start_scene(folder: Path, scene: str) -> list[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True)
    settings = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "TORCH_FR_BUFFER_SIZE": "64"}
    settings |= {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "64"}
    settings |= {"NCCL_RAS_ADDR": f"127.0.0.1:{free_port()}"}
    found = []
    for rank in range(WORLD):
        env = os.environ | settings | {"NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-m", "tests.gpu.nccl_dumps", str(folder), scene, str(rank)]
        with (folder / f"{rank}.log").open("wb") as log:
            found.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return found


def run_scenes(folder: Path, scenes: list[str]) -> None:
    began = time.monotonic()
    for first in range(0, len(scenes), TOGETHER):
        wave = scenes[first : first + TOGETHER]
        started = [start_scene(folder / scene, scene) for scene in wave]
        others = [rank for ranks in started for rank in ranks if rank is not ranks[STRUCK]]
        for rank in (*others, *(ranks[STRUCK] for ranks in started)):
            try:
                rank.wait(max(0.1, began + LIMIT_S - time.monotonic()) if rank in others else 5)  # a stopped one never
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        for scene in wave:
            told = sorted(path.stem for path in (folder / scene).glob("*.json"))
            errors = [path.read_text()[:200] for path in (folder / scene).glob("*.error")]
            print(f"{time.monotonic() - began:5.1f} s {scene}: dumps of ranks {', '.join(told)}", *errors, flush=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    if len(sys.argv) == 4 and sys.argv[3].isdecimal():
        run_rank(where, sys.argv[2], int(sys.argv[3]))
    else:
        run_scenes(where, sys.argv[2:] or list(SCENES))
