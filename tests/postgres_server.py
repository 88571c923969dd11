"""A real Postgres for tests: a server of its own in a folder of its own, at a unix socket that only we can open."""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.linux import own_process_settings

_NAMED = "HOLDFAST_TEST_POSTGRES"  # for programs that a test starts
_UP_S = 60.0
_CLONE_NEWNET = 0x40000000
# As small as it goes; data outlives a kill of the server, but not one of the machine.
_SMALL = (
    "fsync=off",
    "shared_buffers=8MB",
    "max_connections=60",
    "autovacuum=off",
    "dynamic_shared_memory_type=mmap",  # in its folder: a server that is killed would leave it in /dev/shm
)


def find_binaries() -> Path | None:
    """Where initdb is: on the path, or where Debian puts it."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class PostgresServer:
    def __init__(self, network: int = 0, address: str = "") -> None:
        """`network` is a process whose network the server is in, where it listens at `address` for everybody."""
        self._network, self._address = network, address
        found = find_binaries()
        if found is None:
            pytest.skip("there is no Postgres here (initdb)")
        self._binaries = found
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-pg-"))
        self._user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None  # it does not run as root
        if self._user:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self.url = f"postgres:///postgres?host={self.folder}&user=postgres"
        command = ["initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._start(command).wait(_UP_S)
        if address:
            self.url = f"postgres://postgres@{address}/postgres"
            with (self.folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write("host all all all trust\n")
        self.up()

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        front, user = os.getpid(), self._user
        namespace = os.open(f"/proc/{self._network}/ns/net", os.O_RDONLY) if self._network else -1
        libc = ctypes.CDLL(None)  # loaded here, as little may be done between fork and exec

        def become() -> None:
            if namespace >= 0:
                libc.setns(namespace, _CLONE_NEWNET)
            if user:
                os.setgroups([])
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
            own_process_settings.die_with(front)  # postgres ends in order then, and at once

        argv = [str(self._binaries / command[0]), *command[1:]]
        with open(self.folder / "log", "ab") as log:
            (self.folder / "log").chmod(0o666)
            env = {"PATH": os.environ["PATH"]}
            try:
                return subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log, preexec_fn=become, env=env)  # noqa: PLW1509
            finally:
                if namespace >= 0:
                    os.close(namespace)

    def up(self) -> None:
        """Start it, and wait until it answers."""
        small = (*_SMALL, f"listen_addresses={self._address}")
        options = [word for option in small for word in ("-c", option)]
        self.process = self._start(["postgres", "-D", "data", "-k", str(self.folder), *options])
        until = time.monotonic() + _UP_S
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(f"postgres:///postgres?host={self.folder}&user=postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """What a crash of the server's machine does: nobody is told, nothing is written any more."""
        os.kill(self.process.pid, signal.SIGQUIT)  # the server's own word for that; its children end with it
        self.process.wait(_UP_S)

    def freeze(self, number: int = signal.SIGSTOP) -> None:
        """Stop it and all its sessions, or let them go on with SIGCONT."""
        for pid in (self.process.pid, *_children(self.process.pid)):
            os.kill(pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[str]:
    """The address of a server that nobody stops; programs that a test starts find it too."""
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    server = PostgresServer()
    os.environ[_NAMED] = server.url
    yield server.url
    del os.environ[_NAMED]
    server.end()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of this test alone, which may strike it."""
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    server = PostgresServer()
    yield server
    server.end()


def named_url() -> str:
    return os.environ[_NAMED]
