"""The oracle of sentences: what is so passes, and neither an unknown sentence nor a wrong fact does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.public.sentences import Known, check_sentences
from tests.public.table import SCRIPTS, STEPS
from tests.public.witness import Life, Seen

SCRIPT = SCRIPTS["nano_gpt"]
SENTENCE = (
    "rank 1 on n0 was killed by SIGKILL (sender unknown) at step 24; restarted in place from step 20, "
    "lost 4 steps and 2.0 s (detect 0.1, stop 0.1, launch 0.2, first step 1.6)"
)
CALM = (
    "holdfast: local fleet: 1 node x 2 ranks on this host; run directory {run}",
    "holdfast: release 1 is 1 file of {proj}, run in place until one of them changes; "
    "holdfast update brings later changes",
    "holdfast: training: first step after 5.0 s",
)
STRUCK = (
    *CALM,
    "holdfast: incident 1: rank 1 on n0 was killed by SIGKILL (sender unknown); stopping all ranks",
    f"holdfast: {SENTENCE}",
)
DONE = "holdfast: done: {count}, ETTR 75.0 %; more: holdfast report {run}"


def lives() -> list[Life]:
    """Steps take a tenth of a second; the second life begins two seconds after the end of the first."""
    first = [Seen(step, "1.0", 105.0 + step / 10) for step in range(1, 25)]
    second = [Seen(step, "1.0", 107.4 + step / 10) for step in range(21, STEPS + 1)]
    return [Life(1, 0, first), Life(2, 0, second)]


def known(tmp_path: Path, *lines: str, struck: str = "") -> Known:
    (tmp_path / "proj").mkdir(exist_ok=True)
    (tmp_path / SCRIPT.path).touch()
    places = {"run": tmp_path / "run", "proj": tmp_path / "proj"}
    text = "\n".join((*lines, DONE.replace("{count}", "1 incident" if struck else "0 incidents"))).format(**places)
    incidents = (SimpleNamespace(sentence=SENTENCE, good_step=24),) if struck else ()
    report = SimpleNamespace(incidents=incidents, changes=(), ettr=0.75, at_most="")
    job: Any = SimpleNamespace(
        folder=tmp_path,
        run_dir=places["run"],
        process=SimpleNamespace(returncode=0),
        text=lambda: text,
        sentences=text.splitlines,
        story=lambda: "",
        report=lambda: report,
    )
    seen: Any = SimpleNamespace(
        generations=2,
        began_at=100.0,
        lives=lambda generation: [life for life in lives() if life.generation == generation],
        reached=lambda generation: lives()[generation - 1].lines[-1].step,
    )
    return Known(job=job, seen=seen, script=SCRIPT, ended_at=114.0, struck=struck)


def test_what_is_so_may_be_said(tmp_path: Path) -> None:
    check_sentences(known(tmp_path, *CALM))
    check_sentences(known(tmp_path, *STRUCK, struck="killed"))
    check_sentences(known(tmp_path, *STRUCK, "holdfast: rank 1 went on after 2 s at step 24", struck="killed"))


FALSE = {
    "nobody has thought of": "holdfast: rank 1 on n0 makes the others wait: 4 %",
    "by a rank": "[rank 0] holdfast: no snapshots are taken",
    "twice": "holdfast: training: first step after 5.0 s",
    "an incident that nobody caused": STRUCK[-2],
    "an update that nobody asked for": "holdfast: pausing: release 2; ending all ranks",
    "a stop that nobody asked for": "holdfast: ending: stopped by Ctrl-C",
    "an edit that nobody made": "holdfast: n0: nano_gpt.py was edited after release 1 was made; ranks run release 1 "
    "unchanged, from a copy; holdfast update brings the edit",
    "a stall that there was not": "holdfast: no step for 12 s at step 31: all 2 ranks are in forward (nano_gpt.py)",
    "a rank that is not there": "holdfast: rank 7 does not end: its script has returned, for 30 s",
    "losses read elsewhere": "holdfast: loss: read from Trainer.log()",
}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_not_so_may_not_be_said(tmp_path: Path, name: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_sentences(known(tmp_path, *CALM, FALSE[name]))


@pytest.mark.parametrize(
    ("told", "instead"),
    [
        ("2 ranks on", "3 ranks on"),
        ("after 5.0 s", "after 9.0 s"),
        ("incident 1: rank 1", "incident 1: rank 0"),
        ("lost 4 steps", "lost 3 steps"),
        ("SIGKILL (sender unknown) at", "SIGTERM at"),
        ("run directory {run}", "run directory /elsewhere"),
        ("of {proj}", "of {run}"),
    ],
)
def test_a_wrong_fact_in_a_known_sentence_is_seen(tmp_path: Path, told: str, instead: str) -> None:
    lines = [line.replace(told, instead) for line in STRUCK]
    assert lines != list(STRUCK)
    with pytest.raises(AssertionError):
        check_sentences(known(tmp_path, *lines, struck="killed"))


def test_what_must_be_said_is_missed(tmp_path: Path) -> None:
    for left_out in range(len(CALM)):
        with pytest.raises(AssertionError):
            check_sentences(known(tmp_path, *(line for at, line in enumerate(CALM) if at != left_out)))
