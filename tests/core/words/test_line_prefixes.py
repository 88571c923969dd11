"""What stands before the words."""

import pytest

from holdfast.core.log_analysis.line_prefixes import (
    LogLine,
    PrefixHabits,
    fill_times,
    find_habits,
    parse_lines,
    strip_prefixes,
)
from tests.core.words.knowing import said

NVRM = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
BOOM = "RuntimeError: boom"


def of(line: str) -> LogLine:
    return strip_prefixes(line, PrefixHabits())


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: RuntimeError: boom", 3),
        ("[rank12]:RuntimeError: boom", 12),
        ("[Rank 3] RuntimeError: boom", 3),
        ("[RANK:3] RuntimeError: boom", 3),
        ("rank3: RuntimeError: boom", 3),
        ("[0]: RuntimeError: boom", 0),
        ("[default3]:[rank7]: RuntimeError: boom", 7),
        ("[1,3]<stderr>:RuntimeError: boom", 3),
        ("[1,mpirank:3,algo-1]<stderr>:RuntimeError: boom", 3),
        ("[3]<stdout>:RuntimeError: boom", 3),
        ("(RayTrainWorker pid=4242, ip=10.0.0.3) RuntimeError: boom", None),
        ("(Trainer rank=2, pid=4242) RuntimeError: boom", 2),
        ("2024-05-01 10:22:33,123 [rank3] ERROR RuntimeError: boom", 3),
        ("2024-05-01T10:22:33.1Z stderr F [rank3]: RuntimeError: boom", 3),
        ("[pod/trainer-worker-3/pytorch] RuntimeError: boom", None),
        ("trainer-1  | [rank1]: RuntimeError: boom", 1),
        ("\x1b[36m(Fn pid=7)\x1b[0m \x1b[31mRuntimeError: boom\x1b[0m", None),
        ('{"log":"RuntimeError: boom\\n","stream":"stderr","time":"2024-05-01T10:22:33.123Z"}', None),
        ('{"level": "ERROR", "message": "RuntimeError: boom", "rank": 5}', 5),
        ("2024-05-01 10:22:33.123 | ERROR    | __main__:main:12 - RuntimeError: boom", None),
        ("2024-05-01 10:22:33,123 - trainer - ERROR - RuntimeError: boom", None),
        ("ERROR:root:RuntimeError: boom", None),
        ("[2024-05-01 10:22:33,123] [ERROR] [launch.py:322:sigkill_handler] RuntimeError: boom", None),
        ("E0501 10:22:33.123456 12345 site-packages/torch/api.py:874] RuntimeError: boom", None),
    ],
)
def test_marks_of_many_tools(line: str, rank: int | None) -> None:
    found = of(line)
    assert (found.text, found.rank) == (BOOM, rank)


@pytest.mark.parametrize(
    "line",
    [
        f"May  1 10:22:33 node17 kernel: [12345.678901] {NVRM}",
        f"2024-05-01T10:22:33.123456+02:00 node17 kernel: [12345.678901] {NVRM}",
        f"<3>[12345.678901] {NVRM}",
        f"[12345.678901] {NVRM}",
    ],
)
def test_the_kernels_lines(line: str) -> None:
    found = of(line)
    assert (found.text, found.kernel) == (NVRM, True)


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        '  File "/a/b.py", line 3, in f',
        "    return x / 0",
        "KeyError: 'rank3: a'",
        "3: something",
        "worker-3: RuntimeError",
        "  rank      : 3 (local_rank: 3)",
        "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2024-05-01T10:22:33 DUE TO TIME LIMIT ***",
        "{not json}",
        "{" * 5000 + "}",
        "",
    ],
)
def test_words_are_not_taken_for_marks(line: str) -> None:
    assert of(line).text == line


def test_times_are_comparable_whoever_told_them() -> None:
    times = [
        of(f"[rank3]:[E501 10:22:33.500000000 ProcessGroupNCCL.cpp:616] {BOOM}").at,
        of(f"E0501 10:22:33.500000 12345 file.cc:12] {BOOM}").at,
        of(f"2024-05-01T10:22:33.5Z {BOOM}").at,
        of(f"2026-05-01T12:22:33.5+02:00 {BOOM}").at,
        of(f"[2024-05-01 10:22:33,500] {BOOM}").at,
    ]
    assert len(set(times)) == 1 and times[0] is not None
    assert of(f"May  1 10:22:33 n1 kernel: {NVRM}").at == times[0] - 0.5
    assert of(f"[12345.678901] {NVRM}").at is None, "nobody else counts from there"
    assert of(f"2024-13-41T10:22:33Z {BOOM}").at is None


def test_a_time_is_carried_on_by_the_same_mouth() -> None:
    lines = said(
        "2024-05-01 10:00:00 [rank0] step 1\n"
        "2024-05-01 10:00:09 [rank1] step 1\n"
        "[rank0]: RuntimeError: boom\n"
        "RuntimeError: whose?"
    )
    fill_times(lines)
    assert lines[2].at == lines[0].at and not lines[2].own_clock
    assert lines[3].at == lines[1].at


def test_a_time_of_day_counts_where_nobody_tells_the_day() -> None:
    lines = said("10:00:09 a\n[10:00:01] b")
    fill_times(lines)
    assert [one.at for one in lines] == [36009.0, 36001.0]
    mixed = said("10:00:09 a\n2024-05-01 10:00:01 b")
    fill_times(mixed)
    assert mixed[0].at is None


def test_srun_and_pdsh_by_their_habit() -> None:
    srun = " 0: step 1\n12: step 1\n 0: KeyError: 'a'\n12: step 2\nslurmstepd: error: x"
    assert [one.rank for one in said(srun)] == [0, 12, 0, 12, None]
    assert said(srun)[2].text == "KeyError: 'a'"
    pdsh = "gpu-01: a\ngpu-02: b\ngpu-01: ValueError: c\ngpu-02: d\ngpu-01: e\ngpu-02: f"
    assert [(one.node, one.text) for one in said(pdsh)][2] == ("gpu-01", "ValueError: c")
    alike = "ValueError: a\nValueError: a\nValueError: a\nValueError: a"
    assert find_habits(alike.split("\n")) == PrefixHabits()


def test_several_lines_in_one_of_json() -> None:
    line = r'{"message": "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 1", "rank": 4}'
    found = parse_lines([(0, line)], 0)
    assert [one.rank for one in found] == [4, 4, 4]
    assert found[-1].text == "KeyError: 1"
    apart = r'{"msg": "failed", "exc_info": "Traceback (most recent call last):\nKeyError: 1"}'
    assert [one.text for one in parse_lines([(0, apart)], 0)][::2] == ["failed", "KeyError: 1"]


def test_a_logs_own_rank_wins() -> None:
    assert [one.rank for one in parse_lines([(0, "[rank3]: x"), (1, "y")], 0, rank=5)] == [5, 5]
