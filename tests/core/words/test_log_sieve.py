"""Long logs cut down to what may say something."""

import pytest

from holdfast.core.log_analysis.failure_classifier import FailureEvidence, classify_failure
from holdfast.core.log_analysis.line_prefixes import parse_lines
from holdfast.core.log_analysis.log_sieve import WHOLE, LineSieve, sift_log
from tests.core.words.knowing import CATALOG
from tests.core.words.test_failure_classifier import BOOM, ECHO, marked

STEP = "2024-05-01 10:22:33,123 [rank{}] INFO iteration {} loss 2.31 lr 1e-4 grad norm 0.91 tokens/s 1231\n"


def steps(count: int) -> bytes:
    return "".join(STEP.format(n % 8, n) for n in range(count)).encode()


def test_a_short_log_is_kept_whole() -> None:
    assert sift_log(b"a\nb\r\nc", CATALOG) == [(0, "a"), (1, "b"), (2, ""), (3, "c")]
    assert sift_log(b"", CATALOG) == [(0, "")]


def test_of_a_long_one_what_tells_and_the_end() -> None:
    kept = sift_log(steps(5000) + f"{marked(2, BOOM)}\n{marked(1, ECHO)}\n".encode() + steps(5000), CATALOG)
    texts = [text for _, text in kept]
    assert len(kept) < 100
    assert sum("rank2" in text and "iteration" not in text for text in texts) == 4, "the traceback with its source"
    assert (kept[0][0], texts[-1], kept[-1][0]) == (5000, "", 10005)
    found = classify_failure(FailureEvidence(lines=parse_lines(kept, 0)), CATALOG)
    assert (found.klass, found.root_rank, found.origin) == ("python_exception", 2, "train.py:3")


def test_what_was_survived_long_ago_is_not_the_cause() -> None:
    log = steps(100) + b"[rank1]: CUDA out of memory, once\n" + steps(9000) + f"{marked(2, BOOM)}\n".encode()
    found = classify_failure(FailureEvidence(lines=parse_lines(sift_log(log, CATALOG), 0)), CATALOG)
    assert (found.klass, found.root_rank) == ("python_exception", 2)


def test_a_flood_of_the_same_words_hides_nothing() -> None:
    flood = "".join(f"[rank1]: {ECHO} {n}\n" for n in range(30_000)).encode()
    sieve = LineSieve(CATALOG)
    for part in (flood, f"{marked(2, BOOM)}\n".encode(), flood):
        sieve.feed_chunk(part)
    kept = sieve.kept_lines()
    assert len(kept) < 25_000
    assert any("ZeroDivisionError" in text for _, text in kept)


def test_lines_that_are_all_different_are_bounded() -> None:
    letters = "abcdefghijklmnopqrst"
    word = ["".join(letters[(n >> shift) % 20] for shift in range(0, 20, 3)) for n in range(60_000)]
    sieve = LineSieve(CATALOG)
    sieve.feed_chunk("\n".join(f"CUDA out of memory in {w}" for w in word).encode())
    sieve.feed_chunk("\n".join(f"nothing of note in {w}" for w in word).encode())
    assert 0 < len(sieve.kept_lines()) <= 20_100


def test_words_that_no_row_knows_are_given_up() -> None:
    sieve = LineSieve(CATALOG)
    sieve.feed_chunk("\n".join(f"memory {n} of the bus: no space" for n in range(5000)).encode())
    sieve.feed_chunk(b"\n".join(b"x" for _ in range(50)))
    assert len(sieve.kept_lines()) == 40, "the last lines alone"


@pytest.mark.parametrize(
    "log",
    [
        bytes(range(256)) * 2000,
        b"\x00" * (WHOLE + 1),
        b"a" * (WHOLE * 80) + b"\n" + BOOM.encode(),
        b"\xff\xfe\n" * WHOLE,
        b"\n" * (WHOLE * 2),
        b"\r" * (WHOLE * 2) + BOOM.encode(),
    ],
)
def test_hostile_input(log: bytes) -> None:
    kept = sift_log(log, CATALOG)
    assert all(len(text) < 5000 for _, text in kept)
    found = classify_failure(FailureEvidence(lines=parse_lines(kept, 0)), CATALOG)
    assert found.klass == ("python_exception" if BOOM.encode() in log else "unknown_child_failure")
