"""What the console of a resumed run says about ranks of which its controller has not heard."""

import re
from pathlib import Path

from holdfast.cli.launch import controller_console
from holdfast.cli.terminal import quantity_text
from holdfast.core.decide.decider import Decider
from holdfast.logs.secret_masking import Masker
from holdfast.model.action import Finish, Launch
from holdfast.model.decider_events import Ended, Progress, Successor, Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from tests.cli.console_transcript import assert_screens
from tests.core.test_open_trouble import ASKS
from tests.core.transcript import parse


def told_by(folder: Path, *entries: Entry) -> str:
    """Return what a controller that has taken over says on the console about these entries."""
    folder.mkdir()
    console = controller_console.SaidLog(folder, Masker(hosts=False))
    teller = controller_console.ConsoleTeller(folder, console)
    taken_over = Successor(epoch=2, alone_since=50.0)
    for entry in (Entry(seq=1, at=100.0, event=taken_over, decision=Decision(phase=Phase.TRAINING)), *entries):
        teller.on_entry(entry, Decider().view)
    console._file.close()
    return (folder / "said.log").read_text() if (folder / "said.log").exists() else ""


def step_at(at: float) -> Entry:
    step = Progress(generation=1, step=7, at=at, first_step=1, first_at=10.0, counted=False)
    return Entry(seq=2, at=102.0, event=step, decision=Decision(phase=Phase.TRAINING))


def test_a_resumed_console_stops_no_ranks_of_which_nobody_has_heard(tmp_path: Path) -> None:
    lost = Alarm(kind=Kind.SILENCE, at=103.0, suspects=("n0",), reason="has been silent for 3 s")
    stop = Decision(phase=Phase.STOPPING, reason="incident 1: n0 has been silent for 3 s")
    incident = Entry(seq=3, at=103.0, event=lost, decision=stop)
    screens = {
        "nobody has heard of ranks": told_by(tmp_path / "a", step_at(40.0), incident),
        "ranks have made a step": told_by(tmp_path / "b", step_at(101.0), incident),
    }
    assert_screens("resumed", screens)


def test_a_resumed_console_says_that_the_script_had_ended(tmp_path: Path) -> None:
    finish = Decision(phase=Phase.ENDING, actions=(Finish(id=5, code=0, reason="all ranks ended well", grace_s=0.0),))
    ended = Entry(seq=3, at=103.0, event=Ended(node="n0", generation=1), decision=finish)
    assert told_by(tmp_path / "a", step_at(101.0), ended) == ""
    screens = {
        "nobody knows when": told_by(tmp_path / "b", ended),
        "its last step is known": told_by(tmp_path / "c", step_at(70.0), ended),
    }
    assert_screens("resumed_end", screens)
    for screen, instants in zip(screens.values(), ((50.0, 100.0), (50.0, 100.0, 70.0)), strict=True):
        assert re.findall(r"\d\d:\d\d:\d\d", screen)[-len(instants) :] == [*map(quantity_text.clock_text, instants)]


def test_ranks_that_the_resumed_run_has_launched_itself_are_heard(tmp_path: Path) -> None:
    """As in the next job of Slurm, whose script may find that it has nothing left to do."""
    launch = Decision(phase=Phase.LAUNCHING, actions=(Launch(id=4, generation=2, seats=()),))
    launched = Entry(seq=2, at=101.0, event=Tick(), decision=launch)
    finish = Decision(phase=Phase.ENDING, actions=(Finish(id=5, code=0, reason="all ranks ended well", grace_s=0.0),))
    ended = Entry(seq=3, at=103.0, event=Ended(node="n0", generation=2), decision=finish)
    assert told_by(tmp_path / "a", launched, ended) == ""


def told_of_takeover(folder: Path, *lines: str) -> str:
    """Return what a controller says that takes over a job of this journal."""
    folder.mkdir()
    decider = Decider()
    for line in lines:
        at, text = line.split(" ", 1)
        decider.step(float(at), parse(text, float(at), decider.view.generation))
    console = controller_console.SaidLog(folder, Masker(hosts=False))
    event = Successor(epoch=2, alone_since=0.0)
    entry = Entry(seq=99, at=99.0, event=event, decision=decider.step(99.0, event))
    controller_console.ConsoleTeller(folder, console).on_entry(entry, decider.view)
    console._file.close()
    return (folder / "said.log").read_text()


def test_a_controller_that_takes_over_names_the_order_that_the_job_waits_for(tmp_path: Path) -> None:
    held = (*ASKS[:5], "3.05 order hold by ann", "3.1 outcome 2 ok")
    asks_too = (*ASKS[:9], "5.05 order hold by ann", "5.1 outcome 4 ok")
    screens = {
        "the job asks": told_of_takeover(tmp_path / "a", *ASKS),
        "it is held": told_of_takeover(tmp_path / "b", *held),
        "it is held, and asks when it is not": told_of_takeover(tmp_path / "c", *asks_too),
    }
    assert_screens("taken_over", screens)
