"""What ranks and their agent leave each other in files; whatever is missing or damaged is nothing."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.rank import rank_exchange_files
from holdfast.wire import progress_environment, replay_environment
from holdfast.wire.agent_messages import IncidentNote, JobFigures
from tests.agent.test_zygote_preload import preloading


def test_trackers_and_figures(tmp_path: Path) -> None:
    assert rank_exchange_files.read_trackers(tmp_path) == ""
    (tmp_path / "trackers").write_text("W&B and TensorBoard" + " " * 400)
    assert len(rank_exchange_files.read_trackers(tmp_path)) == 200
    notes = (IncidentNote(number=2, text="rank 1 was killed"),)
    figures = JobFigures(generation=3, incidents=2, restarts=2, lost_s=1.5, ettr=None, notes=notes)
    rank_exchange_files.write_figures(tmp_path, figures)
    told = json.loads((tmp_path / "job-figures.json").read_text())
    assert (told["generation"], told["ettr"], told["notes"]) == (3, None, [{"number": 2, "text": "rank 1 was killed"}])
    rank_exchange_files.write_figures(tmp_path / "gone", figures)  # no error: trackers show older ones


def test_notes_that_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "mesh").write_text("{")
    assert rank_exchange_files.read_mesh(tmp_path / "mesh") == ()
    assert rank_exchange_files.read_replayable(tmp_path) == "" == rank_exchange_files.read_loss_source(tmp_path)


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    path.mkdir()


def put_nested(path: Path) -> None:
    path.write_bytes(b"[" * 300_000)


def put_nested_fields(path: Path) -> None:
    path.write_bytes(b'{"seeded":' * 300)


def put_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


HOSTILE = [put_pipe, put_device, put_folder, put_nested, put_nested_fields, put_large]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("put", HOSTILE)
def test_whatever_a_rank_puts_there_keeps_no_agent_waiting(tmp_path: Path, put: Callable[[Path], None]) -> None:
    for name in ("mesh", progress_environment.TRACKERS, replay_environment.NOTE):
        put(tmp_path / name)
    began_at = time.thread_time()
    notes = rank_exchange_files.read_notes(tmp_path / "mesh")
    assert notes["mesh"] == () and notes["replayable"] == "" and len(notes["trackers"]) <= 200
    assert time.thread_time() - began_at < 1.0


@pytest.mark.timeout(30)
@pytest.mark.parametrize("put", HOSTILE)
def test_imports_that_are_no_list_of_names(tmp_path: Path, put: Callable[[Path], None]) -> None:
    put(tmp_path / "imports.json")
    made = preloading(tmp_path)
    made.first_preload()
    for _ in range(2):
        made.better_preload(held=True, trains=True, key="")
