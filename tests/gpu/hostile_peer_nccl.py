"""What ranks tell one another over NCCL is data, too: `python -m tests.gpu.hostile_peer_nccl`.

Two ranks share a GPU. One makes a call of holdfast's, the other sends a pickle, a wrong type, a size that no value has,
or a sound value in its place. The last line is JSON; the exit code is how many calls did not end as they should.
"""

import json
import pickle  # noqa: TID251 as an attacker does
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.client.test_pickle_free_collectives import CALLS, JOB, Evil

LIMIT_S, SIDE_BY_SIDE = 150.0, 4


class Play(NamedTuple):
    """A call of the honest rank, the bytes that come in its place, and how it is to end: an error's name, or "" and
    what the call returns."""

    call: str
    content: bytes
    size: int = -1
    error: str = "PeerValueError"
    returns: str = ""


def play(within: Path, call: str, content: bytes, size: int) -> list[str]:
    """Return how the honest rank ended: the kind of error, or "", and its words or what the call returned."""
    folder = Path(tempfile.mkdtemp(dir=within))
    folder.chmod(0o755)
    (folder / "content").write_bytes(content)
    command = [sys.executable, str(JOB), str(folder), call, str(size), "nccl"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    ended: list[str] = json.loads(said.stdout.splitlines()[-1]) if said.stdout else ["died", said.stderr[:600]]
    return ended


def main() -> int:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        pwned = folder / "pwned"
        plays = [
            *(Play(call, pickle.dumps(Evil(str(pwned)))) for call in CALLS),
            *(Play("gather_all", b"x", size) for size in (1 << 40, -7)),
            Play("gather_all", b"\xa3abc"),
            Play("gather_all", b"\x07", error="", returns="[5, 7]"),
            Play("broadcast_first", b"\x07", error="", returns="7"),
        ]
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            ends = list(pool.map(lambda one: play(folder, one.call, one.content, one.size), plays))
        for one, (error, words) in zip(plays, ends, strict=True):
            is_right = error == one.error and one.returns in ("", words)
            print(f"{one.call}, {one.content[:9]!r} of {one.size}: {error} {words[:600]}", flush=True)
            if not is_right:
                wrong.append(f"{one.call}, {one.content[:9]!r}")
        if pwned.exists():
            wrong.append("a pickle was executed")
    print(json.dumps({"plays": len(ends), "wrong": wrong}))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
