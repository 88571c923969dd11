"""The judge: last words are judged beside the agent, for so long and no longer, and nobody waits for it in vain."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from holdfast.agent.rank import last_words_judge, last_words_judge_client
from holdfast.agent.rank.last_words_judge import JudgeProcess, find_full_disk, load_catalog
from holdfast.agent.rank.last_words_judge_client import JudgeClient
from holdfast.config import WordLimits
from holdfast.core.detect.crash import alarm_of
from holdfast.core.log_analysis.failure_catalog import CatalogRow, FailureCatalog
from holdfast.logs import catalog_files, user_rows
from holdfast.logs.secret_masking import Masker
from holdfast.model.observation import Exit
from holdfast.wire import holder_messages
from tests.cli.driver import until

pytestmark = pytest.mark.e2e

# No single repeat of it is wrong, and a line of a thousand letters takes it longer than anybody lives.
ENDLESS = CatalogRow(klass="data_corrupt", source="a test", pattern="stall.*x.*x.*x.*!", sample="stall xxx!")
HOSTILE = "stall" + "x" * 1990
EXIT = Exit(node="n0", generation=1, rank=3, code=1, at=1.0, latched="ValueError: odd")
BOOM = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: odd\n'


def test_such_a_row_is_none_that_we_refuse() -> None:
    """Or the rest of this file tests nothing that can happen."""
    built_in = catalog_files.load_built_in()
    assert not user_rows.find_row_fault(ENDLESS, built_in.rows, frozenset(built_in.classes))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[JudgeClient, int]]:
    """A judge, as a fork of this process, and its pid."""
    monkeypatch.setattr(last_words_judge, "DEADLINE_S", 1.0)
    monkeypatch.setattr(last_words_judge_client, "_WAIT_S", 30.0)  # its fork may wait for a processor
    ours, theirs = holder_messages.make_socket_pair()
    known = FailureCatalog(
        (*catalog_files.load_built_in().rows, ENDLESS), tuple(catalog_files.load_built_in().classes.values())
    )
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            JudgeProcess(theirs, known, Masker(hosts=False)).run()
        finally:
            os._exit(0)
    theirs.close()
    yield JudgeClient(ours, Masker(hosts=False)), pid
    ours.close()
    until(lambda: os.waitpid(pid, os.WNOHANG)[0], "the end of a judge that nobody asks any more")


@pytest.fixture
async def gap_s() -> AsyncIterator[Callable[[], float]]:
    """The longest time for which this loop stood still."""
    gaps = [0.0]

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    async with asyncio.TaskGroup() as around:
        ticking = around.create_task(tick())
        yield lambda: max(gaps)
        ticking.cancel()


def said(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "stderr.log").write_text(text)
    return folder


async def test_it_finds_what_we_would_find(bench: tuple[JudgeClient, int], tmp_path: Path) -> None:
    found = await bench[0].judge_exit(EXIT, said(tmp_path, BOOM))
    exit = msgspec.structs.replace(EXIT, words=tuple(BOOM.splitlines()))
    assert found == alarm_of(exit, catalog_files.load_built_in())
    assert found.signature == "python_exception 1 train.py:3"


def test_the_full_disk_that_a_rank_wrote_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"/logs": 1 << 30, "/work": 0}
    disk = SimpleNamespace(f_frsize=1, f_blocks=1 << 40, f_files=0, f_favail=0)

    def look(path: str) -> SimpleNamespace:
        if path not in free:
            raise FileNotFoundError(path)
        return SimpleNamespace(**vars(disk) | {"f_bavail": free[path]})

    monkeypatch.setattr(os, "statvfs", look)
    known, paths = catalog_files.load_built_in(), ("/none", "/logs", "/work")
    raised = alarm_of(msgspec.structs.replace(EXIT, latched="OSError: [Errno 28] No space left on device"), known)
    mute = alarm_of(msgspec.structs.replace(EXIT, latched=""), known)
    for alarm in (raised, mute):
        found = find_full_disk(alarm, paths)
        assert (found.full_disk, found.klass, found.action) == ("/work", "disk_full", "fix_config")
    other = alarm_of(EXIT, known)
    killed = msgspec.structs.replace(mute, code=-9)
    assert find_full_disk(other, paths) == other and find_full_disk(killed, paths) == killed
    free["/work"] = 1 << 20
    assert find_full_disk(raised, paths) == raised, "there is room by now"


SECRET, TOKEN, KEY = (
    "correct-horse-battery",
    "hf_" + "aB3dE5fG7hJ9kL1m",
    "MIIEow" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY" * 2,
)


@pytest.mark.parametrize("dead", [False, True], ids=["judged", "without a judge"])
async def test_what_an_alarm_quotes_is_masked(bench: tuple[JudgeClient, int], tmp_path: Path, dead: bool) -> None:
    """A secret of the environment, one that a pattern knows, and the inner lines of a key whose first is cut off."""
    latched = f"RuntimeError: login with {TOKEN} and {SECRET} failed"
    lines = [KEY, KEY, "-----END RSA PRIVATE KEY-----", "Traceback (most recent call last):"]
    lines += ['  File "train.py", line 3, in main', latched]
    client, pid = bench
    client._mask.learn([SECRET])
    if dead:
        os.kill(pid, signal.SIGKILL)
    alarm = await client.judge_exit(
        msgspec.structs.replace(EXIT, latched=latched), said(tmp_path, "\n".join(lines) + "\n")
    )
    told = str(alarm)
    assert not [secret for secret in (SECRET, TOKEN, KEY) if secret in told]
    assert alarm.reason == "exited with code 1 (RuntimeError: login with <token> and <secret> failed)"
    assert (alarm.raised, alarm.ranks, alarm.suspects) == ("RuntimeError", (3,), ("n0",))
    if not dead:
        assert alarm.evidence[:3] == ("<private key>",) * 3
        assert alarm.signature.endswith("train.py:3")


async def test_words_that_take_for_ever_stop_nobody(
    bench: tuple[JudgeClient, int], gap_s: Callable[[], float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    async with asyncio.TaskGroup() as around:
        slow = around.create_task(bench[0].judge_exit(EXIT, said(tmp_path / "slow", f"before\n{HOSTILE}\n")))
        quick = around.create_task(bench[0].judge_exit(EXIT, said(tmp_path / "quick", BOOM)))
        await quick
        assert not slow.done(), "another rank's words do not wait for them"
    assert time.monotonic() - began < 2 * last_words_judge_client._WAIT_S, "it is killed, and nobody waits for it"
    assert gap_s() < 0.9, "the loop went on"
    assert quick.result().klass == "python_exception"
    alarm = slow.result()
    assert (alarm.code, alarm.klass, alarm.reason) == (1, "", "exited with code 1 (ValueError: odd)")
    assert [line[:6] for line in alarm.evidence] == ["before", "stallx"], "a person may read them all the same"
    assert f"more than {last_words_judge.DEADLINE_S:g} s" in caplog.text
    assert until(
        lambda: len(psutil.Process(bench[1]).children()) <= 1, "the end of who was at it; one may wait for the next"
    )
    assert (await bench[0].judge_exit(EXIT, tmp_path / "quick")).klass == "python_exception", (
        "and the next one is judged"
    )


async def test_a_judge_that_is_gone_is_done_without(bench: tuple[JudgeClient, int], tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as around:
        asked = around.create_task(bench[0].judge_exit(EXIT, said(tmp_path, HOSTILE)))
        await asyncio.sleep(0.1)
        os.kill(bench[1], signal.SIGKILL)
    for alarm in (asked.result(), await bench[0].judge_exit(EXIT, tmp_path)):
        assert alarm.reason == "exited with code 1 (ValueError: odd)"


async def test_a_judge_that_does_not_answer_is_not_waited_for(
    bench: tuple[JudgeClient, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_words_judge_client, "_WAIT_S", 0.2)
    judge = psutil.Process(bench[1])
    until(judge.children, "a fork that waits for the first request")
    stopped = [judge, *judge.children()]
    for process in stopped:
        process.suspend()
    try:
        alarm = await bench[0].judge_exit(msgspec.structs.replace(EXIT, latched=""), said(tmp_path, BOOM))
    finally:
        for process in stopped:
            process.resume()
    assert alarm.reason == "exited with code 1"


async def test_the_next_words_wait_for_no_fork(bench: tuple[JudgeClient, int], tmp_path: Path) -> None:
    judge = psutil.Process(bench[1])
    for _ in range(2):
        until(judge.children, "a fork that waits for the next request")
        judge.suspend()  # so it can fork nothing now
        try:
            assert (await bench[0].judge_exit(EXIT, said(tmp_path, BOOM))).klass == "python_exception"
        finally:
            judge.resume()
        until(lambda: not judge.children(), "the end of the fork that has judged")


async def test_a_fork_that_somebody_killed_is_replaced(bench: tuple[JudgeClient, int], tmp_path: Path) -> None:
    judge = psutil.Process(bench[1])
    until(judge.children, "a fork that waits for the first request")
    killed = judge.children()[0]
    killed.kill()
    until(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE, "its end")
    assert (await bench[0].judge_exit(EXIT, said(tmp_path, BOOM))).klass == "python_exception"


def test_a_catalog_that_was_spoilt_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "words.toml").write_text("[[row")
    assert load_catalog(WordLimits(catalog=str(tmp_path / "words.toml"))) is catalog_files.load_built_in()
    assert str(tmp_path / "words.toml") in caplog.text
