"""Asks a language model for a second opinion when the rules are unsure; without a better answer the rules stand."""

import os
import socket
import sys
from collections.abc import Callable, Iterable

import msgspec

from holdfast.config import ConfigError, Settings
from holdfast.core.log_analysis.failure_catalog import CatalogRow
from holdfast.logs import catalog_files, model_answer, user_rows
from holdfast.logs.log_digest import digest_log
from holdfast.logs.model_question import make_question
from holdfast.logs.model_request import NoAnswer, ask_model
from holdfast.logs.secret_masking import Masker, env_secrets
from holdfast.model.diagnosis import Diagnosis

_WEIGHT = 4  # of a proposed row: too little to send a machine away, unless a person makes it more


def is_wanted(diagnosis: Diagnosis, settings: Settings) -> bool:
    return bool(settings.model.url) and diagnosis.confidence < settings.model.below


def ask_second_opinion(
    diagnosis: Diagnosis, lines: Iterable[bytes | str], settings: Settings, *, say: Callable[[str], None] | None = None
) -> Diagnosis:
    """Return the given diagnosis, or a better one from the language model. `lines` is read only if the model is asked;
    strings are whole lines, bytes may be cut anywhere. Blocks for up to `model.timeout_s`, so call this in a thread.
    Failures go to `say` and are not raised."""
    if not is_wanted(diagnosis, settings):
        return diagnosis
    say = say or (lambda sentence: print(sentence, file=sys.stderr))
    try:
        found, row = _ask_model(diagnosis, lines, settings)
    except NoAnswer as e:
        say(f"the language model {e}; the rules' diagnosis stands")
        return diagnosis
    if row is not None:
        _propose_row(row, settings, say)
    return found


def _ask_model(
    rules: Diagnosis, lines: Iterable[bytes | str], settings: Settings
) -> tuple[Diagnosis, CatalogRow | None]:
    limits = settings.model
    key = os.environ.get(limits.key_env, "") if limits.key_env else ""
    if limits.key_env and not key:
        raise NoAnswer(f"is not asked: {limits.key_env}, which model.key_env names, is not set")
    mask = Masker(hosts=limits.hide_hosts, known=[*env_secrets(os.environ), key], names=_host_names())
    log = digest_log(lines, budget=limits.chars, mask=mask)
    masked = msgspec.structs.replace(rules, explanation=mask(rules.explanation))
    classes = {klass.klass: klass for klass in catalog_files.load_classes()}
    told = model_answer.parse_answer(ask_model(make_question(log.format_text(), masked, classes.values()), limits, key))
    found = model_answer.check_answer(told, rules, log.shown, classes)
    return found, _proposed_row(told, [mask(line) for line in found.evidence], limits.name)


def _host_names() -> list[str]:
    name = socket.gethostname()
    return [name] if len(name) > 3 and name != "localhost" else []


def _proposed_row(told: model_answer.ModelAnswer, evidence: list[str], model: str) -> CatalogRow | None:
    """Return the catalog row that the language model proposes, or None. The row's sample is a masked log line, because
    users share catalogs."""
    if not told.pattern or not evidence:
        return None
    return CatalogRow(
        klass=told.klass,
        pattern=told.pattern,
        weight=_WEIGHT,
        sample=evidence[0],
        source=f"proposed by the language model {model}",
        hint=model_answer.sanitize_words(told.hint),
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
