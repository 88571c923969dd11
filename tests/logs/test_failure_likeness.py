"""Failures are known again by their telling lines, whatever their numbers, paths and hosts."""

from holdfast.logs.failure_likeness import find_telling_lines, measure_likeness, read_words

STEPS = [f"step {n} loss {n / 7:.3f}" for n in range(200)]
FIRST = [
    *STEPS,
    "[rank3]: zorb: mount /data/a lost its backend 17 after 300 ms",
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "/w/jane/train.py", line 88, in main',
    "[rank3]: ZorbError: frame 4711 of shard-9 is torn",
    "[rank0]: Connection closed by peer [10.1.2.3]:4444",
]
AGAIN = [
    *STEPS[:50],
    "[rank0]: zorb: mount /scratch/b lost its backend 4 after 12 ms",
    '[rank0]:   File "/opt/x/fit.py", line 3, in main',
    "[rank0]: ZorbError: frame 8 of shard-1 is torn",
    "[rank1]: Connection closed by peer [10.9.9.9]:1",
]
OTHER = [*STEPS, "[rank1]: RuntimeError: quux: cannot open the gate", "[rank0]: Connection closed by peer [10.1.2.3]:4"]


def alike(one: list[str], other: list[str]) -> float:
    return measure_likeness(read_words(find_telling_lines(one, str)), read_words(find_telling_lines(other, str)))


def test_the_same_failure_with_other_numbers() -> None:
    assert alike(FIRST, FIRST) == 1.0
    assert alike(FIRST, AGAIN) > 0.8


def test_another_failure_with_the_same_echo() -> None:
    assert alike(FIRST, OTHER) < 0.4


def test_more_trouble_is_another_failure() -> None:
    more = [f"ERROR: {word} has failed for good" for word in ("mount", "fan", "link", "disk", "bus", "probe", "kiln")]
    assert alike(FIRST, [*FIRST, *more]) < 0.6


def test_codes_are_no_chance() -> None:
    assert alike(["E1 api.py:83] failed (exitcode: -9) of binary"], ["E2 api.py:83] failed (exitcode: -9) of binary"])
    assert not alike(["E1 api.py:83] failed (exitcode: -9) of b"], ["E1 api.py:83] failed (exitcode: -11) of b"])
    xid = "NVRM: Xid (PCI:0000:5a:00): {}, Graphics Exception on the GPU"
    assert not alike([xid.format(13)], [xid.format(79)])


def test_telling_lines_are_few_and_masked() -> None:
    many = [f"{'abcdefghijklmnopqrstuvwxyz'[n % 26] * (3 + n // 26)}: an error, broken" for n in range(500)]
    lines = find_telling_lines(many, lambda text: text.replace("broken", "<masked>"))
    assert len(lines) == 24
    assert all("<masked>" in line for line in lines)


def test_a_log_without_trouble_is_known_by_its_end() -> None:
    assert find_telling_lines(["all went well so far", "zorblax sang its last song"], str) == (
        "zorblax sang its last song",
        "all went well so far",
    )
    assert find_telling_lines([], str) == ()
    assert alike([], FIRST) == 0.0
