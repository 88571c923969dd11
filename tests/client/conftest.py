"""Ranks as a zygote makes them, and as a fresh interpreter does."""

import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.wire import program_fork_server
from holdfast.wire.progress_environment import KEEPER
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.rank_memory.slot_writer import SLOT_BYTES, open_slot_memory
from tests.client.fake_keeper import FakeKeeper
from tests.conftest import STUB, job_environment

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Rank(NamedTuple):
    key: str
    pid: int
    folder: Path

    def ended(self, code: int) -> Ended:
        return Ended(code, *(_text(self.folder / name) for name in ("out", "err")))


class ForkedHolder:
    """A stub holder that a fork server has forked, and so its zygote; it looks like a Popen."""

    def __init__(self, preload: tuple[str, ...], folder: Path, server: Path) -> None:
        orders, order = os.pipe()
        news, tell = os.pipe()
        env = make_rank_environment(job_environment())
        program = Program(module=STUB, args=preload, env=env, cwd=str(folder))
        files = OpenFiles(stdout=tell, stderr=2, keep=(orders,))
        self._process = program_fork_server.start_program(program, files, server)
        os.close(orders)
        os.close(tell)
        self.pid, self.stdin, self.stdout = self._process.pid, os.fdopen(order, "w"), os.fdopen(news)

    def __enter__(self) -> "ForkedHolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self._process.close()

    def wait(self, timeout: float) -> None:
        until_at = time.monotonic() + timeout
        while not self._process.is_over():
            if time.monotonic() > until_at:
                raise subprocess.TimeoutExpired(STUB, timeout)
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()


class Zygote:
    """The stub holder with its zygote; both are forked where there is a server that has imported what they need."""

    def __init__(
        self,
        preload: tuple[str, ...],
        folder: Path,
        env: dict[str, str] = ENV,
        server: Path | None = None,
        ranks: int = 0,
    ) -> None:
        self.folder = folder
        self.env = env
        command = [sys.executable, str(Path(__file__).with_name("stub_holder.py")), *preload]
        self.holder: ForkedHolder | subprocess.Popen[str] = (
            ForkedHolder(preload, folder, server)
            if server
            else subprocess.Popen(
                command, stdin=-1, stdout=-1, env=env | {"STUB_RANKS": str(ranks)}, cwd=folder, text=True
            )
        )
        self.pid: int = self.hear()["zygote"]
        self.warm = self.hear()
        self._codes: dict[str, int] = {}
        self._forks = 0

    def fork(self, *argv: str, module: bool = False, cwd: Path | None = None, **env: str) -> Rank:
        return self.forks([env], *argv, module=module, cwd=cwd)[0]

    def forks(
        self, envs: list[dict[str, str]], *argv: str, module: bool = False, cwd: Path | None = None
    ) -> list[Rank]:
        """One rank per environment, all asked for at once."""
        folders = {}
        for env in envs:
            self._forks += 1
            key = f"rank-{self._forks}"
            folders[key] = self.folder / key
            folders[key].mkdir()
            fork: dict[str, Any] = {"key": key, "argv": argv, "module": module, "env": self.env | env}
            fork["cwd"] = str(cwd or self.folder)
            fork |= {"stdout": str(folders[key] / "out"), "stderr": str(folders[key] / "err")}
            self.tell(fork)
        found = [self.hear_of("pid") for _ in envs]
        return [Rank(news["key"], news["pid"], folders[news["key"]]) for news in found]

    def wait(self, rank: Rank) -> Ended:
        while rank.key not in self._codes:
            news = self.hear_of("code")
            self._codes[news["key"]] = news["code"]
        return rank.ended(self._codes.pop(rank.key))

    def run(self, *argv: str, module: bool = False, cwd: Path | None = None, **env: str) -> Ended:
        return self.wait(self.fork(*argv, module=module, cwd=cwd, **env))

    def close(self) -> None:
        with self.holder as holder:
            assert holder.stdin
            holder.stdin.close()
            try:
                holder.wait(timeout=20)
            except subprocess.TimeoutExpired:
                holder.kill()  # all below it die with it
                raise

    def tell(self, fork: dict[str, Any]) -> None:
        assert self.holder.stdin
        self.holder.stdin.write(json.dumps(fork) + "\n")
        self.holder.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.holder.stdout
        line = self.holder.stdout.readline()
        assert line, "the stub holder has ended"
        news: dict[str, Any] = json.loads(line)
        return news

    def hear_of(self, what: str) -> dict[str, Any]:
        """The next news with this field; exits that come earlier are kept."""
        while what not in (news := self.hear()):
            if "code" not in news:
                raise OSError(str(news))
            self._codes[news["key"]] = news["code"]
        return news


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that has preloaded nothing, and is warm at once."""
    zygote = Zygote((), tmp_path_factory.mktemp("bare"))
    yield zygote
    zygote.close()


@pytest.fixture
def group() -> Iterator[Callable[[], list[dict[str, str]]]]:
    """The environments of four ranks that find each other; a new store with every call."""
    from torch.distributed import TCPStore

    stores = []

    def environments() -> list[dict[str, str]]:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[-1].port)}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(4)]

    yield environments
    stores.clear()


@pytest.fixture
def arena() -> Iterator[tuple[str, mmap.mmap]]:
    """Memory for slots as the holder keeps it: its path, and its content."""
    fd = os.memfd_create("slots")
    os.ftruncate(fd, 4 * SLOT_BYTES)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    with open_slot_memory(path) as memory:
        yield path, memory
    os.close(fd)


def fresh(cwd: Path, *argv: str, module: bool = False, **env: str) -> Ended:
    """What `python -u` makes of the same command."""
    folder = cwd / "fresh"
    folder.mkdir()
    command = [sys.executable, "-u", *(["-m"] if module else []), *argv]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        started = subprocess.Popen(
            command, stdin=-3, stdout=out, stderr=err, env=ENV | env, cwd=cwd, start_new_session=True
        )
    return Rank("", started.pid, folder).ended(started.wait(timeout=60))


def _text(path: Path) -> str:
    return re.sub("0x[0-9a-f]+", "0x", path.read_text(errors="surrogateescape"))


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKeeper]:
    """A keeper on this node."""
    fake = FakeKeeper(tmp_path)
    monkeypatch.setenv(KEEPER, str(fake.path))
    yield fake
    fake.close()
