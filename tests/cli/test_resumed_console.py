"""What the console of a resumed run says about ranks of which its controller has not heard."""

from pathlib import Path

from holdfast.cli.launch import controller_main
from holdfast.cli.terminal import quantity_text
from holdfast.model.action import Finish
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Decision, Ended, Entry, Phase, Progress, Successor


def told_by(folder: Path, *entries: Entry) -> str:
    """Return what a controller that has taken over says on the console about these entries."""
    console = controller_main.SaidLog(folder)
    teller = controller_main.ConsoleTeller(folder, console)
    taken_over = Successor(epoch=2, alone_since=50.0)
    for entry in (Entry(seq=1, at=100.0, event=taken_over, decision=Decision(phase=Phase.TRAINING)), *entries):
        teller.on_entry(entry, "")
    console._file.close()
    return (folder / "said.log").read_text() if (folder / "said.log").exists() else ""


def step_at(at: float) -> Entry:
    step = Progress(generation=1, step=7, at=at, first_step=1, first_at=10.0, counted=False)
    return Entry(seq=2, at=102.0, event=step, decision=Decision(phase=Phase.TRAINING))


def test_a_resumed_console_stops_no_ranks_of_which_nobody_has_heard(tmp_path: Path) -> None:
    lost = Alarm(kind=Kind.SILENCE, at=103.0, suspects=("n0",), reason="has been silent for 3 s")
    stop = Decision(phase=Phase.STOPPING, reason="incident 1: n0 has been silent for 3 s")
    incident = Entry(seq=3, at=103.0, event=lost, decision=stop)
    assert "silent for 3 s; stopping any ranks that are left" in told_by(tmp_path, step_at(40.0), incident)
    assert "silent for 3 s; stopping all ranks" in told_by(tmp_path, step_at(101.0), incident)


def test_a_resumed_console_says_that_the_script_had_ended(tmp_path: Path) -> None:
    finish = Decision(phase=Phase.ENDING, actions=(Finish(id=5, code=0, reason="all ranks ended well", grace_s=0.0),))
    ended = Entry(seq=3, at=103.0, event=Ended(node="n0", generation=1), decision=finish)
    for name in "abc":
        (tmp_path / name).mkdir()
    assert told_by(tmp_path / "a", step_at(101.0), ended) == ""
    nobody = f"while nobody watched, from {quantity_text.clock_text(50.0)} to {quantity_text.clock_text(100.0)}"
    assert f"the script had ended by itself {nobody}; when is not known" in told_by(tmp_path / "b", ended)
    last = f"{nobody}; its last step was made at {quantity_text.clock_text(70.0)}"
    assert last in told_by(tmp_path / "c", step_at(70.0), ended)
