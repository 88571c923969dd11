"""The fork server: starts what it is asked to, for its own user, and ends with whoever started it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.wire import program_fork_server, unix_sockets
from holdfast.wire.program_fork_server import ForkAnswer, ForkServer, Later
from tests.cli.driver import gone, until
from tests.conftest import job_environment

pytestmark = pytest.mark.e2e

SLEEPER = """
import os, sys, time
def main():
    os.write(1, f"{sys.argv[1]}\\n".encode())  # at once: one that is killed leaves no half of a line
    time.sleep(60)
if __name__ == "__main__":
    main()
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "fork.sock"
        (folder / "sleeper.py").write_text(SLEEPER)
        self.server: ForkServer | None = None

    @property
    def env(self) -> dict[str, str]:
        """With the mark of the test that runs now."""
        return job_environment(PYTHONPATH=f"{job_environment()['PYTHONPATH']}:{self.folder}")

    def serve(self, *preload: str) -> ForkServer:
        self.server = ForkServer(self.path, preload or ("sleeper",), self.env, 2)
        return self.server

    def start(self, word: str = "here", **env: str) -> program_fork_server.ProgramProcess:
        program = Program(module="sleeper", args=(word,), env=self.env | env, cwd=str(self.folder))
        with (self.folder / "out").open("ab") as out:
            return program_fork_server.start_program(program, OpenFiles(stdout=out.fileno(), stderr=2), self.path)

    def heard(self, word: str) -> None:
        until(lambda: word in (self.folder / "out").read_text().split(), f"the word {word}")


@pytest.fixture
def place(tmp_path: Path, no_orphans: str) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    if made.server:
        made.server.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One whose server is up, for all tests that only ask it."""
    made = Place(tmp_path_factory.mktemp("shared"))
    server = made.serve("sleeper", "there_is_no_such_module")
    yield made
    server.close()


def is_forked(pid: int, server: ForkServer) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(server._process.pid)


def test_a_program_is_forked_and_looks_as_if_it_were_not(shared: Place, no_orphans: str) -> None:
    server = shared.server
    assert server
    process = shared.start("one", HOLDFAST_MARK="mine")
    shared.heard("one")
    assert is_forked(process.pid, server) and not process.is_over()
    assert Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[1:5] == ["-u", "-m", "sleeper", "one"]
    assert b"HOLDFAST_MARK=mine" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    process.kill()
    assert process.is_over() and gone(process.pid)
    process.close()


def test_it_ends_with_whoever_started_it_and_its_children_do_not(place: Place) -> None:
    server = place.serve()
    process = place.start()
    server.close()
    assert not place.path.exists() and not process.is_over()
    process.kill()
    process.close()
    place.server = None


def test_without_a_server_programs_are_executed(place: Place) -> None:
    process = place.start("alone")
    place.heard("alone")
    process.kill()
    process.close()


def test_a_server_that_cannot_come_up_is_done_without(place: Place) -> None:
    (place.folder / "broken.py").write_text("raise RuntimeError('no')")
    place.serve("broken")
    process = place.start("still")
    place.heard("still")
    process.kill()
    process.close()


def test_what_cannot_be_had_is_left_out(shared: Place, no_orphans: str) -> None:
    server = shared.server  # it was told to import a module that is not there
    assert server
    process = shared.start()
    assert is_forked(process.pid, server)
    process.kill()
    process.close()


def test_how_a_program_ended_is_told_to_whoever_asks(shared: Place, no_orphans: str) -> None:
    process = shared.start("two")
    shared.heard("two")
    assert program_fork_server.find_exit_code(shared.path, process.pid) is None, "it runs"
    process.kill()
    until(lambda: program_fork_server.find_exit_code(shared.path, process.pid) == -signal.SIGKILL, "its end")
    assert program_fork_server.find_exit_code(shared.path, os.getpid()) is None, "no child of the server"
    assert program_fork_server.find_exit_code(None, process.pid) is None
    assert program_fork_server.find_exit_code(shared.folder / "none", process.pid) is None
    process.close()


def test_nonsense_is_refused_and_the_next_one_served(shared: Place, no_orphans: str) -> None:
    server = shared.server
    assert server
    with unix_sockets.connect(shared.path) as client:
        client.sendall(b"nonsense")
        client.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: client.recv(4096), b"")).removeprefix(program_fork_server._BEGUN)
    answer = msgspec.msgpack.decode(said, type=ForkAnswer)
    assert answer.pid == 0 and answer.error
    process = shared.start()
    assert is_forked(process.pid, server)
    process.kill()
    process.close()


def test_a_folder_that_is_not_there(shared: Place, no_orphans: str) -> None:
    program = Program(module="sleeper", args=(), env=shared.env, cwd=str(shared.folder / "none"))
    process = program_fork_server.start_program(program, OpenFiles(stdout=2, stderr=2), shared.path)
    until(process.is_over, "its end")
    process.close()


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
client.shutdown(socket.SHUT_WR)
print(b"".join(iter(lambda: client.recv(4096), b"")))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
def test_another_user_is_refused(shared: Place, no_orphans: str) -> None:
    for path in (shared.path, shared.folder, *shared.folder.parents):  # as if all were open to everybody
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(0o711)
    shared.path.chmod(0o777)
    words = [sys.executable, "-I", "-c", STRANGER, str(shared.path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert program_fork_server.NOT_YOURS in done.stdout, done


def test_one_that_is_stopped_is_not_waited_for_and_starts_nothing_later(place: Place) -> None:
    server = place.serve()
    place.start("first").kill()
    os.kill(server._process.pid, signal.SIGSTOP)
    alone = place.start("alone")
    assert not is_forked(alone.pid, server)
    place.heard("alone")
    os.kill(server._process.pid, signal.SIGCONT)
    after = place.start("after")
    place.heard("after")
    assert is_forked(after.pid, server)
    assert (place.folder / "out").read_text().split().count("alone") == 1, "who has left wants nothing any more"
    for process in (alone, after):
        process.kill()
        process.close()


PARENT = """
import os, sys, time
from pathlib import Path
from holdfast.wire.program_fork_server import ForkServer
server = ForkServer(Path(sys.argv[1]), ("slow_to_import",), dict(os.environ), 2)
print(server._process.pid, flush=True)
time.sleep(60)
"""


def test_it_dies_with_its_parent_even_while_it_imports(place: Place) -> None:
    (place.folder / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    words = [sys.executable, "-c", PARENT, str(place.path)]
    with subprocess.Popen(words, env=place.env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        server = int(parent.stdout.readline())
        assert not gone(server)
        parent.kill()
    until(lambda: gone(server), "its end")
    place.serve()  # and the next one can take its place


IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listener.listen()
print("there", flush=True)
print(listener.accept()[0].recv(4096))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
def test_the_server_of_another_user_is_told_nothing(place: Place) -> None:
    words = [sys.executable, "-I", "-c", IMPOSTOR, str(place.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout and impostor.stdout.readline() == "there\n"
        process = place.start("alone")
        assert impostor.stdout.read() == "b''\n"
    place.heard("alone")
    process.kill()
    process.close()


def test_many_at_once(shared: Place, no_orphans: str) -> None:
    began_at = time.monotonic()
    found = [shared.start(f"number-{number}") for number in range(20)]
    for number, process in enumerate(found):
        shared.heard(f"number-{number}")
        process.kill()
        process.close()
    assert len({process.pid for process in found}) == 20 and time.monotonic() - began_at < 60


LATE = "from pathlib import Path\nPath(__file__).with_name('late').touch()\n"


def test_what_nobody_waits_for_is_imported_when_nobody_asks(place: Place) -> None:
    (place.folder / "latecomer.py").write_text(LATE)
    late = place.folder / "late"
    place.server = ForkServer(place.path, ("sleeper",), place.env, 2, Later(("latecomer",), quiet_s=2.0))
    first = place.start("first")
    assert is_forked(first.pid, place.server) and not late.exists()
    until(late.exists, "the module that nobody waits for")
    second = place.start("second")
    assert is_forked(second.pid, place.server)
    for process in (first, second):
        process.kill()
        process.close()
