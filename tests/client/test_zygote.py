"""The zygote with its holder: who is whose child, what goes wrong, and what a rank finds preloaded."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.client.conftest import ENV, Rank, Zygote, fresh

pytestmark = pytest.mark.e2e

Group = Callable[[], list[dict[str, str]]]

STAY = "import sys, time\nprint('up')\ntime.sleep(60)"


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def staying(zygote: Zygote, folder: Path) -> Rank:
    (folder / "stay.py").write_text(STAY)
    rank = zygote.fork(str(folder / "stay.py"))
    until(lambda: (rank.folder / "out").read_text() == "up\n", "the rank did not come up")
    return rank


def test_a_rank_is_the_holders_child(bare: Zygote, tmp_path: Path) -> None:
    rank = staying(bare, tmp_path)
    process = psutil.Process(rank.pid)
    assert process.ppid() == bare.holder.pid
    assert psutil.Process(bare.pid).ppid() == bare.holder.pid
    assert process.cmdline()[-1] == str(tmp_path / "stay.py")
    assert os.getsid(rank.pid) == rank.pid
    os.kill(rank.pid, signal.SIGTERM)
    assert bare.wait(rank).code == -signal.SIGTERM


def test_many_at_once(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.environ['WHO'])")
    ranks = bare.forks([{"WHO": str(n)} for n in range(16)], str(tmp_path / "script.py"))
    assert sorted(int(bare.wait(rank).out) for rank in ranks) == list(range(16))


def test_a_large_environment_fits(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(len(os.environ['LARGE']))")
    assert bare.run(str(tmp_path / "script.py"), LARGE="x" * 200_000).out == "200000\n"


def test_a_bad_folder_or_log_is_told_and_nothing_is_lost(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('fine')")
    with pytest.raises(OSError, match=f"{os.strerror(errno.ENOENT)}.*nowhere"):
        bare.run("script.py", cwd=tmp_path / "nowhere")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
        bare.run("script.py", cwd=tmp_path / "script.py")
    logs = {"stdout": str(tmp_path / "no" / "out"), "stderr": "/dev/null"}
    bare.tell({"key": "k", "argv": ["script.py"], "module": False, "env": {}, "cwd": str(tmp_path), **logs})
    with pytest.raises(OSError, match=f"'key': 'k'.*{os.strerror(errno.ENOENT)}.*/no/out"):
        bare.hear_of("pid")
    assert bare.run("script.py", cwd=tmp_path).out == "fine\n"
    open_files = len(os.listdir(f"/proc/{bare.pid}/fd"))
    assert open_files < 8


def test_output_is_appended(bare: Zygote, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, fcntl; print(bool(fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND))")
    rank = bare.fork("script.py", cwd=tmp_path)
    assert bare.wait(rank).out == "True\n"
    assert (rank.folder / "out").stat().st_mode & 0o777 == 0o600, "what ranks print may be secret"


def children(zygote: Zygote) -> list[int]:
    return [child.pid for child in psutil.Process(zygote.pid).children()]


def test_all_die_with_the_holder(tmp_path: Path) -> None:
    zygote = Zygote((), tmp_path)
    rank = staying(zygote, tmp_path)
    until(lambda: len(children(zygote)) == 1, "the zygote has no usher")
    below = [zygote.pid, rank.pid, *children(zygote)]
    zygote.holder.kill()
    until(lambda: all(map(gone, below)), "something outlived the holder")
    zygote.close()


def test_ranks_outlive_the_zygote(tmp_path: Path) -> None:
    zygote = Zygote((), tmp_path)
    rank = staying(zygote, tmp_path)
    until(lambda: len(children(zygote)) == 1, "the zygote has no usher")
    (usher,) = children(zygote)
    os.kill(zygote.pid, signal.SIGKILL)
    until(lambda: gone(usher), "the usher outlived the zygote")
    time.sleep(0.1)
    assert not gone(rank.pid)
    zygote.close()


def unborn(zygote: Zygote) -> list[int]:
    return [fork.pid for usher in psutil.Process(zygote.pid).children() for fork in usher.children()]


def test_ranks_are_forked_in_advance(tmp_path: Path) -> None:
    """As many as the node has, once nothing has been asked for a while; more are forked when they are asked for."""
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['WHO'], os.getpid())")
    zygote = Zygote((), tmp_path, ranks=2)
    for _ in range(2):
        until(lambda: len(unborn(zygote)) == 2, "no rank was forked in advance")
        ready = unborn(zygote)
        ranks = zygote.forks([{"WHO": str(n)} for n in range(3)], str(tmp_path / "script.py"))
        said = [zygote.wait(rank).out.split() for rank in ranks]
        assert [who for who, _ in said] == ["0", "1", "2"]
        assert [int(pid) for _, pid in said] == [rank.pid for rank in ranks]
        assert {rank.pid for rank in ranks} > set(ready), "those that stood ready came first"
    zygote.close()


def test_a_fork_in_advance_that_somebody_killed_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print(os.getppid())")
    zygote = Zygote((), tmp_path, ranks=2)
    until(lambda: len(unborn(zygote)) == 2, "no rank was forked in advance")
    ready = unborn(zygote)
    for pid in ready:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(map(gone, ready)), "they live")
    assert zygote.run(str(tmp_path / "script.py")).out == f"{zygote.holder.pid}\n"
    zygote.close()


def test_forks_in_advance_end_with_whom_they_wait_for(tmp_path: Path) -> None:
    """Those that are left when a rank was made, and those of a zygote that is killed."""
    zygote = Zygote((), tmp_path, ranks=3)
    until(lambda: len(unborn(zygote)) == 3, "no rank was forked in advance")
    ready = unborn(zygote)
    rank = staying(zygote, tmp_path)
    assert rank.pid in ready
    until(lambda: all(gone(pid) for pid in ready if pid != rank.pid), "a fork outlived its usher")
    until(lambda: len(unborn(zygote)) == 3, "no rank was forked in advance for the next time")
    ready = unborn(zygote)
    os.kill(zygote.pid, signal.SIGKILL)
    until(lambda: all(map(gone, ready)), "a fork outlived the zygote")
    assert not gone(rank.pid)
    zygote.close()


def test_a_module_that_fails_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('no')")
    zygote = Zygote(
        ("json", "no_such_module", "mine"), tmp_path, ENV | {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{tmp_path}"}
    )
    assert zygote.warm["skipped"] == ["no_such_module", "mine"]
    assert zygote.run("json.tool", "--help", module=True).code == 0
    zygote.close()


def test_a_locale_that_python_coerces(tmp_path: Path) -> None:
    env = {name: value for name, value in ENV.items() if not name.startswith(("LC_", "LANG"))}
    (tmp_path / "script.py").write_text("import os; print(os.environ.get('LC_CTYPE')); os.system('echo $LC_CTYPE')")
    zygote = Zygote((), tmp_path, env)
    said = zygote.run("script.py")
    zygote.close()
    assert said == fresh(tmp_path, "script.py", LANG="", LC_ALL="")


def test_warm_without_threads_or_devices(warm: Zygote) -> None:
    assert warm.warm["threads"] == 1
    assert warm.warm["skipped"] == []
    (warm.folder / "script.py").write_text("import torch; print(torch.cuda.is_initialized(), torch.get_num_threads())")
    assert warm.run("script.py").out == "False 1\n"


STEPS = """
import os, sys
before = set(sys.modules)
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
def steps(model, x):
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
steps(DistributedDataParallel(nn.Linear(8, 8)), torch.ones(2, 8))
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(net[0])
steps(fully_shard(net), torch.ones(2, 8))
torch.save(nn.Linear(2, 2).state_dict(), "rank.pt" + sys.argv[1] if len(sys.argv) > 1 else "/dev/null")
dist.destroy_process_group()
print(sorted(set(sys.modules) - before), flush=True)
sys.stderr.flush()
os._exit(0)
"""


def test_the_first_steps_import_nothing(warm: Zygote, group: Group) -> None:
    (warm.folder / "steps.py").write_text(STEPS)
    ended = [warm.wait(rank) for rank in warm.forks(group(), "steps.py")]
    assert [(e.code, e.out, e.err) for e in ended] == [(0, "[]\n", "")] * 4


LOADER = """
import sys, torch
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i * i
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    print([batch.tolist() for batch in loader])
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loaders(warm: Zygote, method: str) -> None:
    (warm.folder / "loader.py").write_text(LOADER)
    said = warm.run("loader.py", method)
    assert (said.code, said.out) == (0, "[[0, 1, 4, 9], [16, 25, 36, 49]]\n"), said.err


def test_chance_differs_but_seeds_hold(warm: Zygote) -> None:
    (warm.folder / "chance.py").write_text(
        "import numpy, os, torch\n"
        "print(numpy.random.rand(), torch.rand(1), torch.initial_seed(), flush=True)\n"
        "os._exit(0)\n"
    )
    first, second = (warm.run("chance.py").out.split(" ", 1) for _ in range(2))
    assert first[0] != second[0]  # numpy takes its seed from the machine
    assert first[1] == second[1]  # torch has a fixed one


def test_threads_work_in_a_rank(warm: Zygote) -> None:
    (warm.folder / "threads.py").write_text(
        "import torch\ntorch.set_num_threads(2)\na = torch.rand(600, 600)\nprint((a @ a).shape)"
    )
    assert warm.run("threads.py").out == "torch.Size([600, 600])\n"


ENDS_ITS_THREAD = """
import os, threading
wake = threading.Event()
thread = threading.Thread(target=wake.wait, daemon=True)
thread.start()
def end():
    wake.set()
    thread.join()
os.register_at_fork(before=end)
"""
KEEPS_ITS_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.parametrize(("library", "threads"), [(ENDS_ITS_THREAD, 1), (KEEPS_ITS_THREAD, 2)])
def test_threads_that_a_library_ends_before_a_fork_do_not_count(tmp_path: Path, library: str, threads: int) -> None:
    (tmp_path / "threaded.py").write_text(library)
    zygote = Zygote(("threaded",), tmp_path, ENV | {"PYTHONPATH": f"{ENV['PYTHONPATH']}:{tmp_path}"})
    found = zygote.warm
    zygote.close()
    assert (found["threads"], found["skipped"]) == (threads, [])
