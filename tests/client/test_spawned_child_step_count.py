"""The note that children of a rank get, which are started afresh."""

import os
import pickle  # noqa: TID251 - multiprocessing itself speaks it to its children
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client.training.spawned_child_step_count import SpawnNote

ROOT = Path(__file__).parents[2]
READS = """
import pickle, sys
{first}
pickle.loads(sys.stdin.buffer.read())
from multiprocessing.process import BaseProcess
print(BaseProcess._bootstrap.__module__, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("", "holdfast.client.training.spawned_child_step_count False"),
        ("sys.modules['holdfast'] = None", "multiprocessing.process False"),  # it cannot be imported there
    ],
)
def test_to_read_the_note_is_to_begin(first: str, found: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", READS.format(first=first)]
    ran = subprocess.run(argv, input=pickle.dumps(SpawnNote()), env=env, capture_output=True, check=True, timeout=60)
    assert ran.stdout.decode().strip() == found
