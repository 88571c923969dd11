"""An opinion becomes an alarm that can only be told."""

from pathlib import Path

import msgspec
import pytest

from holdfast.config import Settings
from holdfast.controller.failure_opinions import FailureOpinions, make_alarm, make_diagnosis
from holdfast.core.record.opinion_requests import JudgedIncident
from holdfast.logs.opinion_choice import FailureOpinion
from holdfast.logs.opinion_process import OpinionReply
from holdfast.logs.secret_masking import Masker
from holdfast.model.detector_alarm import OPINION, Alarm, Kind, Stance
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.last_words_diagnosis import Diagnosis

CAUSE = Alarm(kind=Kind.CRASH, at=7.0, suspects=("n1",), ranks=(3,), code=1, reason="exited with code 1", generation=2)
JUDGED = JudgedIncident(number=4, cause=CAUSE, verdict=Verdict(remedy=Remedy.RESTART, reason=""))
SURE = Diagnosis(
    klass="gpu_lost_bus",
    group="infrastructure",
    action="evict_and_restart",
    confidence=0.99,
    explanation="A person said so.",
    root_rank=3,
    node="n1",
)


def test_an_opinion_names_nobody_and_evicts_nobody_whatever_it_says() -> None:
    alarm = make_alarm(JUDGED, SURE)
    assert (alarm.stance, alarm.action, alarm.signature) == (Stance.NOTIFY, "run_diagnostics", OPINION)
    assert (alarm.suspects, alarm.ranks, alarm.hard, alarm.code) == ((), (), False, None)
    assert "incident 4" in alarm.reason and "gpu_lost_bus" in alarm.reason


async def test_what_an_opinion_quotes_of_a_log_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quoted = msgspec.structs.replace(SURE, evidence=("login with password=hunter2", "by correct-horse-battery"))
    opinion = FailureOpinion(diagnosis=quoted, said_by="model", lines=())

    async def answer(*_: object) -> OpinionReply:
        return OpinionReply(opinion=opinion)

    monkeypatch.setattr(FailureOpinions, "_call_process", answer)
    mask = Masker(hosts=False, known=["correct-horse-battery"])
    found: list[Alarm] = []
    await FailureOpinions(Settings(), str(tmp_path), lambda _: None, mask)._ask_about(JUDGED, found.append)
    assert [alarm.evidence for alarm in found] == [("login with password=<secret>", "by <secret>")]


def test_a_cause_without_a_class_is_unknown() -> None:
    found = make_diagnosis(CAUSE)
    assert (found.klass, found.confidence, found.root_rank, found.node) == ("unknown_child_failure", 0.0, 3, "n1")
    known = msgspec.structs.replace(CAUSE, klass="gpu_oom", group="framework", action="fix_config", confidence=0.5)
    assert make_diagnosis(known).klass == "gpu_oom"
