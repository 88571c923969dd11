"""A second opinion: a language model may be asked where the rules are not sure; where it is of no help they stand."""

import os
import socket
import sys
from collections.abc import Callable, Iterable

import msgspec

from holdfast.config import ConfigError, Settings
from holdfast.core.words.rows import Row
from holdfast.logs import answer, catalog, own
from holdfast.logs.asking import NoAnswer, ask
from holdfast.logs.digest import digest
from holdfast.logs.masking import Masker, secrets_of
from holdfast.logs.question import question
from holdfast.model.diagnosis import Diagnosis

_WEIGHT = 4  # of a proposed row: too little to send a machine away, unless a person makes it more


def wanted(diagnosis: Diagnosis, settings: Settings) -> bool:
    return bool(settings.model.url) and diagnosis.confidence < settings.model.below


def second_opinion(
    diagnosis: Diagnosis, lines: Iterable[bytes | str], settings: Settings, *, say: Callable[[str], None] | None = None
) -> Diagnosis:
    """The diagnosis, or a better one. `lines` are read only if somebody is to be asked: text by lines, bytes as they
    come. Blocks for up to `model.timeout_s`, so a loop calls it in a thread; what went wrong is said in one line, and
    nothing is raised for it."""
    if not wanted(diagnosis, settings):
        return diagnosis
    say = say or (lambda sentence: print(sentence, file=sys.stderr))
    try:
        found, row = _asked(diagnosis, lines, settings)
    except NoAnswer as e:
        say(f"the language model {e}; the rules' diagnosis stands")
        return diagnosis
    if row is not None:
        _proposed(row, settings, say)
    return found


def _asked(rules: Diagnosis, lines: Iterable[bytes | str], settings: Settings) -> tuple[Diagnosis, Row | None]:
    limits = settings.model
    key = os.environ.get(limits.key_env, "") if limits.key_env else ""
    if limits.key_env and not key:
        raise NoAnswer(f"is not asked: {limits.key_env}, which model.key_env names, is not set")
    mask = Masker(hosts=limits.hide_hosts, known=[*secrets_of(os.environ), key], names=_names())
    log = digest(lines, budget=limits.chars, mask=mask)
    masked = msgspec.structs.replace(rules, explanation=mask(rules.explanation))
    classes = {klass.klass: klass for klass in catalog.classes()}
    told = answer.read(ask(question(log.text(), masked, classes.values()), limits, key))
    found = answer.judge(told, rules, log.shown, classes)
    return found, _row(told, [mask(line) for line in found.evidence], limits.name)


def _names() -> list[str]:
    name = socket.gethostname()
    return [name] if len(name) > 3 and name != "localhost" else []


def _row(told: answer.Answer, evidence: list[str], model: str) -> Row | None:
    """The row it proposes, with the line it is for: masked, as catalogs are passed around."""
    if not told.pattern or not evidence:
        return None
    return Row(
        klass=told.klass,
        pattern=told.pattern,
        weight=_WEIGHT,
        sample=evidence[0],
        source=f"proposed by the language model {model}",
        hint=answer.said(told.hint),
    )


def _proposed(row: Row, settings: Settings, say: Callable[[str], None]) -> None:
    path = own.place(settings.words)
    try:
        known = catalog.load(settings.words)
        if next(own.faults([row], known), ""):
            return  # most are too narrow or too wide: nothing to bother a person with
        name = own.propose(row, path)
    except ConfigError:
        return
    say(f"the language model proposes a row for the catalog; look at it and accept it: holdfast catalog add {name}")
