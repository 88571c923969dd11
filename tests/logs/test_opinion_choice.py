"""An opinion on a failure: a person's word on one like it comes first, even where no model is asked."""

import io
from pathlib import Path

import pytest

from holdfast.config import Settings, load
from holdfast.logs import user_rows
from holdfast.logs.log_diagnosis import RankLog
from holdfast.logs.opinion_choice import FailureOpinion, find_opinion, read_telling_lines_of
from holdfast.logs.past_cases import PastCase, PastCases
from holdfast.model.last_words_diagnosis import Diagnosis
from tests.logs.model_server import answering, serving

RULES = Diagnosis(
    klass="unknown_child_failure",
    group="unknown",
    action="run_diagnostics",
    confidence=0.3,
    explanation="Nothing shows why.",
    root_rank=1,
)
LINE = "zorb: frame {} of the shard on 10.0.0.{} was torn by an error"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))


def log(number: int) -> list[RankLog]:
    text = f"step 1 loss 2\n{LINE.format(number, number % 200)}\nERROR: kiln {number} is too hot\n".encode()
    return [RankLog(open=lambda: io.BytesIO(text))]


def opinion(
    number: int, rules: Diagnosis = RULES, settings: Settings | None = None, ask: bool = False
) -> FailureOpinion:
    said: list[str] = []
    found = find_opinion(rules, log(number), settings or Settings(), ask=ask, say=said.append)
    assert said == []
    return found


def correct(klass: str, number: int = 1) -> None:
    lines = read_telling_lines_of(log(number))
    assert "10.0.0" not in str(lines)
    PastCases(user_rows.past_cases_path()).keep_case(
        PastCase(lines=lines, klass=klass, said_by="person", at=0.0, note="the kiln")
    )


def test_what_was_corrected_once_is_known_when_it_comes_again() -> None:
    assert opinion(1).said_by == "rules"
    correct("data_corrupt")
    found = opinion(77)
    assert (found.said_by, found.diagnosis.klass, found.diagnosis.group) == ("person", "data_corrupt", "data_storage")
    assert found.diagnosis.confidence == 0.9
    assert "the kiln" in found.diagnosis.explanation
    assert " 77 " in found.diagnosis.evidence[0], "the lines of this failure, not of the one before"
    assert found.diagnosis.root_rank == RULES.root_rank


def test_a_correction_evicts_no_machine() -> None:
    correct("gpu_lost_bus")
    found = opinion(5).diagnosis
    assert (found.klass, found.action) == ("gpu_lost_bus", "run_diagnostics")


def test_a_person_is_believed_before_a_model_is_asked() -> None:
    correct("data_corrupt")
    answer = {"class": "gpu_oom", "evidence": [LINE.format(5, 5)], "confidence": 1}
    with serving(answering(answer)) as model:
        settings = load(None, [("model.url", model.url), ("model.name", "zorb")])
        assert opinion(5, settings=settings, ask=True).diagnosis.klass == "data_corrupt"
    assert model.bodies == []


def test_a_model_hears_of_what_is_only_alike() -> None:
    lines = (*read_telling_lines_of(log(1)), "ERROR: pump burst", "FATAL: valve stuck", "ERROR: nothing to drink left")
    PastCases(user_rows.past_cases_path()).keep_case(
        PastCase(lines=lines, klass="node_failure", said_by="person", at=0.0)
    )
    answer = {"class": "data_corrupt", "evidence": [LINE.format(5, 5)], "confidence": 1}
    with serving(answering(answer)) as model:
        settings = load(None, [("model.url", model.url), ("model.name", "zorb"), ("model.hide_hosts", "false")])
        found = opinion(5, settings=settings, ask=True)
    assert (found.said_by, found.diagnosis.klass) == ("model", "data_corrupt")
    assert "alike, 1x: node_failure" in model.asked()["messages"][1]["content"]


def test_sure_rules_yield_only_to_a_failure_that_is_much_the_same() -> None:
    correct("data_corrupt")
    sure = Diagnosis(klass="gpu_oom", group="framework", action="fix_config", confidence=0.9, explanation="It says so.")
    assert opinion(9, rules=sure).diagnosis.klass == "data_corrupt"
    text = f"{LINE.format(3, 3)}\nERROR: kiln 3 is too hot\nERROR: the pump burst\n".encode()
    near = [RankLog(open=lambda: io.BytesIO(text))]
    for rules, klass in ((RULES, "data_corrupt"), (sure, "gpu_oom")):
        assert find_opinion(rules, near, Settings(), ask=False, say=print).diagnosis.klass == klass


def test_a_damaged_store_costs_a_sentence() -> None:
    user_rows.past_cases_path().write_text("{")
    said: list[str] = []
    assert find_opinion(RULES, log(1), Settings(), ask=False, say=said.append).diagnosis == RULES
    assert len(said) == 1 and "past_cases.json" in said[0]


def test_a_class_that_is_no_longer_known() -> None:
    correct("no_such_class")
    assert opinion(2).diagnosis == RULES
