"""What ranks tell each other is data: hostile bytes in a rank's place end in a sentence, and execute nothing."""

import ast
import json
import os
import pickle  # noqa: TID251 as an attacker does
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.driver import ROOT
from tests.conftest import job_environment

pytestmark = pytest.mark.timeout(200)
JOB = Path(__file__).with_name("hostile_peer_job.py")
CLIENT = ROOT / "holdfast" / "client"
OWN_PICKLE = "holdfast/client/training/torch_recorder_dumps.py"  # what torch itself hands over within the process
CALLS = ("gather_all", "broadcast_first", "gather_layouts", "digest_states", "check_states", "gather_longest")


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def play(tmp_path: Path, call: str, content: bytes, size: int = -1) -> list[str]:
    """Play a job of two ranks: an honest one that makes this call, and one that sends these bytes in its place. Return
    how the honest one ended."""
    (tmp_path / "content").write_bytes(content)
    said = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), call, str(size)],
        env=job_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert said.returncode == 0, said.stderr
    ended: list[str] = json.loads(said.stdout.splitlines()[-1])
    return ended


@pytest.mark.e2e
@pytest.mark.parametrize("call", [CALLS[0], *(pytest.param(call, marks=pytest.mark.slow) for call in CALLS[1:])])
def test_a_pickle_in_a_ranks_place(tmp_path: Path, call: str) -> None:
    """In torch's store and in gloo he can be the other rank: neither asks who he is."""
    pwned = tmp_path / "pwned"
    ended = play(tmp_path, call, pickle.dumps(Evil(str(pwned))))
    assert not pwned.exists()
    assert ended[0] == "PeerValueError"
    assert re.match("what came in the name of rank [01] is no value that ranks send: .", ended[1])


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1 << 40, -7])
def test_a_size_that_no_value_has(tmp_path: Path, size: int) -> None:
    ended = play(tmp_path, "gather_all", b"x", size)
    assert ended == ["PeerValueError", f"a value of {size} bytes came in the name of rank 1; it may have {64 << 20}"]


@pytest.mark.e2e
def test_a_value_of_another_type(tmp_path: Path) -> None:
    assert play(tmp_path, "gather_all", b"\xa3abc")[0] == "PeerValueError"
    assert play(tmp_path, "gather_all", b"\x07") == ["", "[5, 7]"]


def test_nothing_in_the_client_unpickles_what_peers_send() -> None:
    """Also no collective of torch's that pickles objects."""
    wrong = []
    for path in sorted((*CLIENT.rglob("*.py"), *(ROOT / "holdfast" / "trainers").rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if re.search(
                r"(gather|broadcast|scatter|send|recv)_object(_list)?$|^_(object_to_tensor|tensor_to_object)$", called
            ):
                wrong.append(f"{name}: {called}")
            if name != OWN_PICKLE and {one.partition(".")[0] for one in modules} & {"pickle", "marshal", "dill"}:
                wrong.append(f"{name}: {modules}")
    assert not wrong
