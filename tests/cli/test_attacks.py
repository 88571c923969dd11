"""Another user of the same machine, with a shell and time: what he tries, over real sockets, and what he gets."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.run_dirs import run_dir_secrets, run_directory
from holdfast.linux.peer_credentials import read_peer
from holdfast.wire import run_and_node_specs, unix_sockets
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN, Job, gone, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user"),
]
NOBODY = 65534
PATIENT = ("--set", "node.lost_s=30")


def as_another(act: Callable[[], str]) -> str:
    """What another user's process finds out; a fork, since he may not even read our interpreter."""
    found, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.chdir("/")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        said = "it broke"
        try:
            said = act()
        except OSError as e:
            said = type(e).__name__
        finally:
            os.write(tell, said.encode())
            os._exit(0)
    os.close(tell)
    with os.fdopen(found) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture(scope="module")
def watched(start_shared: Start) -> Job:
    """A job that no attack below harms."""
    return start_shared("--nnodes", "2", "--nproc-per-node", "1", script=TRAIN.replace("0.02", "0.1"))


@pytest.fixture
def open_path(watched: Job) -> Iterator[None]:
    """Nothing but the run directory itself keeps anybody out."""
    folders = (watched.folder, *watched.folder.parents)
    above = [folder for folder in folders if folder.stat().st_uid == os.getuid() and folder != Path("/")]
    modes = {folder: folder.stat().st_mode for folder in above}
    for folder in modes:
        folder.chmod(0o755)
    yield
    for folder, mode in modes.items():
        folder.chmod(mode & 0o777)


def connect(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
    return "connected"


@pytest.mark.usefixtures("open_path")
def test_he_calls_at_every_socket_of_a_job(watched: Job) -> None:
    job = watched
    job.trains()
    sockets = [path for path in job.run_dir.rglob("*") if path.is_socket()]
    names = {path.name.split("-")[0] for path in sockets}
    assert {"controller.sock", "store.sock", "keeper.sock", "links"} <= names, names
    for path in sockets:
        assert as_another(lambda path=path: connect(path)) == "PermissionError", path  # type: ignore[misc]
    for name in ("token", "env.json", "journal.db", "controller.log", "run.json"):
        path = job.run_dir / name
        assert as_another(lambda path=path: path.read_text()) == "PermissionError"  # type: ignore[misc]


SHOWN: tuple[dict[str, str], ...] = (
    {},
    {"X-Holdfast-Token": ""},
    {"X-Holdfast-Token": "guess"},
    {"Authorization": "Bearer "},
)


def order(url: str) -> str:
    """The codes that he is answered with, whatever he asks for, and whatever he shows."""
    release = {"number": 2, "env": {"LD_PRELOAD": "/tmp/evil.so"}}
    body = json.dumps({"verb": "update", "now": True, "release": release}).encode()
    asked = {"/api/v1/orders": body, "/api/v1/status": None, "/metrics": None, "/agent": None}
    requests = [urllib.request.Request(url + path, asked[path], shown) for path in asked for shown in SHOWN]
    return str({code_of(request) for request in requests})


def code_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code


def test_he_calls_at_the_port(watched: Job) -> None:
    job = watched
    job.trains()
    found = run_directory.find_controller(job.run_dir)
    assert found
    assert order(found.url) == "{401}"  # and all is imported that he could not read
    assert as_another(lambda: order(found.url)) == "{401}"
    with_token = urllib.request.Request(found.url + "/api/v1/status", headers={"X-Holdfast-Token": token(job)})
    with urllib.request.urlopen(with_token, timeout=20) as answer:
        assert json.load(answer)["phase"] == "training"
    agent = urllib.request.Request(found.url + "/agent", headers={"X-Holdfast-Token": token(job)})
    with pytest.raises(urllib.error.HTTPError, match="403"):  # people are no nodes, whatever they know
        urllib.request.urlopen(agent, timeout=20)


def token(job: Job) -> str:
    return run_dir_secrets.read_token(job.run_dir)


def bound(port: int) -> socket.socket:
    """A test beside this one may be using the port for a moment, as a caller."""
    for _ in range(100):
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            time.sleep(0.1)
    raise TimeoutError


def listen(port: int, wait_s: float) -> str:
    with bound(port) as listener:
        listener.settimeout(wait_s)
        try:
            link, _ = listener.accept()
        except TimeoutError:
            return "silence"
        with link:
            return str(link.recv(4096))


def test_he_takes_the_place_of_a_controller_that_is_gone(start: Start) -> None:
    """Agents look for it for `node.lost_s`; whoever binds its port hears nothing from them."""
    job = start("--nproc-per-node", "1", *PATIENT)
    job.trains()
    port, controller, rank = (
        run_and_node_specs.read_json(job.run_dir / "run.json", run_and_node_specs.RunSpec).port,
        job.controller(),
        job.rank(0),
    )
    os.kill(job.process.pid, 9)
    job.ends(-9)
    until(lambda: gone(controller), "the end of the controller")
    assert as_another(lambda: listen(port, 6.0)) == "silence"
    assert not gone(rank)
    job.start("--resume", str(job.run_dir))
    job.trains()
    assert job.rank(0) == rank, "the same process trains on"
    job.finish()
    job.ends(0)


def test_he_calls_a_thousand_times_and_says_nothing(watched: Job) -> None:
    job = watched
    job.trains()
    found = run_directory.find_controller(job.run_dir)
    assert found
    port = int(found.url.rpartition(":")[2])
    idle = []
    for _ in range(1100):
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", port))
        idle.append(link)
    try:
        before = job.status()["step"]
        job.until(lambda: job.status()["step"] > before + 5, "training goes on, and people are answered")
        until(lambda: _answers(found.url, token(job)), "the port, once strangers' time is over")
    finally:
        for link in idle:
            link.close()


def _answers(url: str, token: str) -> bool:
    request = urllib.request.Request(url + "/api/v1/status", headers={"X-Holdfast-Token": token})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_he_has_made_the_run_directory(tmp_path: Path, start: Start) -> None:
    """A folder that is another's, or a link that leads to one, is not used."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    (tmp_path / "link").symlink_to(theirs)
    shared, filled = tmp_path / "shared", tmp_path / "filled"
    for folder in (shared, filled):
        folder.mkdir()
    shared.chmod(0o2777)
    (filled / "nodes").mkdir()
    told = {theirs: "is another user's", tmp_path / "link": "symbolic link", shared: "other users"}
    for folder, why in (told | {filled: "is not empty"}).items():
        job = start("--run-dir", str(folder), name=folder.name)
        job.ends(2)
        assert why in job.text() and "Traceback" not in job.text()
    assert list(theirs.iterdir()) == []


COMPILES = TRAIN.replace(
    "import holdfast",
    """import holdfast
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
print(f"compiled in {default_cache_dir()}", flush=True)""",
    1,
)


def test_he_has_made_the_folder_that_torch_compiles_in(tmp_path: Path, start: Start) -> None:
    """Its name in the temporary folder is known, and ranks execute what they find there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    assert as_another(lambda: subprocess.getoutput(f"mkdir -m 777 {shared}/torchinductor_ann && echo done")) == "done"
    job = start("--nnodes", "1", script=COMPILES, TMPDIR=str(shared), USER="ann", LOGNAME="ann", OWN_SERVER="1")
    job.trains()
    folder = Path(next(line for line in job.text().splitlines() if "compiled in " in line).rpartition(" ")[2])
    assert folder.parent.parent == shared and folder.parent.stat().st_uid == os.getuid()
    assert folder.parent.stat().st_mode & 0o077 == 0, "and he cannot put anything there"
    job.finish()
    job.ends(0)


def test_a_second_controller_does_not_work(watched: Job) -> None:
    job = watched
    job.trains()
    before = job.controller()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = subprocess.run(
            [sys.executable, "-m", run_directory.CONTROLLER, str(job.run_dir), str(os.getpid())],
            env=os.environ | {"HOLDFAST_KEPT": str(listener.fileno()), "PYTHONPATH": str(Path.cwd())},
            pass_fds=(listener.fileno(),),
            check=False,
            timeout=120,
        )
    assert done.returncode == 1
    job.says("another controller")
    assert job.controller() == before


def test_a_crash_writes_no_keys_to_disk(start: Start, warm_server: Path) -> None:
    """Cores of what has keys in its memory; ranks keep the limit of whoever forks them, here the server."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    with unix_sockets.connect(warm_server) as link:
        server, _ = read_peer(link)
    resource.prlimit(server, resource.RLIMIT_CORE, (most, most))
    try:
        job = start()
        job.trains()
    finally:
        resource.prlimit(server, resource.RLIMIT_CORE, (0, most))
    limits = [
        resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in (job.controller(), job.agent("n0"), job.rank(0))
    ]
    assert limits == [0, 0, most]
    job.finish()
    job.ends(0)
