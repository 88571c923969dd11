"""A running job asks others about a failure that the rules are unsure of, and waits for nobody."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.config import WordLimits
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.logs import user_rows
from holdfast.logs.past_cases import PastCases
from holdfast.model.detector_alarm import OPINION, Alarm, Stance
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN, Job
from tests.logs.model_server import answering, dripping, serving

pytestmark = pytest.mark.e2e

KEY = "k3y-of-the-model-server"
CAUSE = "zorblax 17 went out of phase with its fabric"
ANSWER: dict[str, Any] = {
    "class": "gpu_lost_bus",
    "action": "evict_and_restart",
    "evidence": [CAUSE],
    "confidence": 1,
    "explanation": "The fabric of a node is gone.",
    "pattern": r"zorblax \d{1,4} went out of phase",
}
# Its first life ends with words that no rule knows.
FAILS = TRAIN.replace(
    "while not",
    f"""
if not os.path.exists(f"{{folder}}/failed"):
    open(f"{{folder}}/failed", "w").close()
    holdfast.step(1, loss=1.0)
    print({CAUSE!r}, "password=hunter2", file=sys.stderr, flush=True)
    os._exit(3)
while not""",
)


def opinions(job: Job) -> list[Alarm]:
    with contextlib.closing(SqliteJournal(job.run_dir / "journal.db", read_only=True)) as journal:
        events = [entry.event for entry in journal.read()]
    return [event for event in events if isinstance(event, Alarm) and event.signature == OPINION]


def test_an_opinion_is_told_and_evicts_nobody(start: Start, tmp_path: Path) -> None:
    with serving(answering(ANSWER)) as model:
        asked = (
            "--set",
            f"model.url={model.url}",
            "--set",
            "model.name=zorb",
            "--set",
            "model.key_env=HOLDFAST_KEY",
        )
        job = start("--nnodes", "1", *asked, script=FAILS, HOLDFAST_KEY=KEY)
        said = job.says("opinion on incident 1")
        assert "gpu_lost_bus" in said
        proposed = job.says("holdfast catalog add p")
        job.trains(generation=2)
        store = PastCases(user_rows.past_cases_path())
        [case] = job.until(lambda: [c for c in store.read_all() if "training went on" in c.outcome], "the outcome")
        job.finish()
        job.ends(0)
    assert {head["Authorization"] for head in model.heads} == {f"Bearer {KEY}"}
    assert "hunter2" not in model.heard
    assert (case.klass, case.said_by, case.outcome) == ("gpu_lost_bus", "model", "restart, and training went on")
    assert CAUSE in str(case.lines) and "hunter2" not in str(case.lines)
    [opinion] = opinions(job)
    assert (opinion.stance, opinion.action, opinion.confidence) == (Stance.NOTIFY, "run_diagnostics", 0.6)
    assert (opinion.suspects, opinion.ranks) == ((), ())
    assert job.report().opinions == (opinion.reason,)
    assert job.check_replay()
    file = user_rows.list_proposals(user_rows.user_rows_path(WordLimits()))[proposed.split()[-1]]
    assert [row.action for row in user_rows.read_user_rows(file)] == ["run_diagnostics"]


@pytest.mark.slow
def test_no_recovery_waits_for_a_slow_model(start: Start) -> None:
    with serving(dripping(60)) as model:
        asked = ("--set", f"model.url={model.url}", "--set", "model.name=zorb", "--set", "model.timeout_s=50")
        job = start("--nnodes", "1", *asked, script=FAILS)
        job.trains(generation=2)
        job.until(lambda: model.bodies, "the question")
        assert not opinions(job)
        job.finish()
        job.ends(0)
    assert job.says("the job ended before the language model answered")


def test_what_a_person_corrected_is_known_without_a_model(start: Start, tmp_path: Path) -> None:
    log, note = tmp_path / "earlier.log", "the fabric of rack 7"
    log.write_text(f"{CAUSE.replace('17', '4')} password=x\n")
    assert main(["catalog", "correct", "node_failure", str(log), "--note", note]) == 0
    job = start("--nnodes", "1", script=FAILS)
    said = job.says("opinion on incident 1")
    assert "node_failure" in said and note in said
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_nobody_is_asked_without_an_endpoint_or_a_past(start: Start, tmp_path: Path) -> None:
    job = start("--nnodes", "1", script=FAILS)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert not opinions(job)
    assert not user_rows.past_cases_path().exists()
