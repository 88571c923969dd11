"""The drop-in use: the same command on several hosts, here several process trees on one, joins one job."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import CLEAN, ROOT, Job, gone
from tests.cli.test_run_state import TRAIN as SNAPSHOTS

pytestmark = pytest.mark.e2e

WHO = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "HOLDFAST_HOST")
with open(f"{sys.argv[1]}/who-{os.environ['RANK']}.json", "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""
TOKEN = "60f4c1b97ad2e8537be01d94c2f86a35"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def host(
    start: Start, endpoint: str, *flags: str, name: str, script: str = CLEAN, zygote: bool = False, **env: str
) -> Job:
    """One host's `holdfast run`; its run directory is in what it says first."""
    words = ("--rdzv-endpoint", endpoint, *flags)
    job = start(*words, name=name, script=script, zygote=zygote, HOLDFAST_HOST=name, **env)
    job.run_dir = Path(job.says("run directory").split("run directory ")[1])
    return job


def leader_of(*jobs: Job) -> Job:
    [leader] = [job for job in jobs if "this host carries the controller" in job.text()]
    return leader


def test_hosts_make_one_job(start: Start, port: int, tmp_path: Path) -> None:
    jobs = []
    for node_rank in ("1", "0"):
        flags = ("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node_rank, "--rdzv-id", "our job")
        jobs.append(host(start, f"127.0.0.1:{port}", *flags, name=f"host{node_rank}", script=WHO))
    for job in jobs:
        job.ends(0)
    for rank in range(4):
        who = json.loads((tmp_path / f"who-{rank}.json").read_text())
        assert who == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank % 2),
            "TORCHELASTIC_RUN_ID": "our job",
            "HOLDFAST_HOST": f"host{rank // 2}",
        }
    leader = leader_of(*jobs)
    assert (tmp_path / "home" / "newest").resolve() == leader.run_dir
    for job in jobs:
        assert not list(job.run_dir.glob("nodes/*/holder.pid")), "its holder is gone when the command returns"
        assert not {"token", "env.json", "door", "keys", "journal.key"} & {path.name for path in job.run_dir.iterdir()}
        if job is not leader:
            assert job.sentences()[-1].startswith("holdfast: done: ")


@pytest.mark.slow
def test_state_goes_between_hosts_that_have_proved_themselves(start: Start, port: int) -> None:
    """Both keep copies of each other's, by TLS: a certificate is made for each, and both count."""
    flags = ("--nnodes", "2", "--nproc-per-node", "1")
    jobs = [host(start, f"127.0.0.1:{port}", *flags, name=name, script=SNAPSHOTS) for name in ("one", "two")]
    leader = leader_of(*jobs)
    leader.until(lambda: leader.status().get("floor", 0) > 3, "copies on peers")
    secrets = [path for job in jobs for path in (job.run_dir / "keys").iterdir()]
    assert len(secrets) == 6 and {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    leader.finish()
    for job in jobs:
        job.ends(0)
    assert not [path for path in secrets if path.exists()], "nobody needs them any more"


@pytest.mark.slow
def test_a_host_that_leaves_may_come_back(start: Start, port: int, tmp_path: Path) -> None:
    endpoint, flags = f"127.0.0.1:{port}", ("--nnodes", "2", "--set", "silence.silence_s=2")
    first = host(start, endpoint, *flags, name="first")
    second = host(start, endpoint, *flags, name="second")
    first.trains()
    [holder] = second.run_dir.glob("nodes/*/holder.pid")
    lost = [int(holder.read_text()), second.rank(1), first.rank(0)]
    os.kill(lost[0], signal.SIGKILL)
    second.ends(137)
    assert "code -9" in second.sentences()[-1]
    first.until(lambda: first.phase() == "waiting", "the wait for another host")
    assert gone(*lost)
    second = host(start, endpoint, *flags, name="third")
    first.trains(generation=2)

    second.interrupt()  # this time it is somebody's will
    second.ends(130)
    assert (tmp_path / "clean-1-15").exists()
    assert "code 130" in second.sentences()[-1]
    first.until(lambda: first.phase() == "waiting", "the wait for another host")
    second = host(start, endpoint, *flags, name="fourth")
    first.trains(generation=3)
    first.finish()
    first.ends(0)
    second.ends(0)
    assert [record.kind for record in first.report().incidents] == ["silence", "silence"]
    first.check_replay()


@pytest.mark.slow
def test_a_host_that_was_unheard_of_for_a_while_is_told_when_it_is_back(start: Start, port: int) -> None:
    endpoint, flags = f"127.0.0.1:{port}", ("--nnodes", "2", "--set", "silence.silence_s=2")
    jobs = [host(start, endpoint, *flags, name=name) for name in ("first", "second")]
    leader = leader_of(*jobs)
    leader.trains()
    [other] = [job for job in jobs if job is not leader]
    [folder] = [path.parent for path in other.run_dir.glob("nodes/*/holder.pid")]
    agent = other.agent(folder.name)
    os.kill(agent, signal.SIGSTOP)
    leader.until(lambda: leader.phase() == "waiting", "the wait for a node")
    waits = leader.status()["now"]
    os.kill(agent, signal.SIGCONT)
    leader.trains(generation=2)
    leader.finish()
    for job in jobs:
        job.ends(0)
    assert f" {folder.name} (rank" in waits
    assert leader.sentences().count(f"holdfast: {folder.name} is back, and may have ranks again") == 1
    [record] = leader.report().incidents
    assert record.evicted == record.admitted == (folder.name,)
    leader.check_replay()


# Installed, as far as anybody can tell, and it writes down who imported it: a rank, or a process before there is one.
SLOW = """
import os
with open(os.environ["HOLDFAST_TEST_WHO"], "a") as file:
    file.write(f"{os.environ.get('RANK', 'zygote')} {os.getpid()}\\n")
"""


def warm_since(log: Path, imported: Path) -> bool:
    """Whether a zygote was ready after something was imported."""
    ready = [line[:23].replace(",", ".") for line in log.read_text().splitlines() if " zygote: " in line]
    last = datetime.fromisoformat(ready[-1]).timestamp() if ready else 0.0
    return imported.exists() and last >= imported.stat().st_mtime - 0.001


@pytest.mark.slow
def test_a_host_that_joins_has_what_the_script_imports(start: Start, port: int, tmp_path: Path) -> None:
    """Its zygote imports that from what the other host has learned, before it ever had a rank."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "slow_to_import.py").write_text(SLOW)
    endpoint, flags = f"127.0.0.1:{port}", ("--nnodes", "1", "--standbys", "1", "--set", "silence.silence_s=2")
    script = "import slow_to_import\n" + CLEAN
    who = {name: tmp_path / f"who-{name}" for name in ("first", "second")}

    def begin(name: str) -> Job:
        env = {"PYTHONPATH": f"{tmp_path / 'site-packages'}:{ROOT}", "HOLDFAST_TEST_WHO": str(who[name])}
        return host(start, endpoint, *flags, name=name, script=script, zygote=True, **env)

    first = begin("first")
    first.trains()
    second = begin("second")
    [zygotes] = second.until(lambda: list(second.run_dir.glob("nodes/*/agent.log")), "its agent")
    second.until(lambda: warm_since(zygotes, who["second"]), "a zygote that has it")
    imported = who["second"].read_text().splitlines()
    assert imported and {line.split()[0] for line in imported} == {"zygote"}, "it has had no rank"
    [seated] = [node["node"] for node in first.status()["nodes"] if node["ranks"] == "0"]
    assert main(["evict", seated, "--run", str(first.run_dir)]) == 0
    first.trains(generation=2)
    assert who["second"].read_text().splitlines() == imported, "its rank was forked with it"
    assert who["first"].read_text().startswith("0 "), "the first rank of all imported it itself"
    first.finish()
    second.ends(0)
    first.ends(0)


def test_whoever_does_not_belong_is_refused(start: Start, port: int) -> None:
    endpoint, flags = f"127.0.0.2:{port}", ("--nnodes", "2", "--rdzv-id", "ours")
    first = host(start, endpoint, *flags, name="first", script=WHO, HOLDFAST_TOKEN=TOKEN)
    first.until(first.status, "the controller")
    for name, token, rdzv_id, words in (
        ("stranger", TOKEN[::-1], "ours", "HOLDFAST_TOKEN"),
        ("neighbour", TOKEN, "theirs", "ours, not theirs"),
    ):
        flags = ("--nnodes", "2", "--rdzv-id", rdzv_id)
        other = host(start, endpoint, *flags, name=name, script=WHO, HOLDFAST_TOKEN=token)
        other.ends(2)
        assert words in other.sentences()[-1] and "Traceback" not in other.text()
    flags = ("--nnodes", "2", "--rdzv-id", "ours")
    friend = host(start, endpoint, *flags, name="friend", script=WHO, HOLDFAST_TOKEN=TOKEN)
    first.ends(0)
    friend.ends(0)


def test_not_enough_hosts(start: Start, port: int) -> None:
    job = host(start, f"127.0.0.1:{port}", "--nnodes", "2", "--rdzv-conf", "join_timeout=2", name="lonely")
    job.ends(93)
    assert "--nnodes" in job.sentences()[-2]


@pytest.fixture
def stranger() -> Iterator[int]:
    """Something else that listens, and answers whatever it is asked in its own tongue."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            try:
                while True:
                    with server.accept()[0] as peer:
                        peer.recv(4096)
                        peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            except OSError:
                return  # closed

        thread = threading.Thread(target=answer)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_stranger_at_the_endpoint(
    stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "ok.py").touch()
    assert main(["run", "--rdzv-endpoint", f"127.0.0.1:{stranger}", "--nnodes", "2", "ok.py"]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("holdfast run: ") and f"127.0.0.1:{stranger}" in last and "--rdzv-endpoint" in last
    [run_dir] = (tmp_path / "home" / "runs").iterdir()
    assert not [name for name in ("env.json", "token") if (run_dir / name).exists()], "nobody needs them"
