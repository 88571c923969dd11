"""Finds an opinion on a failure: what a person said about a similar one, or else a language model's answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from holdfast.config import ConfigError, Settings
from holdfast.core.log_analysis.failure_catalog import FailureClass
from holdfast.logs import catalog_files
from holdfast.logs.failure_likeness import find_telling_lines
from holdfast.logs.log_diagnosis import RankLog, read_ends, read_whole
from holdfast.logs.opinion_action_limit import limit_action
from holdfast.logs.past_cases import NearCase, PastCases
from holdfast.logs.secret_masking import make_masker
from holdfast.logs.user_rows import past_cases_path
from holdfast.model.last_words_diagnosis import Diagnosis

ALIKE = 0.6  # a failure this like a corrected one is taken for the same
SURELY_ALIKE = 0.8  # where the rules are sure of something else
_TRUST = 0.9  # in a correction of the very same lines: it may have been wrong
_EVIDENCE = 5  # lines


class FailureOpinion(msgspec.Struct, frozen=True, kw_only=True):
    diagnosis: Diagnosis
    said_by: Literal["rules", "model", "person"]  # rules: there is no other opinion
    lines: tuple[str, ...]  # by which the failure is known again


def find_opinion(
    rules: Diagnosis, logs: Sequence[RankLog], settings: Settings, *, ask: bool, say: Callable[[str], None]
) -> FailureOpinion:
    """Return an opinion on the failure that these logs show. What a person said of a similar failure comes first.
    Otherwise a language model is asked, but only with `ask` and if the rules are unsure. The last resort is the
    diagnosis by the rules. Errors are reported to `say`. OSError is raised only if a log cannot be read."""
    lines = read_telling_lines_of(logs)
    near = _recall_nearest(lines, say)
    classes = {klass.klass: klass for klass in catalog_files.load_classes()}
    sure = rules.confidence >= settings.model.below
    if corrected := apply_correction(rules, lines, near, classes, sure=sure):
        return FailureOpinion(diagnosis=corrected, said_by="person", lines=lines)
    if not ask or sure or not settings.model.url:
        return FailureOpinion(diagnosis=rules, said_by="rules", lines=lines)
    from holdfast.logs.model_opinion import ask_second_opinion  # and HTTP with it, for which nobody else has to wait

    found = ask_second_opinion(rules, read_whole(logs), settings, near=near, say=say)
    return FailureOpinion(diagnosis=found, said_by="rules" if found == rules else "model", lines=lines)


def read_telling_lines_of(logs: Sequence[RankLog]) -> tuple[str, ...]:
    """Return the lines at the ends of these logs that identify the failure, with secrets masked."""
    return find_telling_lines(read_ends(logs), make_masker(hosts=True))


def _recall_nearest(lines: Sequence[str], say: Callable[[str], None]) -> tuple[NearCase, ...]:
    try:
        return PastCases(past_cases_path()).find_nearest(lines)
    except ConfigError as e:
        say(f"past failures are not compared: {e}")
        return ()


def apply_correction(
    rules: Diagnosis,
    lines: Sequence[str],
    near: Sequence[NearCase],
    classes: Mapping[str, FailureClass],
    *,
    sure: bool,
) -> Diagnosis | None:
    """Return a diagnosis with the failure class that a person gave to a similar past failure. If the class calls for an
    eviction, the diagnosis calls for diagnostics instead. Return None if no such failure is similar enough, or if the
    rules name the same class. Similarity must be greater if the rules are `sure`."""
    best = next((one for one in near if one.case.said_by == "person"), None)
    if best is None or best.likeness < (SURELY_ALIKE if sure else ALIKE) or best.case.klass == rules.klass:
        return None
    klass = classes.get(best.case.klass)
    if klass is None:  # of another version's taxonomy
        return None
    note = f" ({best.case.note})" if best.case.note else ""
    return msgspec.structs.replace(
        rules,
        klass=klass.klass,
        group=klass.group,
        action=limit_action(klass.action),
        confidence=round(_TRUST * best.likeness, 2),
        explanation=f"A person said {klass.klass}{note} of a failure that is {best.likeness:.0%} like this one.",
        evidence=tuple(lines[:_EVIDENCE]),
        title=klass.title,
        hint=klass.hint,
    )
