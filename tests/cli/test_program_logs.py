"""What our own programs print when they fail is masked, whichever of their logs it goes to."""

import subprocess
from pathlib import Path

import pytest

from holdfast.linux.preimported_fork import Program
from tests.conftest import job_environment

pytestmark = pytest.mark.e2e
SECRET = "correct-horse-battery"
# Words with which each fails at once, by an exception that quotes them: holder.log, store.log, fork.log, agent.log.
PROGRAMS = {
    "holdfast.agent.process_holder": (f"/not-there/{SECRET}",),
    "holdfast.client.boot.tcp_store_server": ("/not-there", SECRET, "localhost"),
    "holdfast.agent.fork_server_main": ("0", SECRET),
    "holdfast.agent.main": (f"/not-there/{SECRET}", "0"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", PROGRAMS)
def test_an_exception_that_quotes_a_secret_is_logged_without_it(module: str, tmp_path: Path) -> None:
    env = job_environment(A_TOKEN=SECRET)
    command = Program(module=module, args=PROGRAMS[module], env=env).exec_command()
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0 and "Traceback" in done.stderr
    assert "<secret>" in done.stderr and SECRET not in done.stderr + done.stdout
