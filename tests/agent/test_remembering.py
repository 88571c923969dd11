"""Errands on the node's disk, behind a torn line too."""

from pathlib import Path

from holdfast.agent.remembering import recall, remember
from holdfast.model.errand import Done


def test_what_was_carried_out_is_remembered_even_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    assert recall(path) == ()
    first, second = Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=False, detail="no")
    remember(path, first)
    with path.open("ab") as file:
        file.write(b'\n{"type":"done","id":7,"no')  # the agent died in the middle of it
    remember(path, second)
    assert recall(path) == (first, second)
