"""Ranks as a zygote makes them, and as a fresh interpreter does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.client.zygote import DEFAULT_PRELOAD

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

    def texts(self) -> tuple[str, str]:
        return (self.folder / "out").read_text(), (self.folder / "err").read_text()


class Zygote:
    """The stub holder with its zygote."""

    def __init__(self, preload: tuple[str, ...], folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, str(Path(__file__).with_name("stub_holder.py")), *preload]
        self.holder = subprocess.Popen(command, stdin=-1, stdout=-1, env=ENV, cwd=folder, text=True)
        self.pid: int = self._hear()["zygote"]
        self.warm = self._hear()
        self._codes: dict[str, int] = {}
        self._forks = 0

    def fork(self, *argv: str, module: bool = False, cwd: Path | None = None, **env: str) -> Rank:
        return self.forks([env], *argv, module=module, cwd=cwd)[0]

    def forks(
        self, envs: list[dict[str, str]], *argv: str, module: bool = False, cwd: Path | None = None, logs: str = ""
    ) -> list[Rank]:
        """One rank per environment, all asked for at once."""
        folders = {}
        for env in envs:
            self._forks += 1
            key = f"rank-{self._forks}"
            folders[key] = self.folder / key
            folders[key].mkdir()
            fork: dict[str, Any] = {"key": key, "argv": argv, "module": module, "env": ENV | env}
            fork["cwd"] = str(cwd or self.folder)
            fork |= {name: logs or str(folders[key] / short) for name, short in (("stdout", "out"), ("stderr", "err"))}
            self._tell(fork)
        found = [self._hear_of("pid") for _ in envs]
        return [Rank(news["key"], news["pid"], folders[news["key"]]) for news in found]

    def wait(self, rank: Rank) -> Ended:
        while rank.key not in self._codes:
            news = self._hear_of("code")
            self._codes[news["key"]] = news["code"]
        return Ended(self._codes.pop(rank.key), *rank.texts())

    def run(self, *argv: str, module: bool = False, cwd: Path | None = None, **env: str) -> Ended:
        return self.wait(self.fork(*argv, module=module, cwd=cwd, **env))

    def close(self) -> None:
        self.holder.communicate(timeout=30)

    def _tell(self, fork: dict[str, Any]) -> None:
        assert self.holder.stdin
        self.holder.stdin.write(json.dumps(fork) + "\n")
        self.holder.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.holder.stdout
        line = self.holder.stdout.readline()
        assert line, "the stub holder has ended"
        news: dict[str, Any] = json.loads(line)
        return news

    def _hear_of(self, what: str) -> dict[str, Any]:
        """The next news with this field; exits that come earlier are kept."""
        while what not in (news := self._hear()):
            if "code" not in news:
                raise OSError(str(news))
            self._codes[news["key"]] = news["code"]
        return news


Start = Callable[..., Zygote]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that has preloaded nothing, and is warm at once."""
    zygote = Zygote((), tmp_path_factory.mktemp("bare"))
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote as the holder starts it."""
    zygote = Zygote(DEFAULT_PRELOAD, tmp_path_factory.mktemp("warm"))
    yield zygote
    zygote.close()


def fresh(folder: Path, *argv: str, module: bool = False, cwd: Path | None = None, **env: str) -> Ended:
    """What `python -u` makes of the same command."""
    command = [sys.executable, "-u", *(["-m"] if module else []), *argv]
    with (folder / "fresh.out").open("w") as out, (folder / "fresh.err").open("w") as err:
        code = subprocess.run(
            command, stdin=-3, stdout=out, stderr=err, env=ENV | env, cwd=cwd or folder, check=False, timeout=60
        ).returncode
    return Ended(code, (folder / "fresh.out").read_text(), (folder / "fresh.err").read_text())
