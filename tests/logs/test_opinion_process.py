"""The process that finds opinions: it reads what there is, keeps the failure, and has a sentence for all that fails."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.config import Settings, load
from holdfast.logs import opinion_process, user_rows
from holdfast.logs.opinion_process import OpinionReply, OpinionRequest, OutcomeRequest
from holdfast.logs.past_cases import PastCase, PastCases
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.logs.model_server import answering, sending, serving

CAUSE = "zorblax 17 went out of phase with its fabric"
RULES = Diagnosis(
    klass="unknown_child_failure",
    group="unknown",
    action="run_diagnostics",
    confidence=0.0,
    explanation="It is unknown.",
)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))


def request(url: str = "", folder: Path | None = None) -> OpinionRequest:
    settings = (
        load(None, [("model.url", url), ("model.name", "zorb"), ("model.timeout_s", "20")]) if url else Settings()
    )
    return OpinionRequest(
        settings=settings,
        rules=RULES,
        folder=str(folder or "/nowhere"),
        ranks=(3,),
        last_lines=(CAUSE,),
        at=5.0,
        outcome="restart was tried",
    )


@pytest.mark.e2e
def test_it_answers_over_pipes() -> None:
    with serving(answering({"class": "node_failure", "evidence": [CAUSE], "confidence": 1})) as model:
        asked = msgspec.json.encode(request(model.url))
        command = [sys.executable, "-m", "holdfast.logs.opinion_process", str(os.getpid())]
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=True)
    reply = opinion_process.to_reply(done.stdout)
    assert reply.opinion is not None
    assert (reply.opinion.said_by, reply.opinion.diagnosis.klass) == ("model", "node_failure")
    store = PastCases(user_rows.past_cases_path())
    assert [case.id for case in store.read_all()] == [reply.id]
    assert opinion_process.answer_request(OutcomeRequest(id=reply.id, outcome="it helped")) == OpinionReply()
    assert [case.outcome for case in store.read_all()] == ["it helped"]
    assert opinion_process.answer_request(OutcomeRequest(id="f0", outcome="who?")) == OpinionReply()


def test_it_reads_the_end_of_what_the_failed_rank_wrote(tmp_path: Path) -> None:
    for rank in range(80):
        where = tmp_path / "gen-1" / f"rank-{rank}"
        where.mkdir(parents=True)
        text = f"error in part {rank}\n" if rank != 79 else "x" * (2 << 20) + f"\n{CAUSE}\n"
        (where / "stderr.log").write_text(text)
    asked = msgspec.structs.replace(request(folder=tmp_path / "gen-1"), ranks=(79,), last_lines=())
    reply = opinion_process.answer_request(asked)
    assert reply.opinion is not None and CAUSE in str(reply.opinion.lines)


@pytest.mark.timeout(20)
def test_it_waits_for_no_pipe_in_place_of_a_log(tmp_path: Path) -> None:
    folder = tmp_path / "gen-1" / "rank-3"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text(f"error: {CAUSE}\n")
    os.mkfifo(folder / "stderr.log")
    asked = msgspec.structs.replace(request(folder=tmp_path / "gen-1"), last_lines=())
    reply = opinion_process.answer_request(asked)
    assert reply.opinion is not None and CAUSE in str(reply.opinion.lines)


def test_a_model_that_does_not_help_costs_a_sentence() -> None:
    with serving(sending(500)) as model:
        reply = opinion_process.answer_request(request(model.url))
    assert len(reply.said) == 1 and "HTTP 500" in reply.said[0]
    assert reply.opinion is not None and reply.opinion.said_by == "rules"
    [case] = PastCases(user_rows.past_cases_path()).read_all()
    assert (case.klass, case.said_by, case.outcome) == ("unknown_child_failure", "rules", "restart was tried")


def test_a_store_that_cannot_be_written_costs_a_sentence_and_not_the_opinion() -> None:
    user_rows.past_cases_path().mkdir()
    with serving(answering({"class": "node_failure", "evidence": [CAUSE], "confidence": 1})) as model:
        reply = opinion_process.answer_request(request(model.url))
    assert reply.opinion is not None and reply.opinion.diagnosis.klass == "node_failure"
    assert reply.id == "" and len(reply.said) == 2
    assert all("past_cases.json" in sentence for sentence in reply.said)


def test_what_the_rules_know_is_compared_but_not_kept() -> None:
    store = PastCases(user_rows.past_cases_path())
    sure = msgspec.structs.replace(request(), rules=msgspec.structs.replace(RULES, klass="gpu_oom", confidence=0.9))
    assert opinion_process.answer_request(sure).id == ""
    assert store.read_all() == ()
    store.keep_case(PastCase(lines=(CAUSE,), klass="node_failure", said_by="person", at=0.0))
    reply = opinion_process.answer_request(sure)
    assert reply.opinion is not None and (reply.opinion.said_by, reply.opinion.diagnosis.klass) == (
        "person",
        "node_failure",
    )
    [case] = store.read_all()
    assert (case.klass, case.said_by, case.times, case.outcome) == ("node_failure", "person", 2, "restart was tried")
