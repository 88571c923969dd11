"""Weighs the rules' diagnosis of a failure against the words of its log, by weights learned from labelled logs."""

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.log_analysis.failure_catalog import FailureCatalog, FailureClass
from holdfast.core.log_analysis.line_prefixes import LogLine
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.logs.learned_words import NOTHING, LearnedWords, read_log_words, weigh_rules
from holdfast.logs.opinion_action_limit import limit_action
from holdfast.model.last_words_diagnosis import Diagnosis

_LEAST = 0.2  # where the rules find nothing, words that are less sure find nothing either
_OVERRULES = 0.3  # words that are less sure do not speak against a rule
_SPECIFIC, _OVERRULES_SPECIFIC = 0.9, 0.7  # nor, if they are not much surer than that, against one that is so sure
_MOST = 0.98
OOM_KILL, _GUESSED = "host_oom_kill", 0.5  # only the kernel, or scarce memory, tells who sent a SIGKILL
_EVIDENCE = 3
_EVIDENCE_CHARS = 400
_EVICT = "evict_and_restart"
_PROVEN = 0.95  # rules that are so sure of a bad machine have proof of it
_DOUBTED = 0.15  # an eviction that words make less likely than this is probed first


def weigh_words(
    rules: Diagnosis, lines: Sequence[LogLine], code: int | None, catalog: FailureCatalog, learned: LearnedWords
) -> Diagnosis:
    """Return the rules' diagnosis with its confidence adjusted by learned words. If the words outweigh the rules,
    return another class. A diagnosis from the user's own rows is returned unchanged. A diagnosis that evicts a machine
    keeps its class, but the words may ask for probes before the eviction. Words never evict. That a process was killed
    for want of memory they only guess."""
    words = read_log_words(lines, code)
    odds = learned.class_odds(words)
    if not odds or _is_users(rules, catalog):
        return rules
    if rules.action == _EVICT:
        return _doubt_eviction(rules, learned.action_odds(words))
    if rules.confidence:
        odds = weigh_rules(odds, rules.klass, rules.confidence, learned.trust)
    klass = max(odds, key=lambda one: odds[one])
    most = _GUESSED if klass == OOM_KILL != rules.klass else _MOST
    sure = round(min(odds[klass], most), 2)
    if klass == rules.klass and rules.confidence:
        return msgspec.structs.replace(rules, confidence=min(sure, rules.most_sure))
    if klass == NOTHING or klass not in catalog.classes or sure < _least_share(rules):
        return rules
    return _retell(rules, catalog.classes[klass], sure, _find_evidence(lines, klass, learned))


def _least_share(rules: Diagnosis) -> float:
    """Return the share of belief below which words do not change what these rules say. Rules that may not be surer
    than they are know what they do not know, as who sent a SIGKILL: words that are less sure have nothing to add."""
    if rules.confidence >= _SPECIFIC:
        return _OVERRULES_SPECIFIC
    least = rules.confidence if rules.most_sure < 1.0 else 0.0
    return max(_OVERRULES, least) if rules.confidence else _LEAST


def _doubt_eviction(rules: Diagnosis, odds: Mapping[str, float]) -> Diagnosis:
    """Return the rules' diagnosis, with probes instead of an eviction if the eviction is doubtful. It is doubtful if
    the rules have no proof and logs with the same words are seldom from a bad machine."""
    if rules.confidence >= _PROVEN or odds.get(_EVICT, 1.0) >= _DOUBTED:
        return rules
    told = f"{rules.explanation} But logs of such words are seldom of a bad machine: probe it first."
    return msgspec.structs.replace(rules, action=limit_action(rules.action), explanation=told)


def _is_users(rules: Diagnosis, catalog: FailureCatalog) -> bool:
    return bool(catalog.more) and any(
        row in catalog.more for line in rules.evidence for row in catalog.match_line(line)
    )


def _find_evidence(lines: Sequence[LogLine], klass: str, learned: LearnedWords) -> list[LogLine]:
    """Return the lines whose words weigh most towards a class."""
    texts = {said.text: said for said in reversed(lines) if not said.code}
    worth = {text: learned.weigh_line(text[:_EVIDENCE_CHARS], klass) for text in list(texts)[:_EVIDENCE_CHARS]}
    best = sorted((text for text in worth if worth[text] > 0), key=lambda text: -worth[text])[:_EVIDENCE]
    return [texts[text] for text in best]


def _retell(rules: Diagnosis, klass: FailureClass, sure: float, said: Sequence[LogLine]) -> Diagnosis:
    less = f"The rules would say {rules.klass}." if rules.confidence else "No rule knows it."
    ranks = [rules.root_rank, *(one.rank for one in said)]
    return msgspec.structs.replace(
        rules,
        klass=klass.klass,
        group=klass.group,
        action=limit_action(klass.action),
        confidence=sure,
        most_sure=1.0,
        explanation=f"{klass.title}, by the words of the whole log, which are like those of such failures. {less}",
        evidence=tuple(cut_words(one.raw, _EVIDENCE_CHARS) for one in said) or rules.evidence,
        root_rank=next((rank for rank in ranks if rank is not None), None),
        title=klass.title,
        hint=klass.hint,
        fault_known=True,
        peer="",
    )
