"""What ranks and their agent leave each other in files; whatever is missing or damaged is nothing."""

import json
from pathlib import Path

from holdfast.agent.rank import rank_exchange_files
from holdfast.wire.agent_messages import IncidentNote, JobFigures


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
