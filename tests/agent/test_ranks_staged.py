"""Ranks of a release, against a holder that is played by hand."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from holdfast.model.code_release import Release
from holdfast.model.loss_response import Ease, Skip
from holdfast.model.node_errands import LaunchHere
from holdfast.wire.holder_messages import ExecRank, PreloadZygote, RankStarted, ZygoteWarmed
from holdfast.wire.holder_zygote_messages import ForkRank
from holdfast.wire.releases.staged_release import StagedRelease
from tests.agent.test_rank_processes import Bench, close, launch_of

RELEASE = Release(number=2, digest="d", root="/proj", script="src/t.py", argv=("t.py", "--l=${local_rank}", "-x"))


def launch(generation: int, release: Release = RELEASE) -> LaunchHere:
    return msgspec.structs.replace(launch_of(generation, nproc=1), release=release)


def staged(bench: Bench, module: bool = False) -> None:
    entry = msgspec.structs.replace(bench.ranks.spec.entry, cwd="/proj/sub", module=module)
    bench.ranks.spec = msgspec.structs.replace(bench.ranks.spec, entry=entry)
    bench.releases = lambda r: StagedRelease(root=r.root, at=f"/staged/{r.digest}") if r.digest else StagedRelease()


async def started(bench: Bench, errand: LaunchHere) -> ExecRank | ForkRank:
    launching = asyncio.create_task(bench.ranks.launch_ranks(errand))
    while not isinstance(asked := await bench.hear(), ExecRank | ForkRank):
        pass
    await bench.say(RankStarted(key=asked.key, pid=9))
    assert await launching == ""
    return asked


async def test_the_script_of_the_copy_is_executed_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/proj/lib:/opt")
    bench = Bench(tmp_path)
    staged(bench)
    await bench.begin()
    errand = msgspec.structs.replace(
        launch(1), skips=(Skip(first=3, last=4),), eases=(Ease(first=5, last=6, factor=0.5),)
    )
    asked = await started(bench, errand)
    assert isinstance(asked, ExecRank)
    assert asked.argv == ("py", "-u", "/staged/d/src/t.py", "--l=0", "-x")
    assert asked.cwd == "/proj/sub"
    assert asked.env["PYTHONPATH"] == "/staged/d/lib:/opt"
    assert [asked.env[name] for name in ("HOLDFAST_RELEASE", "HOLDFAST_SKIP", "HOLDFAST_EASE")] == [
        "2",
        "3-4",
        "0.5:5-6",
    ]
    assert asked.env["RANK"] == "4"
    own = await started(bench, launch(2, Release(number=1)))
    assert isinstance(own, ExecRank)
    assert own.argv == ("py", "-u", "t.py", "--l=0"), "without a copy all is as it was"
    assert own.env["PYTHONPATH"] == "/proj/lib:/opt" and "HOLDFAST_SKIP" not in own.env
    await close(bench)


async def test_a_module_is_looked_for_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    release = msgspec.structs.replace(RELEASE, script="", argv=("pkg.train", "-x"))
    bench = Bench(tmp_path)
    staged(bench, module=True)
    await bench.begin()
    asked = await started(bench, launch(1, release))
    assert isinstance(asked, ExecRank)
    assert asked.argv == ("py", "-u", "-P", "-m", "pkg.train", "-x")
    assert asked.env["PYTHONPATH"] == "/staged/d/sub", "the counterpart of the working directory comes first"
    await close(bench)
    forking = Bench(tmp_path, zygote=True)
    staged(forking, module=True)
    await forking.begin(warm=True)
    fork = await started(forking, launch(2, release))
    assert isinstance(fork, ForkRank)
    assert (fork.path, fork.root, fork.staged) == ("/staged/d/sub", "/proj", "/staged/d")
    assert fork.argv == ("pkg.train", "-x") and fork.cwd == "/proj/sub"
    await close(forking)


async def test_another_environment_needs_another_zygote(tmp_path: Path) -> None:
    bench = Bench(tmp_path, zygote=True, cwd="/proj/sub")
    staged(bench)
    await bench.begin(warm=True)
    assert isinstance(await started(bench, launch(1)), ForkRank)
    changed = msgspec.structs.replace(RELEASE, number=3, env={"MALLOC_ARENA_MAX": "1", "PYTHONPATH": "src"})
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch(2, changed)))
    preload = await bench.hear()
    assert isinstance(preload, PreloadZygote)
    assert preload.env["MALLOC_ARENA_MAX"] == "1" and preload.key
    assert preload.env["PYTHONPATH"] == "/proj/sub/src", "the holder is elsewhere"
    await bench.say(ZygoteWarmed(ok=True))  # late news of the zygote that there was
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        bench.holder.recv(1)
    await bench.say(ZygoteWarmed(ok=True, key=preload.key))
    fork = await bench.hear()
    assert isinstance(fork, ForkRank) and fork.env["MALLOC_ARENA_MAX"] == "1"
    await bench.say(RankStarted(key=fork.key, pid=10))
    assert await launching == ""
    assert isinstance(await started(bench, launch(3, changed)), ForkRank), "it is kept for the next generation"
    launching = asyncio.create_task(bench.ranks.launch_ranks(launch(4)))
    while not isinstance(back := await bench.hear(), PreloadZygote):
        pass
    assert back.key == "" and "MALLOC_ARENA_MAX" not in back.env
    await bench.say(ZygoteWarmed(ok=False, detail="it does not stay up"))
    asked = await bench.hear()
    assert isinstance(asked, ExecRank), "where there is none, ranks are executed afresh"
    await bench.say(RankStarted(key=asked.key, pid=11))
    assert await launching == ""
    await close(bench)
