"""`holdfast stop`: what it says of the end that it waited for."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands import stop_command
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import RunEnd


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RunEnd(code=143, reason="stopped by ann"), "stopped\n"),
        (RunEnd(code=0, reason="all ranks ended well"), "the run has ended with code 0: all ranks ended well\n"),
        (RunEnd(code=93, reason="the script raised"), "the run has ended with code 93: the script raised\n"),
    ],
)
def test_a_run_that_was_ending_by_itself_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: RunEnd, told: str
) -> None:
    def end_run(run_dir: Path, place: str, order: dict[str, Any]) -> None:
        assert order["verb"] == "stop"
        run_and_node_specs.write_json(run_dir / "exit.json", ended)

    monkeypatch.setattr(stop_command, "ask_controller", end_run)
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_change", lambda args: tmp_path)
    assert stop_command.main([]) == 0
    assert capsys.readouterr().out == told
