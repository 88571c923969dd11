"""Two ranks over BACKEND, by default gloo: `hostile_peer_job.py FOLDER CALL SIZE [BACKEND]`. One makes a call of
holdfast's; the other, which is another user if there is root to play one, makes the same collectives with the bytes of
FOLDER/content as its value. Over NCCL they share a GPU, each as a host of its own.

It prints how the honest one ended. SIZE is what the hostile one says that its value has; -1 stands for the truth.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.checkpoint.image_layout import arrange_image
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.elastic.recovery_account import gather_longest
from holdfast.client.elastic.state_moves import check_states, digest_states

NOBODY = 65534
LIMIT = timedelta(seconds=60)
BACKEND = sys.argv[4] if len(sys.argv) > 4 else "gloo"
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
LAYOUT = arrange_image((), lambda spec: (0, 0), rank=0, world=2)
CALLS: dict[str, Callable[[], object]] = {
    "gather_all": lambda: RankWorld().gather_all(5, int),
    "broadcast_first": lambda: RankWorld().broadcast_first(5, int),
    "gather_layouts": lambda: RankWorld().gather_layouts(LAYOUT),
    "digest_states": lambda: digest_states({}),
    "check_states": lambda: check_states({}, (), 1),
    "gather_longest": lambda: gather_longest({"move": 1.0}),
}


def join(store: dist.Store, rank: int) -> None:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_HOSTID": f"host{rank}"}
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "NCCL_IB_DISABLE": "1", **loopback}
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2, timeout=LIMIT)


def send_hostile(call: str, content: bytes, size: int) -> None:
    """Make the collectives of this call, as torch's own of objects are made, too."""
    told = torch.tensor([size if size != -1 else len(content)], dtype=torch.int64, device=DEVICE)
    value = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(DEVICE)
    if call == "broadcast_first":
        dist.broadcast(told, src=0)
        dist.broadcast(value, src=0)
        return
    sizes = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    dist.all_gather(sizes, told)
    padded = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8, device=DEVICE)
    padded[: len(value)] = value
    if call == "gather_layouts":
        dist.gather(padded, None, dst=0)
    else:
        dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)


def be_hostile(port: int, call: str, content: bytes, size: int) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    signal.alarm(100)
    join(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT), int(call != "broadcast_first"))
    if -1 <= size <= 1 << 20:
        send_hostile(call, content, size)
    else:  # it comes no further than the sizes
        told = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        dist.all_gather(told, torch.tensor([size], device=DEVICE))


def main() -> None:
    call, content, size = sys.argv[2], (Path(sys.argv[1]) / "content").read_bytes(), int(sys.argv[3])
    (told, tell), (waits, over) = os.pipe(), os.pipe()
    if not (hostile := os.fork()):
        try:
            os.close(over)
            be_hostile(int(os.read(told, 16)), call, content, size)
            os.read(waits, 1)  # NCCL may have taken what it has not sent yet
        finally:
            os._exit(0)
    signal.alarm(100)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    os.write(tell, str(store.port).encode())
    join(store, int(call == "broadcast_first"))
    try:
        ended = ["", str(CALLS[call]())]
    except Exception as e:  # whatever it is
        ended = [type(e).__name__, str(e)]
    os.close(over)
    os.waitpid(hostile, 0)
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
