"""The store of past failures: private, bounded, locked; what a person said outlives what others say."""

import contextlib
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config import ConfigError
from holdfast.logs.past_cases import PastCase, PastCases

TORN = ("ZorbError: frame 4711 of the shard is torn", "zorb: mount lost its backend 17")
HOT = ("thermal: the fan of tray 3 has failed", "ERROR: kiln is too hot to fire")


def failure(lines: tuple[str, ...] = TORN, at: float = 1.0, **more: object) -> PastCase:
    return PastCase(**{"lines": lines, "klass": "data_corrupt", "said_by": "rules", "at": at} | more)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> PastCases:
    return PastCases(tmp_path / "home" / "past.json")


def test_the_nearest_comes_first(store: PastCases) -> None:
    store.keep_case(failure(HOT))
    store.keep_case(failure(TORN))
    near = store.find_nearest(("ZorbError: frame 1 of the shard is torn", "zorb: mount lost its backend 2"))
    assert [(one.likeness, one.case.lines) for one in near] == [(1.0, TORN)]
    assert store.find_nearest(("nothing of the sort",)) == ()


def test_the_same_failure_is_counted(store: PastCases) -> None:
    id = store.keep_case(failure(klass="node_failure", said_by="person", note="the rack"))
    store.note_outcome(id, "restarted, and training went on")
    store.keep_case(failure(at=2.0))
    (kept,) = store.read_all()
    assert (kept.times, kept.at, kept.outcome) == (2, 2.0, "restarted, and training went on")
    assert (kept.klass, kept.said_by, kept.note) == ("node_failure", "person", "the rack"), "a person has said it"
    store.keep_case(failure(at=3.0, klass="disk_full", said_by="person"))
    (kept,) = store.read_all()
    assert kept.klass == "disk_full", "and may say otherwise"


def test_it_is_private(store: PastCases, tmp_path: Path) -> None:
    store.keep_case(failure())
    files = list((tmp_path / "home").iterdir())
    assert len(files) == 2
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_it_is_bounded_and_corrections_stay(store: PastCases) -> None:
    words = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nprstvxz"]
    assert len(words) == 280
    store.keep_case(failure((f"{words[0] * 3} is broken for good",), at=0.0, said_by="person"))
    with store._changing() as kept:
        kept += [failure((f"{word} has failed", f"{word} {word}x"), at=float(n)) for n, word in enumerate(words * 2, 1)]
    left = store.read_all()
    assert len(left) == 300
    assert [past.at for past in left] == [0.0, *map(float, range(262, 561))]


@pytest.mark.parametrize("content", [b"", b"{}", b"[{}]", b"\xff" * 10, b"[" * 99_999, b"[" + b" " * (9 << 20)])
def test_a_damaged_file_is_one_sentence(store: PastCases, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "home" / "past.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))} "):
        store.keep_case(failure())
    assert path.read_bytes() == content


# Each says that it is there, and they begin together.
KEEP = """
import sys
from pathlib import Path
from holdfast.logs.past_cases import PastCase, PastCases
print(flush=True)
sys.stdin.read()
for part in "abcdefghijklmnopqrst":
    lines = (f"{sys.argv[2]} has failed in its {part * 4} part",)
    PastCases(Path(sys.argv[1])).keep_case(PastCase(lines=lines, klass="x", said_by="rules", at=1.0))
"""


@pytest.mark.e2e
def test_jobs_write_at_once(store: PastCases, tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as running:
        jobs: list[subprocess.Popen[bytes]] = []
        for word in ("zorblax", "quux", "kiln", "pump"):
            command = [sys.executable, "-c", KEEP, str(tmp_path / "home" / "past.json"), word]
            jobs.append(running.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe)))
        for job in jobs:
            assert job.stdout and job.stdout.readline()
        for job in jobs:
            assert job.stdin
            job.stdin.close()
    assert [job.returncode for job in jobs] == [0, 0, 0, 0]
    assert sum(past.times for past in store.read_all()) == 80
