"""Checks a language model's answers against the failure classes and the log, and lets them vote on a diagnosis."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from json import JSONDecoder
from typing import Any

import msgspec

from holdfast.core.log_analysis.failure_catalog import FailureClass
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.logs.log_digest import ShownLine, plain_line
from holdfast.logs.model_request import SAMPLES, NoAnswer
from holdfast.logs.opinion_action_limit import CAP, TEST, limit_action
from holdfast.model.last_words_diagnosis import Diagnosis

_QUOTE = 12  # characters: a shorter part of a line could stand anywhere
_LINES = 5
_EVIDENCE_CHARS = 400
_WORDS_CHARS = 500
_OBJECTS = 20  # places in an answer where an object may begin that are tried
_NUMBER = re.compile(r"^\s*\d+\|\s?")
_CUT = " ... "


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True, rename={"klass": "class"}):
    klass: str
    group: str = ""
    action: str = ""
    root_rank: int | None = None
    evidence: tuple[str, ...] = ()
    confidence: float = 0.0
    explanation: str = ""
    hint: str = ""
    pattern: str = ""


def parse_answer(text: str) -> ModelAnswer:
    """Return the answer that a model's reply gives as a JSON object. The object may stand alone, in a code fence, or
    after other text. Raise NoAnswer if the reply holds no complete answer."""
    text = text.rpartition("</think>")[2]
    starts = [m.start() for m in re.finditer(r"\{", text)][:_OBJECTS]
    for start in starts:
        tree = _object_at(text, start)
        if tree is None or "class" not in tree:
            continue
        try:
            return msgspec.convert(tree, ModelAnswer, strict=False)
        except (msgspec.ValidationError, UnicodeError) as e:  # JSON may hold half a character
            raise NoAnswer(f"gave a malformed answer: {e}") from None
    raise NoAnswer("gave no answer in JSON" if not starts else "gave an answer without a class, or cut short")


def _object_at(text: str, start: int) -> dict[str, Any] | None:
    try:
        tree, _ = JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


class ModelVote(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the language model that names one of our failure classes and quotes real lines of the log."""

    answer: ModelAnswer
    evidence: tuple[str, ...]  # the very lines
    confidence: float


def check_answer(answer: ModelAnswer, shown: Sequence[ShownLine], classes: Mapping[str, FailureClass]) -> ModelVote:
    """Return the answer as a vote. Raise NoAnswer if its class does not exist, or if the log has none of the lines it
    quotes."""
    if answer.klass not in classes:
        raise NoAnswer(f"named an unknown class: {sanitize_words(answer.klass)[:60]}")
    real = [line for quote in answer.evidence if (line := _find_quote(quote, shown))]
    evidence = tuple(dict.fromkeys(cut_words(line, _EVIDENCE_CHARS) for line in real))[:_LINES]
    if not evidence:
        raise NoAnswer("cites lines that are not in the log")
    trust = 1.0 if len(real) == len(answer.evidence) else 0.5  # who invents one line may have invented more
    return ModelVote(answer=answer, evidence=evidence, confidence=max(0.0, answer.confidence) * trust)


def count_votes(votes: Sequence[ModelVote]) -> ModelVote:
    """Return the most confident of the votes for the class that most votes name. Raise NoAnswer if no class has a
    majority. The confidence of the returned vote is at most CAP times the share of votes that agree."""
    named = Counter(vote.answer.klass for vote in votes)
    klass, count = named.most_common(1)[0]
    if count * 2 <= SAMPLES:
        raise NoAnswer(f"does not agree with itself: of {SAMPLES} answers, it named {_tally_text(named)}")
    agreed = [vote for vote in votes if vote.answer.klass == klass]
    confidence = min(CAP * count / SAMPLES, max(vote.confidence for vote in agreed))
    best = max(agreed, key=lambda vote: vote.confidence)
    return msgspec.structs.replace(best, confidence=round(confidence, 2))


def _tally_text(named: Counter[str]) -> str:
    tally = sorted(named.items(), key=lambda vote: (-vote[1], vote[0]))  # votes come in any order
    return ", ".join(f"{klass} {count} time{'s' if count > 1 else ''}" for klass, count in tally)


def apply_vote(vote: ModelVote, rules: Diagnosis, klass: FailureClass) -> Diagnosis:
    """Return the diagnosis that follows from the majority's vote. Raise NoAnswer if the vote contradicts the class of
    the rules and is no surer than the rules. The model can name and explain a cause, but its answer alone never evicts
    a machine."""
    answer = vote.answer
    explanation = f"A language model thinks: {sanitize_words(answer.explanation) or klass.title}"
    if klass.klass == rules.klass:
        return msgspec.structs.replace(
            rules, confidence=max(rules.confidence, vote.confidence), explanation=f"{rules.explanation} {explanation}"
        )
    if vote.confidence <= rules.confidence:
        raise NoAnswer(f"suggests {klass.klass}, but is no surer ({vote.confidence:g}) than the rules")
    return Diagnosis(
        klass=klass.klass,
        group=klass.group,
        action=TEST if answer.action == TEST else limit_action(klass.action),
        confidence=vote.confidence,
        explanation=explanation,
        evidence=vote.evidence,
        root_rank=_proven_rank(answer.root_rank, vote.evidence, rules),
        title=klass.title,
        hint=sanitize_words(answer.hint) or klass.hint,
        origin=rules.origin,
        echoes=rules.echoes,
        node=rules.node,
    )


def sanitize_words(text: str) -> str:
    """Return a model's text made safe for a terminal and a journal: one line, no controls, limited length."""
    words = " ".join(plain_line(text.replace("\n", " ")).split())
    return words if len(words) <= _WORDS_CHARS else words[:_WORDS_CHARS] + "..."


def _find_quote(quote: str, shown: Sequence[ShownLine]) -> str | None:
    """Return the log line that equals or contains the quote; None if no line does or the quote is too short."""
    wanted = " ".join(_NUMBER.sub("", quote).split())
    for line in shown:
        text = " ".join(line.text.split())
        whole = text == wanted and text
        part = len(wanted) >= _QUOTE and wanted in text
        head = _CUT in wanted and len(wanted) >= _QUOTE and all(p in line.text for p in wanted.split(_CUT))
        if whole or part or head:
            return line.raw
    return None


def _proven_rank(rank: int | None, evidence: Sequence[str], rules: Diagnosis) -> int | None:
    """Return the rank named by the model if the evidence names it too; otherwise the rank found by the rules."""
    named = re.compile(rf"(?i:rank)[\s_:=\[(#-]{{0,3}}0*{rank}\b|\[{rank}\]|^\s*{rank}:") if rank is not None else None
    return rank if named and any(named.search(line) for line in evidence) else rules.root_rank
