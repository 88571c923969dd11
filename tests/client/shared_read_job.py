"""One rank that reads parts of a checkpoint together with others; run as a script: the checkpoint, what each reads,
and what befalls one. It prints how many blocks it read itself, and a hash of its memory."""

import argparse
import hashlib
import json

import torch.distributed as dist

from holdfast.checkpoint.manifest import CheckpointPart
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.verified_block_reads import PartPiece, PartReader, check_block
from holdfast.client.checkpointing import shared_read
from holdfast.client.checkpointing.rank_collectives import RankWorld

MINE: list[int] = []


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("url")
    asked.add_argument("pieces")
    asked.add_argument("--fails", type=int, default=-1, help="the rank that cannot read block 1 of any part")
    asked.add_argument("--garbles", type=int, default=-1, help="the rank that sends other bytes than it read")
    asked.add_argument("--lacks", type=int, default=-1, help="the rank that has no memory to read to")
    asked.add_argument("--backend", default="gloo")
    told = asked.parse_args()
    dist.init_process_group(told.backend)
    world = RankWorld()
    wanted = [
        PartPiece(rank=rank, start=start, bytes=size, to=to)
        for rank, start, size, to in json.loads(told.pieces)[world.rank]
    ]

    def check(reader: PartReader, part: CheckpointPart, block: int, target: memoryview, spare: memoryview) -> str:
        MINE.append(block)
        if world.rank == told.fails and block == 1:
            return "the disk is gone"
        why = check_block(reader, part, block, target, spare)
        if world.rank == told.garbles:
            target[0] ^= 1
        return why

    vars(shared_read)["check_block"] = check
    memory = bytearray(max(piece.to + piece.bytes for piece in wanted))
    why = "there is no memory" if world.rank == told.lacks else ""
    try:
        shared_read.read_together(world, told.url, wanted, memoryview(memory), why)
    except StorageError as e:
        print(f"refused: {e}")
    else:
        print(len(MINE), hashlib.sha256(memory).hexdigest())
    dist.destroy_process_group()


main()
