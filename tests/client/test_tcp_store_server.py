"""The store process, asked as a controller asks it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

from holdfast.client.boot.tcp_store_server import StoreServers
from holdfast.wire import unix_sockets
from tests.cli.driver import until
from tests.client.conftest import ENV

pytestmark = pytest.mark.e2e


def dial_store(run_dir: Path) -> socket.socket | None:
    try:
        return unix_sockets.connect(run_dir / "store.sock")
    except OSError:
        return None


class Controller:
    def __init__(self, run_dir: Path) -> None:
        link = until(lambda: dial_store(run_dir), "the store is up", patience_s=240)
        assert link
        self._socket = link
        self._socket.settimeout(30)
        self._file = self._socket.makefile("rwb")

    def ask(self, **question: object) -> dict[str, Any]:
        return self.send(json.dumps(question).encode() + b"\n")

    def send(self, line: bytes) -> dict[str, Any]:
        self._file.write(line)
        self._file.flush()
        answer: dict[str, Any] = json.loads(self._file.readline())
        return answer

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def start(run_dir: Path, lost_s: float) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "holdfast.client.boot.tcp_store_server", str(run_dir), str(lost_s), "127.0.0.1"]
    return subprocess.Popen(argv, env=ENV)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = tmp_path_factory.mktemp("run") / ("x" * 120)  # more than a unix address takes
    long.mkdir()
    return long


@pytest.fixture(scope="module")
def process(run_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with start(run_dir, 60.0) as process:
        yield process
        process.kill()


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))


def test_each_generation_has_its_own_keys(process: object, run_dir: Path) -> None:
    controller = Controller(run_dir)
    first = controller.ask(open=1)["port"]
    assert controller.ask(open=1) == {"port": first}
    old = client(first)
    old.set("key", "stale")
    second = controller.ask(open=2)["port"]
    assert not client(second).check(["key"])
    with pytest.raises(DistNetworkError):
        old.get("key")  # its server is closed
    assert "over" in controller.ask(open=1)["error"]
    controller.close()


def test_the_next_controller_finds_the_same_store(process: object, run_dir: Path) -> None:
    first, second = Controller(run_dir), Controller(run_dir)
    port = first.ask(open=7)["port"]
    client(port).set("key", "kept")
    first.close()
    assert second.ask(open=7) == {"port": port}
    assert client(port).get("key") == b"kept"
    assert second.ask(close=7) == {}
    with pytest.raises(OSError, match="refused"), socket.socket() as probe:
        probe.connect(("127.0.0.1", port))
    second.close()


@pytest.mark.parametrize("line", [b"not json\n", b'{"open": "one"}\n', b"[]\n"])
def test_nonsense_is_answered(process: object, run_dir: Path, line: bytes) -> None:
    controller = Controller(run_dir)
    assert "error" in controller.send(line)
    controller.close()


def test_it_listens_on_the_given_address_alone(process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    controller = Controller(run_dir)
    port = controller.ask(open=9)["port"]
    listening = [row.split()[1] for row in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in row]
    assert [place for place in listening if int(place.split(":")[1], 16) == port] == [f"0100007F:{port:04X}"]
    assert oct((run_dir / "store.sock").stat().st_mode & 0o777) == "0o600"
    controller.close()


def test_it_ignores_ctrl_c_and_quits_when_told(process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    controller = Controller(run_dir)
    assert os.getsid(process.pid) == process.pid
    process.send_signal(signal.SIGINT)
    assert controller.ask(quit=True) == {}
    assert process.wait(timeout=30) == 0
    assert not (run_dir / "store.sock").exists()
    controller.close()


@pytest.mark.slow
def test_it_ends_when_no_controller_has_been_there(tmp_path: Path) -> None:
    with start(tmp_path, 0.2) as process:
        assert process.wait(timeout=60) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [True, False])
def test_one_that_no_controller_will_reach_ends_with_the_last_rank(tmp_path: Path, told: bool) -> None:
    """Another host has the run by now. If both see the run directory, that one's socket may be in the place of ours."""
    path, others = tmp_path / "store.sock", []
    with start(tmp_path, 1800.0) as process:
        controller = Controller(tmp_path)
        rank = client(controller.ask(open=1)["port"])
        if told:
            assert controller.ask(leave=True) == {}
        else:
            path.unlink()
            others.append(unix_sockets.listen(path))
        controller.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=4)
        rank.set("key", "a group that is made late")
        del rank
        assert process.wait(timeout=30) == 0
    assert path.exists() != told
    for other in others:
        unix_sockets.connect(path).close()  # it is left alone
        other.close()


def test_a_controller_that_comes_back_keeps_it(tmp_path: Path) -> None:
    with start(tmp_path, 4.0) as process:
        first = Controller(tmp_path)
        port = first.ask(open=1)["port"]
        assert first.ask(leave=True) == {}
        second = Controller(tmp_path)
        first.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        assert second.ask(open=1) == {"port": port}
        second.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)  # it has until its own time is over
        assert process.wait(timeout=30) == 0


def test_groups_beside_the_generations_have_stores_of_their_own() -> None:
    stores = StoreServers("127.0.0.1")
    training = stores.open(3)
    ports = {stores.open(-7), stores.open(-8)}
    assert len(ports) == 2 and training not in ports
    assert stores.open(-7) in ports and stores.open(3) == training
    assert stores.open(4) not in (training, *ports)
