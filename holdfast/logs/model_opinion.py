"""Asks a language model for a second opinion when the rules are unsure; without a better answer the rules stand."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from holdfast.config import ConfigError, Settings
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureClass
from holdfast.logs import catalog_files, model_answer, user_rows
from holdfast.logs.log_digest import ShownLine, digest_log
from holdfast.logs.model_question import make_question
from holdfast.logs.model_request import SAMPLES, NoAnswer, ask_model
from holdfast.logs.opinion_action_limit import limit_action
from holdfast.logs.past_cases import NearCase
from holdfast.logs.secret_masking import make_masker
from holdfast.model.last_words_diagnosis import Diagnosis

_WEIGHT = 4  # of a proposed row: too little to send a machine away, unless a person makes it more


def is_wanted(diagnosis: Diagnosis, settings: Settings) -> bool:
    return bool(settings.model.url) and diagnosis.confidence < settings.model.below


def ask_second_opinion(
    diagnosis: Diagnosis,
    lines: Iterable[bytes | str],
    settings: Settings,
    *,
    near: Sequence[NearCase] = (),
    say: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Return the given diagnosis, or a better one from the language model; errors go to `say` and are not raised.
    `lines` is read only if the model is asked; strings are whole lines, bytes may be cut anywhere. `near` are past
    failures to tell the model about. Blocks for up to `model.timeout_s`, so call this in a thread."""
    if not is_wanted(diagnosis, settings):
        return diagnosis
    say = say or (lambda sentence: print(sentence, file=sys.stderr))
    try:
        found, row = _ask_model(diagnosis, lines, settings, near)
    except NoAnswer as e:
        say(f"the language model {e}; the rules' diagnosis stands")
        return diagnosis
    if row is not None:
        _propose_row(row, settings, say)
    return found


def _ask_model(
    rules: Diagnosis, lines: Iterable[bytes | str], settings: Settings, near: Sequence[NearCase]
) -> tuple[Diagnosis, CatalogRow | None]:
    limits = settings.model
    key = os.environ.get(limits.key_env, "") if limits.key_env else ""
    if limits.key_env and not key:
        raise NoAnswer(f"is not asked: {limits.key_env}, which model.key_env names, is not set")
    mask = make_masker(hosts=limits.hide_hosts, known=[key])
    try:
        return _take_opinion(rules, lines, settings, near, key=key, mask=mask)
    except NoAnswer as e:
        raise NoAnswer(mask(str(e))) from None  # a server may quote the key


def _take_opinion(
    rules: Diagnosis,
    lines: Iterable[bytes | str],
    settings: Settings,
    near: Sequence[NearCase],
    *,
    key: str,
    mask: Callable[[str], str],
) -> tuple[Diagnosis, CatalogRow | None]:
    limits = settings.model
    log = digest_log(lines, budget=limits.chars, mask=mask)
    masked = msgspec.structs.replace(rules, explanation=mask(rules.explanation))
    classes = {klass.klass: klass for klass in catalog_files.load_classes()}
    question = make_question(log.format_text(), masked, classes.values(), near)
    vote = _take_vote(ask_model(question, limits, key), log.shown, classes)
    found = model_answer.apply_vote(vote, rules, classes[vote.answer.klass])
    return found, _proposed_row(vote, classes[vote.answer.klass], mask, limits.name)


def _take_vote(
    replies: Iterable[str | NoAnswer], shown: Sequence[ShownLine], classes: Mapping[str, FailureClass]
) -> model_answer.ModelVote:
    """Return the majority's vote; raise NoAnswer if there is no majority or too many samples are unusable."""
    votes: list[model_answer.ModelVote] = []
    unusable: list[NoAnswer] = []
    for reply in replies:
        try:
            if isinstance(reply, NoAnswer):
                raise reply
            votes.append(model_answer.check_answer(model_answer.parse_answer(reply), shown, classes))
        except NoAnswer as e:
            unusable.append(e)
    if unusable and len(votes) * 2 <= SAMPLES:
        raise unusable[0]
    return model_answer.count_votes(votes)


def _proposed_row(
    vote: model_answer.ModelVote, klass: FailureClass, mask: Callable[[str], str], model: str
) -> CatalogRow | None:
    """Return the catalog row that the language model proposes; None if it proposes none. The row's sample is a masked
    log line, because users share catalogs. The row never evicts a machine: its weight is small, and run_diagnostics
    replaces an evicting action."""
    if not vote.answer.pattern:
        return None
    return CatalogRow(
        klass=klass.klass,
        pattern=vote.answer.pattern,
        weight=_WEIGHT,
        action=limited if (limited := limit_action(klass.action)) != klass.action else "",
        sample=mask(vote.evidence[0]),
        source=f"proposed by the language model {model}",
        hint=model_answer.sanitize_words(vote.answer.hint),
    )


def _propose_row(row: CatalogRow, settings: Settings, say: Callable[[str], None]) -> None:
    path = user_rows.user_rows_path(settings.words)
    try:
        known = catalog_files.load_failures(settings.words)
        if next(user_rows.find_faults([row], known), ""):
            return  # most are too narrow or too wide: nothing to bother a person with
        name = user_rows.propose_row(row, path)
    except ConfigError:
        return
    say(f"the language model proposes a row for the catalog; review it and accept it: holdfast catalog add {name}")
