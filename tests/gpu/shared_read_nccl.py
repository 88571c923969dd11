"""Ranks that read a checkpoint together over NCCL: `python -m tests.gpu.shared_read_nccl`.

Three ranks share the GPUs there are, each as a host of its own for NCCL. They read the same blocks, other blocks, and
blocks that cannot be read or come damaged. The last line is JSON; the exit code is how many things are not as they
should be.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checkpoint.making import content
from tests.checkpoint.making import save as save_checkpoint
from tests.client.test_shared_read import ALIKE, SIZES, WHOLE, Piece, expect

SCRIPT = Path(__file__).parents[1] / "client" / "shared_read_job.py"
RANKS, STEP, LIMIT_S = 3, 3, 120.0
SOME: list[Piece] = [(0, 0, SIZES[0], 0)]
ALONE: list[Piece] = [(2, 0, 10, 0)]


def read(url: str, pieces: list[list[Piece]], *more: str) -> list[str]:
    """Return what each rank printed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "NCCL_IB_DISABLE": "1"}
    command = [sys.executable, str(SCRIPT), url, json.dumps(pieces), "--backend=nccl", *more]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return [rank.communicate(timeout=LIMIT_S)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def main() -> int:
    wrong: list[str] = []

    def check(name: str, found: object, wanted: object) -> None:
        print(f"{name}: {'as it should be' if found == wanted else f'WRONG: {found}, not {wanted}'}", flush=True)
        if found != wanted:
            wrong.append(name)

    with tempfile.TemporaryDirectory() as folder:
        url = save_checkpoint(Path(folder), STEP, sizes=SIZES)
        found = [one.split() for one in read(url, ALIKE)]
        check("the same blocks: content", [one[-1] for one in found], [expect(pieces) for pieces in ALIKE])
        check("the same blocks: blocks read", sorted(one[0] for one in found), ["2", "2", "3"])
        found = [one.split() for one in read(url, [SOME, ALONE, SOME])]
        wanted = [hashlib.sha256(content(SIZES[0], 1000 * STEP)).hexdigest(), expect(ALONE)]
        check("other blocks: content", [one[-1] for one in found], [wanted[0], wanted[1], wanted[0]])
        check("other blocks: blocks read", [one[0] for one in found], ["2", "0", "2"])
        for fault in ("--fails=0", "--garbles=2", "--lacks=1"):
            told = read(url, [WHOLE] * RANKS, fault)
            check(f"{fault}: ranks that refuse", sum(one.startswith("refused: ") for one in told), RANKS)
            check(f"{fault}: sentences", len(set(told)), 1)
    print(json.dumps({"wrong": wrong}))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
