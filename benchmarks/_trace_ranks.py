"""One of several gloo ranks that do little but meet, and note how long each round took: a pause of one shows in all."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.client.training import rank_flight_recorder


def main() -> None:
    folder, place = Path(sys.argv[1]), sys.argv[2]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    rank_flight_recorder.start_recorder(place, 1, rank)
    one, rounds = torch.ones(1), []
    over = torch.zeros(1)
    while not over:
        began = time.monotonic()
        dist.all_reduce(one)
        time.sleep(0.02)
        rounds.append((began, time.monotonic() - began))
        if len(rounds) == 20:
            (folder / f"up-{rank}").touch()
        over.fill_(float(rank == 0 and (folder / "finish").exists()))
        dist.broadcast(over, 0)
    (folder / f"rounds-{rank}").write_text(json.dumps({"rounds": rounds, "dump_s": dump_s()}))


def dump_s() -> float:
    """What one look at torch's recorder costs, best of many."""
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        rank_flight_recorder._read_dumps()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    main()
