"""controller.log stays small, whoever writes into it, and its newest lines are there."""

import subprocess
import sys
from pathlib import Path

import pytest

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
