"""What every test shares: a process that inherits nothing, and end-to-end tests that leave nothing behind."""

import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import psutil
import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from holdfast.client.boot.zygote import DEFAULT_PRELOAD
from holdfast.wire.program_fork_server import ForkServer
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.hang_watchdog import watch_test
from tests.postgres_server import own_postgres as own_postgres
from tests.postgres_server import shared_postgres as shared_postgres

if TYPE_CHECKING:
    from tests.client.conftest import Zygote
    from tests.slurm.lab import SlurmLab

ROOT = Path(__file__).parents[1]
collect_ignore = ["corpus"]  # a thousand folders of logs, and no tests
MARK = "HOLDFAST_TEST_MARK"
SERVER = "PYTEST_HOLDFAST_SERVER"
STUB = "tests.client.stub_holder"
BUSY_S = pytest.StashKey[float]()
# Of the environment of whoever runs the tests; what else a test needs it sets itself.
KEPT = frozenset("PATH HOME USER LOGNAME SHELL LANG LC_ALL TZ TMPDIR LD_LIBRARY_PATH VIRTUAL_ENV CI".split())
T = TypeVar("T")
settings.register_profile("busy", deadline=None)  # an example may wait for a processor for longer than it computes
settings.load_profile("busy")
PATIENCE_S = 10.0  # a process that was told to end is given this long on a busy machine


def pytest_configure(config: pytest.Config) -> None:
    """Whoever starts the tests, and however (under nohup, in the background, from an odd shell), finds the same."""
    for name in set(os.environ) - KEPT:
        if not name.startswith("PYTEST_"):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"  # as ranks have it: threads of tiny products would spin for one another
    sys.dont_write_bytecode = False  # or every worker compiles every test anew
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    gc.disable()  # until all is imported, which makes no garbage worth looking for
    if hasattr(config, "workerinput"):
        compile_share(config, int(config.workerinput["workerid"][2:]), config.workerinput["workercount"])
    config.stash[BUSY_S] = machine_busy_s()
    if config.getoption("numprocesses", None):
        server = start_server(Path(tempfile.mkdtemp(prefix="holdfast-tests-")))
        os.environ[SERVER] = str(server.path)
        config.add_cleanup(lambda: end_server(server))


def compile_share(config: pytest.Config, number: int, workers: int) -> None:
    """In a fresh clone every worker would compile every test: each compiles its share, and finds that of the others."""
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::workers]:
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)


def start_server(folder: Path) -> ForkServer:
    """A fork server that jobs share: torch is imported once, not once for each."""
    env, preload = make_rank_environment(job_environment()), (*DEFAULT_PRELOAD, "tests.cli.front_program", STUB)
    with (folder / "log").open("wb") as log:
        return ForkServer(folder / "fork.sock", preload, env, log.fileno())


def end_server(server: ForkServer) -> None:
    server.close()
    shutil.rmtree(server.path.parent)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker gets the next so many tests: first its share of files with end-to-end tests, so that none of these
    is begun when the others have nothing left; then of those that only compute, and of the design tests first, which
    share what they parse."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    live = [path for path, found in files.items() if any(item.get_closest_marker("e2e") for item in found)]
    design = [path for path in files if path.parent == ROOT / "tests" and path not in live]
    pure = [path for path in files if path not in {*live, *design}]
    order = [*design, *(path for one in range(workers) for path in (*live[one::workers], *pure[one::workers]))]
    items[:] = [item for path in order for item in files[path]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with watch_test(item):
        return (yield)


def pytest_collection_finish() -> None:
    """A hundred thousand objects that stay are no longer looked through for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def job_environment(**env: str) -> dict[str, str]:
    """Of a process that a test starts: with this tree, and with nothing that pytest or an imported module has set."""
    own = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("HOLDFAST_")}
    return own | {"PYTHONPATH": str(ROOT)} | env


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What `make test` has cost, and may cost: at least what was waited for, at most what the whole machine did."""
    if SERVER not in os.environ or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    servers = [child.cpu_times() for child in psutil.Process().children()]
    least_s = sum(one.ru_utime + one.ru_stime for one in own) + sum(sum(times[:4]) for times in servers)
    most_s = machine_busy_s() - config.stash[BUSY_S]
    terminalreporter.write_line(
        f"{least_s:.0f} to {most_s:.0f} s of processors, which count to 20 million in {count_20_million_s():.1f} s"
    )


def count_20_million_s() -> float:
    """How slow this machine's processors are: some are five times as slow as others, and the same one by day."""
    began = time.process_time()
    for _ in range(2_000_000):
        pass
    return 10 * (time.process_time() - began)


def machine_busy_s() -> float:
    """What all processors have computed since the machine was started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


@pytest.fixture(scope="session")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fork server of all workers, or one of our own if there are none."""
    if SERVER in os.environ:
        yield Path(os.environ[SERVER])
        return
    server = start_server(tmp_path_factory.mktemp("warm"))
    yield server.path
    end_server(server)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, warm_server: Path) -> Iterator["Zygote"]:
    """A zygote as the holder starts it."""
    from tests.client.conftest import Zygote

    zygote = Zygote(DEFAULT_PRELOAD, tmp_path_factory.mktemp("warm"), server=warm_server)
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator["SlurmLab"]:
    """A Slurm cluster of six nodes for all tests of this process; skips where it cannot run."""
    from tests.slurm import lab, places

    if why := lab.lacking():
        pytest.skip(why)
    with lab.run_lab(6) as made:
        places.LAB.append(made)
        yield made
        places.LAB.clear()


@pytest.fixture(autouse=True)
def _e2e_leaves_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("e2e"):
        request.getfixturevalue("clean_shm")
        request.getfixturevalue("no_orphans")


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark that processes started by this test inherit; a test that builds an environment anew adds it as MARK.

    A process that the test forks without exec does not show the mark; its children that exec do.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    left = _settled(lambda: marked(mark), _spent_ticks)
    if left:
        story = "\n".join(f"  {pid}: {_argv(pid)}" for pid in left)
        kill_marked(mark)
        pytest.fail(f"processes outlived the test and were killed:\n{story}", pytrace=False)


@pytest.fixture
def clean_shm() -> Iterator[None]:
    # A file of a test running beside this one goes away by itself; a leaked one stays.
    before = _shm()
    yield
    left = _settled(lambda: _shm() - before)
    assert not left, f"left in /dev/shm: {sorted(left)}"


def marked(mark: str) -> set[int]:
    """Every process that was started, however indirectly, with this mark in its environment."""
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _carries(int(p.name), mark)}


def kill_marked(mark: str) -> None:
    """Kill exactly these, repeatedly: a holder may restart an agent between the look and the shot."""
    until = time.monotonic() + PATIENCE_S
    while (pids := marked(mark)) and time.monotonic() < until:
        for pid in pids:
            _kill(pid, mark)
        time.sleep(0.02)


def _kill(pid: int, mark: str) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, mark):  # looked at again: the fd now pins the process, so a reused pid cannot be hit
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _carries(pid: int, mark: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's, hence not ours
        return False
    return f"{MARK}={mark}".encode() in variables


def _argv(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _shm() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("holdfast*")}


def _settled(look: Callable[[], set[T]], signs: Callable[[set[T]], object] = lambda left: None) -> set[T]:
    """What is left when nothing changes its signs of life any more; what still does is not late but slow."""
    began_at = moved_at = time.monotonic()
    seen = None
    while left := look():
        now = time.monotonic()
        if (found := signs(left)) != seen:
            seen, moved_at = found, now
        if now > min(moved_at + PATIENCE_S, began_at + 6 * PATIENCE_S):
            break
        time.sleep(0.05)
    return left


def _spent_ticks(pids: set[int]) -> object:
    """What each of these has computed."""
    return [_stat(pid).rpartition(")")[2].split()[11:13] for pid in sorted(pids)]


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"


@pytest.fixture(scope="session")
def setting_names() -> list[str]:
    """Every setting by its dotted name, as it is written after --set."""
    from holdfast.config import Settings

    return list(leaves(Settings))


def leaves(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
