"""Kinds of lines: counted over any number of blocks, told apart where it matters, in memory that does not grow."""

import tracemalloc
from collections.abc import Iterator

import pytest

from holdfast.logs import line_templates
from holdfast.logs.line_templates import LineKind, TemplateMiner, mine_log


def kinds(miner: TemplateMiner) -> dict[str, LineKind]:
    return {" ".join(word or "<*>" for word in kind.words): kind for kind in miner.kinds}


def test_lines_that_differ_in_numbers_are_one_kind() -> None:
    miner = mine_log([f"step {n} loss {n / 7:.4f} at 0x{n * 99991:012x}" for n in range(1000)])
    (kind,) = miner.kinds
    assert (kind.count, kind.first, kind.last, miner.lines) == (1000, 1, 1000, 1000)
    assert kinds(miner).keys() == {"step <n> loss <n> at <n>"}


def test_words_that_differ_become_wildcards() -> None:
    miner = mine_log([f"opened shard {name} for reading by loader {n}" for n, name in enumerate("abcdefgh")])
    assert kinds(miner).keys() == {"opened shard <*> for reading by loader <n>"}


def test_trouble_is_no_wildcard() -> None:
    miner = mine_log(["rank 3 of job x is running"] * 500 + ["rank 3 of job x is failed"])
    assert [kind.count for kind in miner.kinds] == [500, 1]


def test_bytes_may_be_cut_anywhere_and_blocks_too() -> None:
    text = b"".join(b"line number %d of many\n" % n for n in range(300_000)) + b"RuntimeError: odd\nlast"
    chunks = [text[at : at + 77_777] for at in range(0, len(text), 77_777)]
    miner = mine_log(chunks)
    assert miner.lines == 300_002
    found = kinds(miner)
    assert found["line number <n> of many"].count == 300_000
    assert found["RuntimeError: odd"].first == 300_001
    assert miner.tail[-1] == b"last"


def test_a_line_is_kept_with_its_traceback() -> None:
    frames = [f'[rank1]:   File "/workspace/a{n}.py", line {n}, in f{n}' for n in range(20)]
    log = [
        "step 1",
        "step 2",
        "[rank1]: Traceback (most recent call last):",
        *frames,
        "[rank1]: ZorbError: x",
        "step 3",
    ]
    kind = kinds(mine_log(log))["[rank<n>]: ZorbError: x"]
    (window,) = kind.windows
    assert [line.decode() for line in window.lines] == log[1:]
    assert window.first == 2
    assert window.number == kind.first == 24


def test_lines_after_one_may_come_with_the_next_block() -> None:
    miner = TemplateMiner()
    miner.add_lines([b"step 1", b"Traceback (most recent call last):"])
    miner.add_lines([b'  File "a.py", line 1, in f', b"    f()", b"FooError: x", b"step 2", b"step 3", b"step 4"])
    window = kinds(miner)["Traceback (most recent call last):"].windows[0]
    assert window.lines[-3:] == [b"FooError: x", b"step 2", b"step 3"]
    assert window.first == 1


def test_progress_bars_are_what_a_terminal_shows() -> None:
    bar = b"\r".join(b" %d%%|##| %d/100" % (n, n) for n in range(100))
    miner = mine_log([bar, b"\rTraceback (most recent call last):\n", b"x\r\n"])
    assert [kind.sample for kind in miner.kinds] == [b"Traceback (most recent call last):", b"x"]


def test_a_private_key_is_not_kept_even_over_blocks() -> None:
    miner = TemplateMiner()
    miner.add_lines([b"[0]: -----BEGIN OPENSSH PRIVATE KEY-----", b"[0]: c2VjcmV0MQ=="])
    miner.add_lines([b"[0]: c2VjcmV0Mg==", b"[0]: -----END OPENSSH PRIVATE KEY-----", b"after"])
    kept = [
        *miner.tail,
        *(k.sample for k in miner.kinds),
        *(line for k in miner.kinds for w in k.windows for line in w.lines),
    ]
    assert not [line for line in kept if b"c2Vjcm" in line]
    assert miner.tail[-1] == b"after"


def test_half_a_word_is_left_out_where_a_line_is_cut() -> None:
    line = b"x " * 1000 + b"token " + b"hf_" + b"a1B2" * 20
    assert mine_log([line]).kinds[0].sample.endswith(b"token ")


def noise(lines: int) -> Iterator[str]:
    for n in range(lines):
        seed = (n * 2654435761) & 0xFFFFFFFF
        letters = "".join(chr(103 + (seed >> shift & 15)) for shift in range(0, 32, 4))
        yield f"{letters[:3]}{n} {letters[2:]} {letters[1:]} {letters[::-1]} {letters[3:]} {letters}"


@pytest.mark.slow
def test_memory_does_not_grow_with_what_is_new() -> None:
    tracemalloc.start()
    try:
        miner = mine_log(noise(40_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert miner.lines == 40_000
    assert len(miner.kinds) <= line_templates._ALARMS
    assert peak < 40 << 20
    assert miner.skipped > 0
