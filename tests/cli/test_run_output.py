"""What a job's ranks see of the world, and what the world sees of their output."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.conftest import Start
from tests.cli.driver import until
from tests.conftest import job_environment

pytestmark = pytest.mark.e2e

TALK = """
import os, sys
print("out", os.environ["RANK"], *sys.argv[2:])
print("err", os.environ["RANK"], file=sys.stderr)
"""


def test_output_is_prefixed_and_kept(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TALK)
    job.ends(0)
    lines = job.text().splitlines()
    for rank in range(4):
        assert f"[rank {rank}] out {rank}" in lines
        assert f"[rank {rank}] err {rank}" in lines
        assert (job.rank_dir(rank) / "stdout.log").read_text() == f"out {rank}\n"
        assert (job.rank_dir(rank) / "stderr.log").read_text() == f"err {rank}\n"
    assert lines[0].startswith("holdfast: local fleet: 2 nodes x 2 ranks ")
    assert (job.report().code, job.report().incidents) == (0, ())


READ = """
import os, sys
said = sys.stdin.read()
open(f"{sys.argv[1]}/read-{os.environ['RANK']}", "w").write(said)
"""


@pytest.mark.slow
@pytest.mark.parametrize("zygote", [[], ["--no-zygote"]], ids=["forked", "executed"])
def test_rank_0_reads_what_the_launcher_is_given(tmp_path: Path, zygote: list[str], no_orphans: str) -> None:
    (tmp_path / "job.py").write_text(READ)
    run = ["run", *zygote, "--set", "probe.allow=false", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run")]
    argv = [sys.executable, "-m", "holdfast", *run, "job.py", str(tmp_path)]
    env = job_environment(HOLDFAST_HOME=str(tmp_path / "home"))
    subprocess.run(argv, input=b"a line\n", cwd=tmp_path, check=True, timeout=200, env=env)
    assert [(tmp_path / f"read-{rank}").read_text() for rank in (0, 1)] == ["a line\n", ""]


@pytest.mark.slow
def test_what_the_console_shows_is_a_choice(start: Start, tmp_path: Path) -> None:
    shown = ("--redirects", "0:3,1:2", "--tee", "0:2", "--local-ranks-filter", "0,1")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank}> "}
    job = start("--nproc-per-node", "3", "--role", "trainer", "--log-dir", "logs", *shown, script=TALK, **template)
    job.ends(0)
    talk = [line for line in job.text().splitlines() if not line.startswith("holdfast")]
    assert sorted(talk) == ["<trainer 0/0> err 0", "<trainer 1/1> out 1"]
    [run] = (tmp_path / "logs").iterdir()
    assert (run / "gen-1" / "rank-2" / "stdout.log").read_text() == "out 2\n"


ENV = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER", "ROLE", "GROUP", "LOCAL", "TORCH", "OMP", "NCCL")
seen = {k: v for k, v in os.environ.items() if any(name in k for name in names)}
secrets = [k for k in os.environ if "TOKEN" in k]
with open(f"{sys.argv[1]}/env-{os.environ['RANK']}.json", "w") as file:
    json.dump({"env": seen, "secrets": secrets, "cwd": os.getcwd(), "argv": sys.argv}, file)
"""
# Where the two may differ: places, names of this very run, and where torchrun itself changes from run to run.
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


@pytest.mark.slow
def test_the_environment_is_torchruns(start: Start, tmp_path: Path) -> None:
    reference = tmp_path / "torchrun"
    reference.mkdir()
    (tmp_path / "job.py").write_text(ENV)
    torchrun = Path(sysconfig.get_path("scripts")) / "torchrun"
    command = [sys.executable, str(torchrun), "--standalone", "--nproc-per-node", "2", "job.py", str(reference)]
    subprocess.run(command, cwd=tmp_path, env=job_environment(), check=True, timeout=100, capture_output=True)
    job = start("--standalone", "--nproc-per-node", "2", script=ENV, HOLDFAST_TOKEN="secret")
    job.ends(0)
    for rank in range(2):
        theirs = json.loads((reference / f"env-{rank}.json").read_text())
        ours = json.loads((tmp_path / f"env-{rank}.json").read_text())
        assert ours["env"].pop("TORCH_FR_BUFFER_SIZE") == "64"  # these two are all that we add
        assert ours["env"].pop("TORCH_NCCL_ENABLE_TIMING") == "1"
        assert set(ours["env"]) == set(theirs["env"])
        assert {k: v for k, v in ours["env"].items() if k not in OWN} == {
            k: v for k, v in theirs["env"].items() if k not in OWN
        }
        assert ours["secrets"] == []
        assert ours["cwd"] == theirs["cwd"] == str(tmp_path)
        assert ours["argv"][0] == theirs["argv"][0] == "job.py", "run in place"


def test_a_module_with_the_local_rank_among_its_arguments(start: Start, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "work.py").write_text("import sys\nprint(__name__, __package__, *sys.argv[1:])")
    job = start("--nproc-per-node", "2", "-m", "pack.work", "--local=${local_rank}", "--")
    job.ends(0)
    for rank in range(2):
        assert (job.rank_dir(rank) / "stdout.log").read_text().startswith(f"__main__ pack --local={rank} -- ")


def test_a_program_that_is_no_python(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "work.sh"
    program.write_text("#!/bin/sh\necho shell $RANK of $WORLD_SIZE in $(pwd)\nexit $((RANK * 0))\n")
    program.chmod(0o755)
    job = start("--nproc-per-node", "2", "--no-python", "./work.sh")
    job.ends(0)
    assert f"[rank 1] shell 1 of 2 in {tmp_path}" in job.text().splitlines()


FLOOD = """
import os, sys, time
import holdfast
rank = int(os.environ["RANK"])
if rank == 0:
    line = b"x" * 999 + b"\\n"
    end = time.monotonic() + 1
    while time.monotonic() < end:
        os.write(1, line * 100)
        holdfast.step(1)
    while os.fstat(1).st_size > 1 << 20:  # until the agent has seen to it
        time.sleep(0.01)
    os.write(1, b"\\nthe flood is over\\n")
    open(f"{sys.argv[1]}/over", "w").close()
step = 0
while not os.path.exists(f"{sys.argv[1]}/over"):
    time.sleep(0.01)
    step += 1
    holdfast.step(step)
print("steps", step)
"""


def test_a_flood_harms_nobody(start: Start) -> None:
    limit = 1 << 20
    limits = ("--set", f"logs.file_bytes={limit}", "--set", "logs.console_bytes_s=100000")
    job = start("--nproc-per-node", "2", *limits, script=FLOOD)
    job.ends(0)
    kept = job.rank_dir(0) / "stdout.log.1"
    assert 0 < kept.stat().st_size <= limit
    assert (job.rank_dir(0) / "stdout.log").stat().st_size <= limit
    lines = job.text().splitlines()
    assert sum(map(len, lines)) < 2_000_000
    assert any(re.match(rf"\[rank 0\] \.\.\. \d+ bytes .* {job.rank_dir(0)}/stdout\.log", line) for line in lines)
    assert [line[:50] for line in lines if line.endswith("over")] == ["[rank 0] the flood is over"]
    assert job.report().incidents == ()
    others = (job.rank_dir(1) / "stdout.log").read_text().split()
    assert others[0] == "steps" and int(others[1]) > 20


ODD = r"""
import sys, time
write = lambda b: (sys.stdout.buffer.write(b), sys.stdout.flush())
write(b"\xff\xfe not \x80 text\n")
write(b"y" * 700_000)
write(b"\n")
for done in range(50):
    write(b"\r%d %%" % (2 * done + 2))
write(b"\nno newline at the end")
"""


def test_odd_output_is_shown_as_it_is(start: Start) -> None:
    job = start(script=ODD)
    job.ends(0)
    lines = job.output.read_bytes().split(b"\n")
    assert b"[rank 0] \xff\xfe not \x80 text" in lines
    pieces = re.findall(
        rb"^\[rank 0\] (y+)(?: \.\.\. (\d+) bytes of this line not shown here; see /.*)?$", b"\n".join(lines), re.M
    )
    assert sum(len(shown) + int(cut or 0) for shown, cut in pieces) == 700_000, "each is shown, or counted"
    assert [line for line in lines if b"%" in line and b"ETTR" not in line] == [b"[rank 0] 100 %"]
    assert b"[rank 0] no newline at the end" in lines


@pytest.fixture
def shared(warm_server: Path, no_orphans: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a `holdfast run` whose nodes come from the shared fork server."""
    return make_rank_environment(
        job_environment(HOLDFAST_FORK_SERVER=str(warm_server), HOLDFAST_HOME=str(tmp_path / "home"))
    )


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_job(shared: dict[str, str], tmp_path: Path) -> None:
    """As with `holdfast run ... | head -1`."""
    script = "import time\nfor n in range(20):\n    print(n)\n    time.sleep(0.05)\nopen('done', 'w').close()"
    (tmp_path / "job.py").write_text(script)
    command = [sys.executable, "-m", "holdfast.cli", "run", "--no-zygote", "--run-dir", "run", "job.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env=shared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout
    assert job.stdout.readline().startswith(b"holdfast: ")
    job.stdout.close()
    assert job.wait(60) == 0
    assert (tmp_path / "done").exists()


def test_a_reader_that_does_not_read_does_not_hold_up_the_job(shared: dict[str, str], tmp_path: Path) -> None:
    """A full pipe: the job heals all the same, and can be stopped."""
    script = """
import os, sys, time
import holdfast
first = os.environ["HOLDFAST_GENERATION"] == "1"
for step in range(1, 40 if first else 5):
    os.write(1, b"z" * 9_999 + b"\\n")
    holdfast.step(step)
    time.sleep(0.01)
if first:
    os.kill(os.getpid(), 9)
open("healed", "w").close()
"""
    (tmp_path / "job.py").write_text(script)
    read, write = os.pipe()
    command = [sys.executable, "-m", "holdfast.cli", "run", "--no-zygote", "--run-dir", "run", "job.py"]
    job = subprocess.Popen(command, cwd=tmp_path, env=shared, stdout=write, stderr=write)
    os.close(write)
    try:
        until(lambda: (tmp_path / "healed").exists(), "the second generation")
        until(lambda: (tmp_path / "run" / "exit.json").exists(), "the end of the job")
        assert job.poll() is None  # it still has something to show
        while os.read(read, 1 << 16):
            pass
        assert job.wait(30) == 0
    finally:
        os.close(read)
        job.kill()
        job.wait()
