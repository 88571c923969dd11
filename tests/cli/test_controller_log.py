"""controller.log stays small, whoever writes into it, its newest lines are there, and no secret of the run is."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.launch.controller_console import SaidLog
from holdfast.cli.run_dirs import run_dir_secrets
from holdfast.config import Settings
from holdfast.linux.preimported_fork import KEPT
from holdfast.logs.secret_masking import Masker
from holdfast.model.job_and_seats import Job
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

_MOST = 20_000
# As its supervisor starts a controller: standard output and error go to the file that it logs to.
_CHATTY = """
import logging, os, sys
from pathlib import Path
from holdfast.cli.launch.controller_log import ControllerLog
log = ControllerLog(Path(sys.argv[1]), most_bytes=int(sys.argv[2]))
logging.basicConfig(handlers=[log], level=logging.INFO)
for number in range(2000):
    if "logged" in sys.argv:
        logging.info("logged %d %s", number, "x" * 60)
    if "printed" in sys.argv:
        os.write(2, f"printed {number} {'y' * 60}\\n".encode())
    log.bound_size()
os.write(1, b"printed-last\\n")
logging.info("logged-last")
"""


@pytest.mark.parametrize("ways", [("logged",), ("printed",), ("logged", "printed")], ids=" and ".join)
def test_the_log_is_bounded_and_has_the_newest_lines(tmp_path: Path, ways: tuple[str, ...]) -> None:
    path = tmp_path / "controller.log"
    with path.open("ab") as file:
        command = [sys.executable, "-c", _CHATTY, str(tmp_path), str(_MOST), *ways]
        subprocess.run(command, stdout=file, stderr=file, check=True, timeout=120)
    files = sorted(tmp_path.iterdir())
    assert [one.name for one in files] == ["controller.log", "controller.log.1"]
    assert all(one.stat().st_size < 1.1 * _MOST for one in files)
    text = path.read_text()
    assert "printed-last" in text and "logged-last" in text
    older = (tmp_path / "controller.log.1").read_text() + text
    for way in ways:
        assert f"{way} 1999 " in older


def test_output_that_goes_elsewhere_stays_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CHATTY, str(tmp_path), str(_MOST), "logged", "printed"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert done.stdout == b"printed-last\n" and done.stderr.count(b"printed") == 2000
    assert "printed" not in (tmp_path / "controller.log").read_text()


# A controller that fails with what it knows: in a task that nobody looks at, and as a whole.
_FAILS = """
import asyncio, sys
from pathlib import Path
from holdfast.cli.launch import controller_main
run_dir = Path(sys.argv[1])
words = [(run_dir / name).read_text() for name in ("token", "door/secret")]
async def fails(said):
    raise RuntimeError(f"{said}: {words}")
async def run_leased(*given):
    left = asyncio.ensure_future(fails("beside"))
    await asyncio.sleep(0)
    del left
    await fails("as a whole")
controller_main._run_leased = run_leased
sys.exit(controller_main.main())
"""


def test_an_exception_of_the_controller_shows_no_secret_of_its_run(tmp_path: Path) -> None:
    job, entry = Job(run_id="r", min_nodes=1, max_nodes=1), EntryPoint(argv=("x",))
    run = RunSpec(job=job, entry=entry, settings=Settings(), fleet="local", nproc=1, log_dir="/l")
    run_and_node_specs.write_json(tmp_path / "run.json", run)
    secrets = [run_dir_secrets.read_token(tmp_path), "correct horse battery staple"]
    run_dir_secrets.write_door_secret(tmp_path, secrets[1])
    with (tmp_path / "controller.log").open("ab") as log, socket.socket() as listener:
        command = [sys.executable, "-c", _FAILS, str(tmp_path), str(os.getpid())]
        env = os.environ | {KEPT: str(listener.fileno())}
        done = subprocess.run(
            command, env=env, stdout=log, stderr=log, pass_fds=[listener.fileno()], check=False, timeout=120
        )
    told = (tmp_path / "controller.log").read_text()
    assert done.returncode == 1
    for said in ("beside", "as a whole"):
        assert f"RuntimeError: {said}: ['<secret>', '<secret>']" in told
    assert not [secret for secret in secrets if secret in told]


def test_what_the_console_is_told_is_masked(tmp_path: Path) -> None:
    say = SaidLog(tmp_path, Masker(hosts=False, known=["correct-horse-battery"]))
    say("n1 is gone: correct-horse-battery\nholdfast: password=hunter2")
    say._file.close()
    assert (tmp_path / "said.log").read_text() == "holdfast: n1 is gone: <secret>\n  holdfast: password=<secret>\n"
    assert (tmp_path / "said.log").stat().st_mode & 0o777 == 0o600
