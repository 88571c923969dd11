"""Finds literals that every line matched by a pattern must contain, so that slow patterns run on few lines."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from re import _parser as parser  # type: ignore[attr-defined]  # a pattern taken apart; there is no other door to it
from typing import Any

# Lines are compared in lower case and without digits, so that lines that differ only in numbers are one.
_LETTERS = b"abcdefghijklmnopqrstuvwxyz_"
PLAIN = bytes.maketrans(_LETTERS.upper() + b"\r", _LETTERS + b"\n")
DIGITS = b"0123456789"
_WORDS = bytes(c if c in _LETTERS or c == 10 else 32 for c in range(256))  # all but letters and ends of lines are gaps
_SHORTEST = 2
_ODD = 3  # characters of a needle without a word
_WHOLE = 4  # letters of a word that is looked for by itself
_TRIE = 6  # letters that tell most parts from anything else
_HEAD = 4  # letters by which parts of words are found
_KNOWN = 100_000  # words remembered
_FEW = 4000  # words: to look at each takes less than to compile a pattern of all parts
# In every other line of a job that is well: looked for only where a pattern demands nothing better.
_COMMON = frozenset(
    b"with from that this have been were when will rank step loss time train training model file layer batch sample "
    b"node data dataset loader worker workers epoch iteration iter grad norm gradient token tokens device cuda torch "
    b"process processes loaded loading load save saved saving log info warning input output size shard checkpoint "
    b"create using local world group host disk dev gpu env node nodes not can for and the seed sync zero".split()
)


def fold_line(text: str) -> bytes:
    """Return a line in the form in which lines are compared: lower case and without digits."""
    return text.encode("utf-8", "replace").translate(PLAIN, DIGITS)


@lru_cache(maxsize=4096)  # catalogs are made again with a few rows more
def required_literals(pattern: str) -> tuple[bytes, ...]:
    """Return literals such that every matching line, once folded, contains at least one; empty if there are none."""
    found = _literals_of_sequence(parser.parse(pattern))
    return tuple(sorted(found)) if found and _literal_worth(found)[0] else ()


def split_alternatives(pattern: str) -> list[str]:
    """Return the branches of a pattern's outermost alternation, each with the pattern's leading flags."""
    flags = re.match(r"\(\?[aimsux]+\)", pattern)
    start = flags.end() if flags else 0
    cuts, depth, at = [start - 1], 0, start
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            at = _end_of_class(pattern, at)
        elif pattern[at] == "#" and flags and "x" in flags.group():
            at = pattern.find("\n", at) if "\n" in pattern[at:] else len(pattern)
        elif pattern[at] in "()":
            depth += 1 if pattern[at] == "(" else -1
        elif pattern[at] == "|" and not depth:
            cuts.append(at)
        at += 1
    front = flags.group() if flags else ""
    return [front + pattern[a + 1 : b] for a, b in pairwise([*cuts, len(pattern)])]


def _end_of_class(pattern: str, at: int) -> int:
    """Return the index of the `]` that ends a character set. A `]` at the start of the set is one of its characters."""
    at += 2 if pattern[at + 1 : at + 2] == "^" else 1
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at


class LiteralIndex:
    """Finds which of many literals each line contains. Each literal is indexed by one of its words. Logs repeat few
    words, so most lookups are already cached."""

    def __init__(self, wanted: Iterable[bytes]) -> None:
        self._whole: dict[bytes, list[bytes]] = {}  # by words that stand alone in the needle
        self._parts: dict[bytes, list[bytes]] = {}  # by words that may be a part of a longer one
        self._wordless: list[bytes] = []
        for needle in set(wanted):
            word, alone = _index_word(needle)
            if word:
                (self._whole if alone else self._parts).setdefault(word, []).append(needle)
            else:
                self._wordless.append(needle)
        self._heads: dict[int, dict[bytes, list[bytes]]] = {}  # those by their first letters
        for part in self._parts:
            head = part[:_HEAD]
            self._heads.setdefault(len(head), {}).setdefault(head, []).append(part)
        self._any_part: re.Pattern[bytes] | None = None
        self._telling: dict[bytes, tuple[bytes, ...]] = {}
        self._dull: set[bytes] = set()

    def compile_parts(self) -> re.Pattern[bytes]:
        """Compile the pattern that finds parts of literals in many words. A log with few words does not need it."""
        self._any_part = re.compile(_any_of(sorted({part[:_TRIE] for part in self._parts})))
        return self._any_part

    def find_literals(self, lines: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
        """Yield for each folded line the literals that it contains."""
        gapped = b"\n".join(lines).translate(_WORDS)
        self._learn_words(set(gapped.split()))
        many = LineBlock(lines)
        odd = {place for needle in self._wordless for place in many.lines_containing(needle)}
        for place, words in enumerate(gapped.split(b"\n") if lines else ()):
            told = self._telling.keys() & words.split()
            wanted = [needle for word in told for needle in self._telling[word]] + (
                self._wordless if place in odd else []
            )
            yield tuple(needle for needle in wanted if needle in lines[place]) if wanted else ()

    def _learn_words(self, words: set[bytes]) -> None:
        fresh = [word for word in words - self._dull - self._telling.keys() if len(word) >= _SHORTEST]
        if len(self._dull) + len(self._telling) + len(fresh) > _KNOWN:
            self._dull &= words
            self._telling = {word: told for word, told in self._telling.items() if word in words}
        self._dull.update(fresh)
        for word in self._worth_a_look(fresh):
            found = {needle for part in self._parts_in(word) for needle in self._parts[part]}
            found.update(self._whole.get(word, ()))
            if found:
                self._telling[word] = tuple(found)
                self._dull.discard(word)

    def _worth_a_look(self, words: list[bytes]) -> Iterable[bytes]:
        """Return those of `words` that may contain a part of a literal. One pass searches all words together."""
        if self._any_part is None and len(self._dull) + len(self._telling) <= _FEW:
            return words
        any_part = self._any_part or self.compile_parts()
        many = b"\n".join(words)
        found = self._whole.keys() & words
        for match in any_part.finditer(many) if self._parts else ():
            end = many.find(b"\n", match.end())
            found.add(many[many.rfind(b"\n", 0, match.start()) + 1 : end if end >= 0 else len(many)])
        return found

    def _parts_in(self, word: bytes) -> Iterator[bytes]:
        for length, heads in self._heads.items():
            for at in range(len(word) - length + 1):
                yield from (part for part in heads.get(word[at : at + length], ()) if word.startswith(part, at))


class LineBlock:
    """Many lines joined for one search, which is much faster than searching line by line."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        self._whole = b"\n".join(lines)

    def lines_containing(self, needle: bytes) -> Iterator[int]:
        """Yield the indices of the lines that contain the literal."""
        at = self._whole.find(needle)
        while at >= 0:
            place = bisect_right(self._starts, at) - 1
            yield place
            at = self._whole.find(needle, self._starts[place + 1])


def _any_of(words: list[bytes]) -> bytes:
    """Return a pattern that matches any of these words. It branches by letter, so many words are as fast as few."""
    if b"" in words:
        return b""
    rests: dict[bytes, list[bytes]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in rests.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


def _index_word(needle: bytes) -> tuple[bytes, bool]:
    """Return the word by which to index a literal; empty if no word of the literal is long enough. Also return whether
    a line that contains the literal must have this word as a whole word, not as a part of a longer one."""
    words = needle.translate(_WORDS).split()
    inner = words[needle[:1] in _LETTERS : len(words) - (needle[-1:] in _LETTERS)]  # those between two gaps
    alone = [word for word in inner if len(word) >= _WHOLE and word not in _COMMON]
    if alone:
        return max(alone, key=len), True
    found = (word for word in words if len(word) >= _SHORTEST)
    return max(found, key=lambda word: (word not in _COMMON, len(word)), default=b""), False


def _literals_of_sequence(sequence: Iterable[tuple[Any, Any]]) -> set[bytes]:
    """Return the most useful set of literals that a parsed pattern requires; adjacent characters form one literal."""
    offers: list[set[bytes]] = []
    run = ""
    for op, value in sequence:
        if op is parser.LITERAL:
            run += chr(value)
            continue
        if op is parser.AT:
            continue
        offers.append({fold_line(run)})
        run = ""
        offers.append(_literals_of_part(op, value))
    offers.append({fold_line(run)})
    return max(offers, key=_literal_worth, default=set())


def _literals_of_part(op: Any, value: Any) -> set[bytes]:
    if op is parser.SUBPATTERN:
        return _literals_of_sequence(value[-1])
    if op is parser.BRANCH:
        parts = [_literals_of_sequence(part) for part in value[1]]
        return set().union(*parts) if all(_literal_worth(part)[0] > 0 for part in parts) else set()
    if op in (parser.MAX_REPEAT, parser.MIN_REPEAT, parser.POSSESSIVE_REPEAT) and value[0] >= 1:
        return _literals_of_sequence(value[2])
    if op is parser.ATOMIC_GROUP:
        return _literals_of_sequence(value)
    return set()


def _literal_worth(offer: set[bytes]) -> tuple[int, int]:
    """Return how useful a set of literals is. Long literals are rare, and of long enough ones, fewer are better."""
    worth = min((_literal_rarity(needle) for needle in offer), default=0)
    return (min(worth, 6), -len(offer)) if worth > 0 else (0, 0)


def _literal_rarity(needle: bytes) -> int:
    word, _ = _index_word(needle)
    if len(word) < _ODD:
        return int(len(needle) >= _ODD)
    return len(word) if word not in _COMMON else _ODD - 1
