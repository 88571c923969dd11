"""The benchmark of replays: its fault strikes, and real processes name the node that was struck."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._replay_rank import KINDS, Node
from benchmarks.replay import cases, reckoned

ROOT = Path(__file__).parents[2]

LIVE = """
import sys
from pathlib import Path
from benchmarks._replay_rank import Case
from benchmarks.replay import live
asked = [Case(way=way, stages=1, q=q, most=1, trials=3) for way in ("dual", "halves") for q in (1.0, 0.0)]
for one in live(Path(sys.argv[1]), 6, asked):
    print(one.case.way, one.case.q, one.named, one.nobody, one.misjudged)
"""


def test_every_kind_of_fault_changes_the_tensor() -> None:
    node = Node(0, 6, 1)
    clean = torch.linspace(-0.9, 0.9, 64).view(4, 16)
    for kind in KINDS:
        for bit in range(200):
            node.struck = (kind, bit)
            struck = node._maybe_struck(clean.clone())
            assert (struck != clean).sum() == 1, (kind, bit)
    node.struck = None
    assert torch.equal(node._maybe_struck(clean.clone()), clean)


def test_what_is_reckoned() -> None:
    found = {(case.way, case.q, case.most): reckoned(case) for case in cases(1) if case.q}
    assert found["dual", 0.5, 1] == 0.25
    assert found["dual", 1.0, 1] == found["halves", 1.0, 1] == 1.0
    assert 0.95 <= found["dual", 0.2, 17] < 0.97


@pytest.mark.slow
def test_real_processes_name_the_struck_node(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIVE, str(tmp_path)]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["dual 1.0 3 0 0", "dual 0.0 0 3 0", "halves 1.0 3 0 0", "halves 0.0 0 3 0"]
