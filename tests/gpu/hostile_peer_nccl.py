"""What ranks tell one another over NCCL is data, too: `python -m tests.gpu.hostile_peer_nccl`.

Two ranks share a GPU. One makes a call of holdfast's, the other sends a pickle, a wrong type, a size that no value has,
or a sound value in its place. The last line is JSON; the exit code is how many calls did not end as they should.
"""

import json
import pickle  # noqa: TID251 as an attacker does
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.client.test_pickle_free_collectives import CALLS, JOB, Evil

LIMIT_S = 150.0


def play(folder: Path, call: str, content: bytes, size: int = -1) -> list[str]:
    """Return how the honest rank ended: the kind of error, or "", and its words or what the call returned."""
    (folder / "content").write_bytes(content)
    command = [sys.executable, str(JOB), str(folder), call, str(size), "nccl"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    ended: list[str] = json.loads(said.stdout.splitlines()[-1]) if said.stdout else ["", said.stderr[-600:]]
    return ended


def main() -> int:
    wrong: list[str] = []

    def check(name: str, found: object, wanted: object) -> None:
        print(f"{name}: {'as it should be' if found == wanted else f'WRONG: {found}, not {wanted}'}", flush=True)
        if found != wanted:
            wrong.append(name)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        pwned = folder / "pwned"
        for call in CALLS:
            check(f"{call}, a pickle", play(folder, call, pickle.dumps(Evil(str(pwned))))[0], "PeerValueError")
        check("what the pickles would have made", pwned.exists(), False)
        for size in (1 << 40, -7):
            check(f"gather_all, {size} bytes", play(folder, "gather_all", b"x", size)[0], "PeerValueError")
        check("gather_all, another type", play(folder, "gather_all", b"\xa3abc")[0], "PeerValueError")
        check("gather_all, a sound value", play(folder, "gather_all", b"\x07"), ["", "[5, 7]"])
        check("broadcast_first, a sound value", play(folder, "broadcast_first", b"\x07"), ["", "7"])
    print(json.dumps({"wrong": wrong}))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
