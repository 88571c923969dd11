"""Classifies a failure by the words of its log, with weights learned from labelled logs."""

import math
import re
import string
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from holdfast import core
from holdfast.core.log_analysis.line_prefixes import LogLine
from holdfast.core.log_analysis.tracebacks import parse_tracebacks
from holdfast.decoding import from_json

PATH = Path(core.__path__[0]) / "catalog" / "words" / "learned.json"
NOTHING = ""  # in place of a class: nothing has failed
SIGNS = "".join(sign for sign in string.printable[:94] if sign not in '"\\<>&')  # a weight's level, or a class
ZERO = len(SIGNS) // 2
_LINES = 4000  # different lines that are looked at
_LINE_CHARS = 600
_PATH_NAME = re.compile(r"(?<!\w)[~.]?(?:/[\w.@+=-]+)*/([\w.@+=-]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-f]*\d)[0-9a-f]{7,}\b")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]+")
_DIGITS = re.compile(r"\d+")
_PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of CamelCase and of snake_case
_CODE = re.compile(  # numbers that say what happened; all others are chance
    r"(exit ?code|error code|signal|status|errno|xid|http|code)(?: \([^)]{0,40}\)|/1\.1)?(?: code)?\W{0,3}?"
    r"(-?\d{1,3})\b",
    re.IGNORECASE,
)


class LearnedWords(msgspec.Struct, frozen=True, kw_only=True):
    """Learned weights of words for classes and for actions. `words` maps each word to a string, whose first character
    encodes how rare the word is. Two characters follow for each weight: the number of a class or an action, and the
    weight itself. The number of the first action follows that of the last class."""

    classes: tuple[str, ...]
    actions: tuple[str, ...] = ()
    bias: tuple[float, ...]
    scale: float  # of one level
    rarity_scale: float
    trust: tuple[float, float, float]  # in the words, in the rules, and in how sure the rules are
    least: int  # known words that a log must have: fewer say too little to be weighed
    words: dict[str, str]

    def class_odds(self, words: set[str]) -> dict[str, float]:
        """Return how likely each class is by the words of a log; {} if too few of them are known."""
        return _share_out(self.classes, self._sum_weights(words)[: len(self.classes)])

    def action_odds(self, words: set[str]) -> dict[str, float]:
        """Return how likely each action is to be right by the words of a log; {} if too few of them are known."""
        return _share_out(self.actions, self._sum_weights(words)[len(self.classes) :])

    def _sum_weights(self, words: set[str]) -> list[float]:
        told = [self.words[word] for word in words if word in self.words]
        if len(told) < self.least:
            return []
        norm = math.sqrt(sum((self.rarity_scale * SIGNS.index(signs[0])) ** 2 for signs in told))
        sums = list(self.bias)
        for signs in told:
            for place, level in self._levels(signs):
                sums[place] += level / norm
        return sums

    def weigh_line(self, text: str, klass: str) -> float:
        """Return the sum of a class's weights over the words of one line."""
        place = self.classes.index(klass)
        told = (self.words[word] for word in split_words(text) if word in self.words)
        return sum(level for signs in told for at, level in self._levels(signs) if at == place)

    def _levels(self, signs: str) -> list[tuple[int, float]]:
        places = [SIGNS.index(sign) for sign in signs[1:]]
        levels = [self.scale * (one - ZERO) for one in places[1::2]]
        return list(zip(places[::2], levels, strict=True))


def _share_out(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    top = max(sums, default=0.0)
    shares = [math.exp(one - top) for one in sums]
    return {name: share / sum(shares) for name, share in zip(names, shares, strict=False)}


@cache
def load_learned() -> LearnedWords:
    return from_json(PATH.read_bytes(), LearnedWords)


def read_log_words(lines: Sequence[LogLine], code: int | None = None) -> set[str]:
    """Return the words of a log, except those of code lines in tracebacks. The set also has "exit N" for an exit code
    N, and "kernel:" if the log has lines of the kernel."""
    for _ in parse_tracebacks(lines):  # which marks frames and code
        pass
    found = set() if code is None else {f"exit {code}"}
    if any(said.kernel for said in lines):
        found.add("kernel:")
    texts = dict.fromkeys(said.text[:_LINE_CHARS] for said in lines if not said.code)
    return found.union(*map(split_words, list(texts)[-_LINES:]))


def split_words(text: str) -> set[str]:
    """Return the words of a text in lower case, the parts of compound words, and codes; no numbers, no folders."""
    codes = {f"{name.split()[0].lower()}={number}" for name, number in _CODE.findall(text)}
    words = _WORD.findall(_HEX.sub(" ", _PATH_NAME.sub(_file_name, text)))
    parts = {part.lower() for word in words for part in _PIECE.findall(word) if len(part) > 2}
    whole = {_DIGITS.sub("0", word).lower().strip("_") for word in words}
    return (codes | parts | whole) - {""}


def _file_name(path: re.Match[str]) -> str:
    return f" {path[1]} " if "." in path[1] else " "


def weigh_rules(odds: Mapping[str, float], klass: str, confidence: float, trust: Sequence[float]) -> dict[str, float]:
    """Return the share of belief in each class, from the odds by a log's words and from the rules' class and
    confidence. `trust` weighs the words, the rules, and the rules' confidence."""
    words, rules, sure = trust
    logs = {one: words * math.log(max(share, 1e-4)) for one, share in odds.items() if one != NOTHING}
    if klass in logs:
        logs[klass] += rules + sure * (confidence - 0.7)
    top = max(logs.values())
    shares = {one: math.exp(value - top) for one, value in logs.items()}
    return {one: share / sum(shares.values()) for one, share in shares.items()}
