"""The oracle sees a state that differs, a sample that is missing or doubled, a process and a file that are left."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.chaos.matrix import job_checks
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Begin
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.journal_entry import Decision, Entry


def leave(folder: Path, rank: int, *lines: dict[str, object] | str) -> None:
    with (folder / f"trace-{rank}.jsonl").open("a") as file:
        for line in lines:
            file.write(line if isinstance(line, str) else json.dumps(line) + "\n")


def step(number: int, digest: str, *samples: int) -> dict[str, object]:
    return {"step": number, "digest": digest, "samples": samples}


def test_the_newest_line_of_a_step_counts(tmp_path: Path) -> None:
    leave(tmp_path, 0, {"from": 0, "source": "none"}, step(1, "a", 1), step(2, "bad", 2))
    [trace] = job_checks.open_traces(tmp_path, 1).values()
    assert trace.read().steps[2][0] == "bad"
    leave(tmp_path, 0, {"from": 1, "source": "memory"}, step(2, "b", 2), '{"step": 3, "dig')
    assert trace.read().steps == {1: ("a", (1,)), 2: ("b", (2,))} and trace.last == 2
    assert trace.restores == [(0, "none"), (1, "memory")]
    calm = {0: job_checks.RankTrace(tmp_path / "none")}
    calm[0].steps = {1: ("a", (1,)), 2: ("x", (2,))}
    assert job_checks.count_differing({0: trace}, calm, range(1, 3)) == (1, 2)
    assert job_checks.count_differing({0: trace}, calm, range(1, 2)) == (0, 1)


def test_samples_that_are_lost_or_seen_twice(tmp_path: Path) -> None:
    leave(tmp_path, 0, step(1, "a", 1, 2), step(2, "b", 3, 4))
    leave(tmp_path, 1, step(1, "a", 5, 6), step(2, "b", 7, 8))
    found = {rank: trace.read() for rank, trace in job_checks.open_traces(tmp_path, 2).items()}
    assert job_checks.check_samples(found, 2) == []
    leave(tmp_path, 1, step(2, "b", 7, 4))
    found[1].read()
    assert job_checks.check_samples(found, 2) == ["1 samples were seen twice"]
    assert job_checks.check_samples(found, 1) == [], "a stage that others feed draws nothing of its own"
    del found[0].steps[1]
    [lost, _] = job_checks.check_samples(found, 2)
    assert re.search(r"^rank 0 .* step 1$", lost)


@pytest.mark.e2e
def test_an_orphan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "_SETTLE_S", 0.2)
    code = "import time; print('up', flush=True); time.sleep(600)"
    env = os.environ | {job_checks.MARK: "mine"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        [said] = job_checks.find_orphans("mine")
        assert str(process.pid) in said and job_checks.find_orphans("other") == []
    finally:
        process.kill()
        process.communicate()
    assert job_checks.find_orphans("mine") == []


LEAVING = """
import mmap, os, sys, time
place = sys.argv[1]
for name in ("mapped", "opened", f"torch_{os.getpid()}_77"):
    file = open(f"{place}/{name}", "w+b")
    file.truncate(4096)
    if name == "mapped":
        memory = mmap.mmap(file.fileno(), 4096)
    if name != "opened":
        file.close()
    else:
        kept = file
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.e2e
def test_what_a_job_leaves_in_shared_memory_is_seen_and_what_others_do_is_not(tmp_path: Path) -> None:
    (tmp_path / "torch_1_before").touch()
    mine, other = job_checks.SharedMemoryWatch("mine", tmp_path), job_checks.SharedMemoryWatch("other", tmp_path)
    env = os.environ | {job_checks.MARK: "mine"}
    process = subprocess.Popen([sys.executable, "-c", LEAVING, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        (tmp_path / f"torch_{process.pid + 1}_78").touch()
        mine.note_users()
        other.note_users()
    finally:
        process.kill()
        process.communicate()
    names = ("mapped", "opened", f"torch_{process.pid}_77")
    assert [said.split()[0] for said in mine.list_leftovers()] == list(names)
    assert other.list_leftovers() == [], "of another job of the machine"
    for name in names:
        (tmp_path / name).unlink()
    (tmp_path / "holdfast-slots").touch()
    assert [said.split()[0] for said in mine.list_leftovers()] == ["holdfast-slots"]


def test_a_journal_that_decides_otherwise_is_seen(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    begin = Begin(job=Job(run_id="a", min_nodes=1, max_nodes=1), limits=Limits())
    journal.append(Entry(seq=1, at=1.0, event=begin, decision=Decision(reason="made up")), True)
    journal.close()
    [said] = job_checks.check_record(tmp_path)
    assert said.startswith("entry 1 ")
    shutil.rmtree(tmp_path)
    assert "journal.db" in job_checks.check_record(tmp_path)[0]
