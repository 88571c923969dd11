"""Compares what a job says with what a test knows to be so."""

import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.record.job_report import Report
from holdfast.model.incident_record import Change, Record
from tests.cli.driver import Job
from tests.public.sentences import SLACK_S, Known, check_sentences
from tests.public.table import STEPS, Resuming, Script
from tests.public.witness import Witness

_OURS = ("run", "code-", "busy", "home")  # of the launcher and the test, by the beginnings of their names


def tell_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def went_on(script: Script, good: int, origin: int) -> str:
    """How the sentence about a restart must go on, for an incident and for a planned one."""
    match script.known:
        case Resuming.RESUMED:
            lost = f"{tell_steps(good - origin)} and "
            return rf" from step {origin}, lost ({lost if good > origin else f'({lost})?'})(?P<s>[\d.]+) s"
        case Resuming.ANEW:
            return rf", but the script started from step 0: lost {tell_steps(good)} and (?P<s>[\d.]+) s"
        case Resuming.NOT:
            unknown = rf" \(whether the script resumed is not known: at most {tell_steps(good)} redone\)"
            return rf"{unknown}, lost (?P<s>[\d.]+) s"


def check_restart(job: Job, seen: Witness, script: Script, record: Record | Change, begins: str) -> None:
    """Where it was, what it went on from, and what that cost: in the record and on the console."""
    good, origin = seen.reached(1), seen.origin(2)
    assert good - 1 <= record.good_step <= good + script.grain, "the last step that all ranks had made"
    known = None if script.known is Resuming.NOT else origin
    assert record.resumed_from == known, "what the script went on from"
    words = re.compile(begins.format(good=record.good_step) + went_on(script, record.good_step, origin))
    told = words.match(record.sentence)
    assert told, (words.pattern, record.sentence)
    [shown] = [line for line in job.sentences() if words.search(line)]
    assert record.sentence in shown, "the console says what is recorded"
    if script.grain == 1:
        lost_s = seen.stepped_at(2, 0) - seen.stepped_at(1, good)
        assert abs(float(told["s"]) - lost_s) < SLACK_S, (told["s"], lost_s)


def check_bill(seen: Witness, script: Script, report: Report, ended_at: float) -> None:
    """New work, work that was done again, and their share of the time."""
    new_s, again_s = seen.trained_s()
    slack_s = SLACK_S + (script.grain - 1) * 0.1 * seen.generations
    last_s = ended_at - seen.stepped_at(seen.generations, seen.reached(seen.generations))  # what follows the last step
    assert report.wall_s <= ended_at - seen.began_at + slack_s
    train_s, redo_s = report.spent_s["train"], report.spent_s["redo"]
    most_s = new_s + last_s + slack_s
    if script.known is Resuming.NOT and seen.generations > 1:
        assert report.at_most == "at most ", "work that was done again is in it"
        most_s += again_s
    else:
        assert report.at_most == ""
        assert abs(redo_s - again_s) < slack_s, (redo_s, again_s)
    assert new_s - slack_s <= train_s <= most_s, (train_s, new_s, again_s, last_s)
    assert report.ettr is not None and abs(report.ettr - train_s / report.wall_s) < 1e-6


def check_losses(seen: Sequence[Witness], script: Script, calm: dict[int, str] | None) -> None:
    """Steps that were made again, and all that followed, came out as they would have without a fault."""
    known = dict(calm or {})
    for life in [one.losses(generation) for one in seen for generation in range(1, one.generations + 1)]:
        assert {step: known[step] for step in life if step in known} == {s: life[s] for s in life if s in known}
        if not script.exact:
            return
        known |= life


def find_files(folder: Path) -> set[str]:
    """What a script has left where its user looks, by names."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    ours = (path for path in found if not path.parts[0].startswith(_OURS) and path.suffix not in (".out", ".pyc"))
    return {str(path) for path in ours}


def check_files(job: Job, script: Script, calm: set[str] | None) -> None:
    """Everything is where the user looks for it, and nothing of it in a copy alone."""
    found = find_files(job.folder)
    assert {script.path, *script.files} <= found
    if calm is not None:
        assert found == calm
    copies = [path for path in (job.run_dir / "releases").iterdir() if path.is_dir() and not path.is_symlink()]
    inside = {str(path.relative_to(copy)) for copy in copies for path in copy.rglob("*") if is_made(path)}
    assert not inside - {Path(script.path).name}, "in the copy alone"


def is_made(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.suffix != ".pyc"


def check_end(job: Job, seen: Witness, script: Script) -> None:
    """How far the job is said to have come."""
    newest = seen.generations
    assert seen.reached(newest) == STEPS, "by the script's own lines"
    unknown = script.known is Resuming.NOT and newest > 1
    counted = STEPS - seen.origin(newest) if unknown else STEPS
    assert job.report().step == counted
    assert job.report().since == ("the last launch" if unknown else "the start of this run")


def check_calm(job: Job, seen: Witness, script: Script, ended_at: float) -> None:
    """A run that nothing happened to says just that."""
    report = job.report()
    assert (report.incidents, report.changes, report.generation) == ((), (), 1)
    assert "holdfast: done: 0 incidents, ETTR" in job.sentences()[-1]
    check_sentences(Known(job=job, seen=seen, script=script, ended_at=ended_at))
    assert script.loss_source == "" or f"holdfast: loss: read from {script.loss_source}" in job.sentences()
    check_end(job, seen, script)
    check_bill(seen, script, report, ended_at)


def check_stopped(job: Job, seen: Witness, script: Script, ended_at: float) -> None:
    """A run that a person has stopped: how far it came, and that nobody failed."""
    report, reached = job.report(), seen.reached(1)
    assert (report.incidents, report.changes, report.code) == ((), (), 143)
    assert reached - 1 <= report.step <= reached + script.grain
    [said] = [line for line in job.sentences() if "ending: " in line]
    assert said == f"holdfast: ending: stopped by {pwd.getpwuid(os.getuid()).pw_name}"
    assert job.sentences()[-1].startswith("holdfast: ended with code 143: 0 incidents, ETTR ")
    check_bill(seen, script, report, ended_at)
