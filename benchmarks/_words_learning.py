"""Learns weights of words from labelled logs, and measures on rounds of logs that it has not learned from.

The rules have learned from all open logs, so what they say of these today is no forecast. `first_tries.json` has what
the rules of the time said of each log from outside before they learned from its round. Trust in rules and words is
fitted to these, with words that were learned without the round.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks._words_corpus import CORPUS, Judged, Label, read_cases
from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import LogLine
from holdfast.logs import catalog_files
from holdfast.logs.learned_words import NOTHING, SIGNS, ZERO, LearnedWords, read_log_words
from holdfast.logs.learned_words_diagnosis import weigh_words
from holdfast.logs.line_templates import is_alarming
from holdfast.logs.log_diagnosis import open_log, read_log_lines
from holdfast.model.last_words_diagnosis import Diagnosis

OUTSIDE = CORPUS / "outside"
# First letters of names, in order of collection.
ROUNDS = ("abcd", "ef", "ghij", "kl", "mn", "opq", "r", "s", "t", "uvw", "xy", "z", "0")
OF_OUTSIDE = 2.0  # weight of a log from outside
PENALTY = 5e-6
TWICE = 2  # a word of fewer logs is not learned
CALM = 2  # lines before the first that looks like trouble, at least: nothing has failed yet
LEAST = 6  # known words, below which a log says too little
CUT = 2  # levels below which a weight is dropped
PASSES = 80


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """One labelled log: its words, and what the rules said at their first try."""

    name: str
    label: Label
    lines: list[LogLine]
    words: set[str]
    calm: set[str]  # words of its beginning, where nothing has failed; empty if there is none
    outside: bool
    first_try: Diagnosis | None = None

    @property
    def round(self) -> str:
        return next((one for one in ROUNDS if self.outside and self.name[0] in one), "")


def read_lessons() -> list[Lesson]:
    tries = json.loads((OUTSIDE / "first_tries.json").read_text())
    return [*_read_folder(CORPUS / "ours", {}), *_read_folder(OUTSIDE, tries)]


def _read_folder(folder: Path, tries: dict[str, tuple[str, str, str, float]]) -> list[Lesson]:
    known = catalog_files.load_failures()
    found = []
    for name, label, paths in read_cases(folder):
        lines = read_log_lines([open_log(path) for path in paths], known)
        found.append(
            Lesson(
                name=name,
                label=label,
                lines=lines,
                words=read_log_words(lines, label.exit_code),
                calm=_read_calm(lines),
                outside=folder == OUTSIDE,
                first_try=_make_try(*tries[name]) if name in tries else None,
            )
        )
    return found


def _read_calm(lines: list[LogLine]) -> set[str]:
    """Return the words of the beginning in which nothing looks like trouble; none if it is short or rules know it."""
    begun = list(itertools.takewhile(lambda said: not is_alarming(said.raw.encode()), lines[:-1]))
    if len(begun) < CALM or classify_failure(FailureEvidence(lines=begun), catalog_files.load_failures()).confidence:
        return set()
    return read_log_words(begun)


def _make_try(klass: str, group: str, action: str, confidence: float) -> Diagnosis:
    return Diagnosis(klass=klass, group=group, action=action, confidence=confidence, explanation="", evidence=())


def learn_words(lessons: Sequence[Lesson], trust: tuple[float, float, float] = (1.0, 2.3, 0.8)) -> LearnedWords:
    """Fit multinomial logistic regressions of classes and of actions on rare words, and pack their weights."""
    torch.manual_seed(0)
    cases = [(one.words, one.label.klass, one.label.action, OF_OUTSIDE if one.outside else 1.0) for one in lessons]
    cases += [(one.calm, NOTHING, NOTHING, OF_OUTSIDE if one.outside else 1.0) for one in lessons if one.calm]
    counts = Counter(word for case in cases for word in case[0])
    words = sorted(word for word, count in counts.items() if count >= TWICE)
    rarity = {word: math.log((len(cases) + 1) / (counts[word] + 1)) + 1 for word in words}
    places = {word: place for place, word in enumerate(words)}
    matrix = _make_matrix([case[0] for case in cases], places, rarity)
    share = torch.tensor([case[3] for case in cases])
    share /= share.sum()
    classes, actions = (
        _fit_names(matrix, names, share) for names in ([case[1] for case in cases], [case[2] for case in cases])
    )
    return _pack_weights(rarity, classes, actions, trust)


class NameWeights(NamedTuple):
    """Fitted weights of each word for each of some names."""

    names: list[str]
    weights: torch.Tensor
    bias: torch.Tensor


def _fit_names(matrix: torch.Tensor, said: Sequence[str], share: torch.Tensor) -> NameWeights:
    names = sorted(set(said))
    target = torch.tensor([names.index(one) for one in said])
    weights, bias = _fit_weights(matrix, target, share, len(names))
    return NameWeights(names, weights - weights.mean(1, keepdim=True), bias)


def _make_matrix(logs: list[set[str]], places: dict[str, int], rarity: dict[str, float]) -> torch.Tensor:
    starts, columns, values = [0], [], []
    for words in logs:
        known = sorted(word for word in words if word in places)
        norm = math.sqrt(sum(rarity[word] ** 2 for word in known)) or 1.0
        columns += [places[word] for word in known]
        values += [rarity[word] / norm for word in known]
        starts.append(len(columns))
    rows = torch.repeat_interleave(torch.arange(len(logs)), torch.tensor(starts).diff())
    places_of = torch.stack([rows, torch.tensor(columns)])
    size = (len(logs), len(places))
    return torch.sparse_coo_tensor(places_of, torch.tensor(values), size, check_invariants=True).coalesce()


def _fit_weights(
    matrix: torch.Tensor, target: torch.Tensor, share: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.zeros(matrix.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)

    def loss() -> torch.Tensor:
        missed = torch.nn.functional.cross_entropy(torch.sparse.mm(matrix, weights) + bias, target, reduction="none")
        return (missed * share).sum() + PENALTY * (weights * weights).sum()

    _minimize(loss, [weights, bias])
    return weights.detach(), bias.detach()


def _minimize(loss: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> None:
    optimizer = torch.optim.LBFGS(parameters, max_iter=PASSES, line_search_fn="strong_wolfe")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(step)


def _pack_weights(
    rarity: dict[str, float], classes: NameWeights, actions: NameWeights, trust: tuple[float, float, float]
) -> LearnedWords:
    """Round the weights to levels, each a sign of a string, and drop what is near zero."""
    rare = torch.tensor(list(rarity.values()))[:, None]
    sizes = (classes.weights * rare).abs()
    scale = float(sizes.quantile(0.9999) if sizes.numel() < 1 << 24 else sizes.max()) / ZERO
    scaled = torch.cat([classes.weights, actions.weights], 1) * rare
    levels = (scaled / scale).round().clamp(-ZERO, len(SIGNS) - 1 - ZERO).int().tolist()
    rarest = max(rarity.values()) / (len(SIGNS) - 1)
    packed = {}
    for word, mine in zip(rarity, levels, strict=True):
        pairs = "".join(SIGNS[place] + SIGNS[level + ZERO] for place, level in enumerate(mine) if abs(level) >= CUT)
        packed[word] = SIGNS[round(rarity[word] / rarest)] + pairs
    return LearnedWords(
        classes=tuple(classes.names),
        actions=tuple(actions.names),
        bias=tuple(round(float(one), 4) for one in (*classes.bias, *actions.bias)),
        scale=scale,
        rarity_scale=rarest,
        trust=trust,
        least=LEAST,
        words=packed,
    )


def fit_trust(cases: Sequence[tuple[Lesson, LearnedWords]]) -> tuple[float, float, float]:
    """Return the trust in words and in rules with which first tries and words together fit the labels best."""
    rows, target = [], []
    for lesson, learned in cases:
        said, odds = lesson.first_try, learned.class_odds(lesson.words)
        if said is None or not said.confidence or lesson.label.klass not in odds:
            continue
        classes = [klass for klass in odds if klass != NOTHING]
        rows.append(
            [
                [
                    math.log(max(odds[klass], 1e-4)),
                    float(klass == said.klass),
                    (klass == said.klass) * (said.confidence - 0.7),
                ]
                for klass in classes
            ]
        )
        target.append(classes.index(lesson.label.klass))
    table, right = torch.tensor(rows), torch.tensor(target)
    trust = torch.zeros(3, requires_grad=True)
    _minimize(lambda: torch.nn.functional.cross_entropy(table @ trust, right) + 1e-3 * (trust * trust).sum(), [trust])
    return tuple(round(float(one), 3) for one in trust.detach())  # type: ignore[return-value]


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """One log from outside, judged without having learned from its round: by rules, by words, by both."""

    rules: Judged
    words: Judged
    both: Judged


def judge_unseen(lessons: Sequence[Lesson], *, earlier: bool = False) -> list[Unseen]:
    """Judge each round by what was learned from the others, or only from earlier ones."""
    found = []
    without: dict[str, LearnedWords] = {}
    for at, one in enumerate(ROUNDS):
        others = ROUNDS[:at] if earlier else [other for other in ROUNDS if other != one]
        without[one] = learn_words([lesson for lesson in lessons if lesson.round in ("", *others)])
    for at, one in enumerate(ROUNDS):
        others = (ROUNDS[:at] or ROUNDS[1:]) if earlier else [other for other in ROUNDS if other != one]
        trust = fit_trust([(lesson, without[lesson.round]) for lesson in lessons if lesson.round in others])
        learned = msgspec.structs.replace(without[one], trust=trust)
        found += [_judge_lesson(lesson, learned) for lesson in lessons if lesson.round == one]
    return found


def _judge_lesson(lesson: Lesson, learned: LearnedWords) -> Unseen:
    known, rules = catalog_files.load_failures(), lesson.first_try
    assert rules is not None
    odds = learned.class_odds(lesson.words)
    best = max((klass for klass in odds if klass != NOTHING), key=lambda klass: odds[klass], default=rules.klass)
    klass = known.classes[best]
    alone = _make_try(best, klass.group, klass.action, odds.get(best, 0.0))
    both = weigh_words(rules, lesson.lines, lesson.label.exit_code, known, learned)
    rulings = (Judged(name=lesson.name, label=lesson.label, found=one) for one in (rules, alone, both))
    return Unseen(**dict(zip(("rules", "words", "both"), rulings, strict=True)))


def learn_all(lessons: Sequence[Lesson]) -> LearnedWords:
    """Learn from all lessons; the trust is that of words which were learned without the round that they judge."""
    without = {one: learn_words([lesson for lesson in lessons if lesson.round != one]) for one in ROUNDS}
    trust = fit_trust([(lesson, without[lesson.round]) for lesson in lessons if lesson.outside])
    return learn_words(lessons, trust)
