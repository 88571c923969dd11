"""The rows of patterns of secrets: each knows its own sample, and no line makes it slow."""

import re
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from holdfast.logs.secret_masking import Masker, SecretKind, secret_kinds


@pytest.mark.parametrize("kind", secret_kinds(), ids=lambda kind: f"{kind.put} {kind.sample[:20]}")
def test_a_row_masks_its_own_sample(kind: SecretKind) -> None:
    mask = Masker(hosts=False)
    masked = mask(kind.sample)
    assert f"<{kind.put}>" in masked
    assert mask(masked) == masked


@pytest.mark.parametrize(
    "word", ["wandb ", "eyJ", "password", "sk-", "a@", "://", "Bearer ", "curl ", "token: ", "a_-.", "1."]
)
def test_no_line_takes_long(word: str) -> None:
    line = (word * 2000)[:4000]
    begun = time.process_time()
    Masker(hosts=True)(line)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("kind", secret_kinds(), ids=lambda kind: f"{kind.put} {kind.sample[:20]}")
def test_no_row_takes_more_than_linear_time(kind: SecretKind) -> None:
    pattern = re.compile(kind.pattern)
    slow = [line[:60] for line in _worst_lines(kind) if _is_superlinear(pattern, line)]
    assert not slow


def _worst_lines(kind: SecretKind) -> Iterator[str]:
    """Yield pieces of what the row's own pattern and sample have; repeated, they make long lines."""
    bare = re.sub(r"\(\?(?:P<\w+>|[a-z]+\)|<?[=!:>])|\[[^]]*\]|\\[a-zA-Z]|\{[^}]*\}", " ", kind.pattern)
    words = list(dict.fromkeys(re.findall(r"[\w:/@.-]+", bare.replace("\\", ""))))
    starts = [kind.sample[:n] for n in range(4, len(kind.sample), 7)]
    if len(words) > 24:
        words = words[::3]
    glue = ("", " ", "/", ":", '= "')
    yield from (f"{word}{end}" for word in words for end in glue)
    yield from (f"-{word}aaaaaaaa" for word in words)
    yield from (f"{word}{then}/" for word, then in pairwise(words))
    yield from starts


def _is_superlinear(pattern: re.Pattern[str], piece: str) -> bool:
    """Look at lines of up to 64 KiB: pieces alone, before a word that is masked already, and between many others."""
    for end in ("", " <token>", "hook" * 8192, " " * 32768):
        for chars, suspicious_s in (
            (1 << 13, 0.005),
            (1 << 16, 0.3),
        ):  # the shorter first: a bad row would take minutes
            if (took_s := _seconds_for(pattern, piece, end, chars)) < suspicious_s:
                break
            if took_s > 0.3 and took_s > 3.2 * _seconds_for(pattern, piece, end, chars // 2):
                return True
    return False


def _seconds_for(pattern: re.Pattern[str], piece: str, end: str, chars: int) -> float:
    end = end[: chars // 2]
    line = (piece * (chars // len(piece) + 1))[: chars - len(end)] + end
    begun = time.process_time()
    pattern.sub("", line)
    return time.process_time() - begun
