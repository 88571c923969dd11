"""Gathers opinions on failures in a separate process while the job goes on; people see them, nothing acts on them."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.config import Settings
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.incident_text import describe_cause
from holdfast.core.log_analysis.failure_catalog import UNKNOWN
from holdfast.core.record.opinion_requests import FailureOutcome, FailureQuestions, JudgedIncident
from holdfast.logs import opinion_process
from holdfast.logs.opinion_action_limit import TEST, limit_action
from holdfast.logs.opinion_process import OpinionReply, OpinionRequest, OutcomeRequest
from holdfast.logs.secret_masking import Masker, last_bytes
from holdfast.logs.user_rows import past_cases_path
from holdfast.model.detector_alarm import OPINION, Alarm, Kind, Stance
from holdfast.model.journal_entry import Entry
from holdfast.model.last_words_diagnosis import Diagnosis

_READ_S = 30.0  # for reading logs, beside the time that the model has
_WORDS = 300  # characters of what the process said that are logged when it failed
_TAIL = 1 << 16  # bytes of it that are masked before they are cut
_log = logging.getLogger("holdfast.controller")


class FailureOpinions:
    """Asks for an opinion on one failure at a time, in a separate process with a deadline. Without a `model.url` and
    without past failures to compare with, it asks for none."""

    def __init__(self, settings: Settings, log_dir: str, say: Callable[[str], None], mask: Masker) -> None:
        self._settings = settings
        self._log_dir = log_dir
        self._say = say
        self._mask = mask
        self._questions = FailureQuestions(below=settings.model.below, has_model=bool(settings.model.url))
        self._waiting: asyncio.Queue[JudgedIncident | FailureOutcome] = asyncio.Queue()
        self._unanswered = 0  # questions
        self._kept: dict[int, str] = {}  # by incident: the id of its past failure, until the incident is over

    def on_entry(self, entry: Entry, view: JobView) -> None:
        judged, has_past = None, False
        if view.cause is not None and view.verdict is not None:
            judged = JudgedIncident(number=view.open_incident, cause=view.cause, verdict=view.verdict)
            has_past = past_cases_path().exists()
        if found := self._questions.on_entry(entry, judged, has_past=has_past):
            self._waiting.put_nowait(found)
            self._unanswered += isinstance(found, JudgedIncident)

    async def run(self, announce: Callable[[Alarm], None]) -> None:
        """Ask for opinions and announce them, one failure after another, until cancelled."""
        while True:
            match await self._waiting.get():
                case JudgedIncident() as judged:
                    await self._ask_about(judged, announce)
                case FailureOutcome(incident=incident, text=text):
                    if id := self._kept.pop(incident, ""):
                        await self._call_process(OutcomeRequest(id=id, outcome=text))

    def finish_up(self) -> None:
        """Say, at the job's end, if the language model's answer is still missing."""
        if self._unanswered and self._settings.model.url:
            self._say("the job ended before the language model answered; holdfast diagnose --ask asks it again")

    async def _ask_about(self, judged: JudgedIncident, announce: Callable[[Alarm], None]) -> None:
        reply = await self._call_process(self._make_request(judged))
        self._unanswered -= 1
        for sentence in reply.said:
            self._say(f"about incident {judged.number}: {sentence}")
        self._kept[judged.number] = reply.id
        if reply.opinion and reply.opinion.said_by != "rules":
            announce(self._mask.mask_alarm(make_alarm(judged, reply.opinion.diagnosis)))  # it quotes the log as it is

    def _make_request(self, judged: JudgedIncident) -> OpinionRequest:
        cause = judged.cause
        return OpinionRequest(
            settings=self._settings,
            rules=make_diagnosis(cause),
            folder=str(Path(self._log_dir) / f"gen-{cause.generation}"),
            ranks=cause.ranks,
            last_lines=cause.evidence,
            at=cause.at,
            outcome=f"{judged.verdict.remedy} was tried",
        )

    async def _call_process(self, request: OpinionRequest | OutcomeRequest) -> OpinionReply:
        """Run the opinion process and return its reply. After a failure or timeout, return a reply with the reason."""
        deadline_s = self._settings.model.timeout_s + _READ_S
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", opinion_process.__name__, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as e:
            return OpinionReply(said=(f"there is no opinion: {e}",))
        try:
            async with asyncio.timeout(deadline_s):
                answer, words = await process.communicate(msgspec.json.encode(request))
        except TimeoutError:
            return OpinionReply(said=(f"there is no opinion within {deadline_s:g} s",))
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            return opinion_process.to_reply(answer)
        except msgspec.DecodeError:
            said = self._mask.mask_end(last_bytes(words, _TAIL).decode("utf-8", "replace"), _WORDS)
            _log.warning("the opinion process failed: %s", said)
            return OpinionReply(said=("there is no opinion: its process failed, and the controller's log says why",))


def make_diagnosis(cause: Alarm) -> Diagnosis:
    """Return what an alarm says of a failure, in the form of a Diagnosis."""
    return Diagnosis(
        klass=cause.klass or UNKNOWN,
        group=cause.group or "unknown",
        action=cause.action or TEST,
        confidence=cause.confidence,
        explanation=f"{describe_cause(cause)}.",
        evidence=cause.evidence,
        root_rank=cause.ranks[0] if cause.ranks else None,
        hint=cause.hint,
        node=cause.suspects[0] if cause.suspects else "",
    )


def make_alarm(judged: JudgedIncident, found: Diagnosis) -> Alarm:
    """Return an opinion as an alarm that leads only to a message. The alarm names neither nodes nor ranks, so it is no
    evidence against them."""
    named = f"{found.klass} ({found.title}, {found.confidence:.0%} sure)"
    return Alarm(
        kind=Kind.LINES,
        stance=Stance.NOTIFY,
        signature=OPINION,
        at=judged.cause.at,
        generation=judged.cause.generation,
        suspects=(),
        reason=f"opinion on incident {judged.number}: {named}. {found.explanation}",
        klass=found.klass,
        group=found.group,
        action=limit_action(found.action),
        confidence=found.confidence,
        hint=found.hint,
        evidence=found.evidence,
    )
