"""A lease in files: one host at a time has it, whoever sleeps, dies or is slow."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from holdfast.journal import file_lease, lease_term
from holdfast.journal.file_lease import FileLease
from holdfast.journal.journal_errors import LeaseLostError

LASTS_S = 30.0


class Clock:
    """The time since the machine booted, for every host of a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_term, "boot_time", clock)
    monkeypatch.setattr(file_lease, "boot_time", clock)
    return clock


def lease(folder: Path, host: str, said: list[str] | None = None) -> FileLease:
    return FileLease(folder / "lease", f"{host} boot-of-{host}", (said if said is not None else []).append)


def test_another_host_waits_for_as_long_as_a_lease_lasts_and_the_one_that_slept_may_not_act(
    tmp_path: Path, clock: Clock
) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.try_to_take()
    first.check()
    assert not second.try_to_take() and second.carrier_text() == "a"
    clock.now += LASTS_S - 1.0
    assert not second.try_to_take()
    with pytest.raises(LeaseLostError):
        first.check()  # before anybody can have taken it
    clock.now += 1.5
    assert second.try_to_take()
    second.check()
    with pytest.raises(LeaseLostError):
        first.renew()
    second.renew()
    assert sorted(os.listdir(tmp_path / "lease")) == ["1", "2"]


def test_a_renewal_keeps_it_and_one_that_took_too_long_does_not(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.try_to_take() and not second.try_to_take()
    for _ in range(10):
        clock.now += 20.0
        first.renew()
        assert not second.try_to_take(), "it has changed since"
    write = os.fsync

    def slow(fd: int) -> None:
        clock.now += LASTS_S  # the server of the file system was away
        write(fd)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(LeaseLostError):
        first.renew()


def test_one_that_sees_its_successor_ends_though_its_time_is_not_over(tmp_path: Path, clock: Clock) -> None:
    first, again = lease(tmp_path, "a"), lease(tmp_path, "a")
    assert first.try_to_take()
    assert again.try_to_take(), "a controller of the same host need not wait"
    first.check()
    with pytest.raises(LeaseLostError, match=r"^a has "):
        first.renew()


async def test_a_lease_that_was_given_up_is_free_at_once(tmp_path: Path, clock: Clock) -> None:
    first, second = lease(tmp_path, "a"), lease(tmp_path, "b")
    assert first.try_to_take() and not second.try_to_take()
    await first.let_go()
    first.renew()  # one that was under way
    assert second.try_to_take()


def test_one_that_is_over_is_not_given_up_for_its_successor(tmp_path: Path, clock: Clock) -> None:
    first, second, third = (lease(tmp_path, host) for host in "abc")
    assert first.try_to_take() and not second.try_to_take()
    clock.now += LASTS_S + 1.0
    assert second.try_to_take() and not third.try_to_take()
    asyncio.run(first.let_go())
    assert not third.try_to_take(), "it is the second one's"


def test_of_many_that_want_it_one_gets_it(tmp_path: Path, clock: Clock) -> None:
    old = lease(tmp_path, "old")
    assert old.try_to_take()
    wanting = [lease(tmp_path, f"h{number}") for number in range(8)]
    assert not any(one.try_to_take() for one in wanting)
    clock.now += LASTS_S + 1.0
    begin, got = threading.Barrier(len(wanting)), list[FileLease]()

    def want(one: FileLease) -> None:
        begin.wait()
        if one.try_to_take():
            got.append(one)

    threads = [threading.Thread(target=want, args=(one,)) for one in wanting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = got
    winner.renew()
    with pytest.raises(LeaseLostError):
        old.renew()


async def test_it_is_kept_while_the_file_system_fails_for_a_moment_and_no_longer(tmp_path: Path) -> None:
    said: list[str] = []
    kept = FileLease(tmp_path / "lease", "a boot", said.append, lasts_s=0.6)
    await kept.take()
    keeping = asyncio.create_task(kept.keep())
    await asyncio.sleep(0.9)
    kept.check()
    (tmp_path / "lease").rename(tmp_path / "away")
    (tmp_path / "lease").write_text("no folder")
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(keeping, 30)
    with pytest.raises(LeaseLostError):
        kept.check()


async def test_who_waits_says_for_whom_once(tmp_path: Path) -> None:
    said: list[str] = []
    first = FileLease(tmp_path / "lease", "a boot", said.append, lasts_s=0.6)
    second = FileLease(tmp_path / "lease", "b boot", said.append, lasts_s=0.6)
    await first.take()
    await asyncio.wait_for(second.take(), 30)
    assert said == [f"the lease in {tmp_path}/lease is held by a; waiting until it is free"]
    second.check()


def test_a_front_waits_for_a_silent_holder_and_not_for_one_that_renews(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease(tmp_path, "a")
    assert first.try_to_take()

    def renewing(seconds: float) -> None:
        clock.now += seconds
        first.renew()

    monkeypatch.setattr("time.sleep", renewing)
    assert not file_lease.take_when_quiet(lease(tmp_path, "b"))
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    assert file_lease.take_when_quiet(lease(tmp_path, "b"))
