"""What `make demo` shows to somebody at a terminal, to its end: the page that opens by itself. And to a file."""

import importlib.util
import io
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from tests.cli.terminal import Terminal
from tests.conftest import ROOT, job_environment

# What a desktop starts as its browser: it keeps the page that it was told to open, and follows where that leads.
BROWSER = """#!{python}
import sys, urllib.request
page = urllib.request.urlopen(sys.argv[1]).read().decode()
address = page.split("url=")[1].split('"')[0]
open({opened!r}, "a").write(address + " " + urllib.request.urlopen(address).read(15).decode().strip() + "\\n")
"""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_two_faults_are_survived_and_the_page_of_the_run_opens(tmp_path: Path, no_orphans: str) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(BROWSER.format(python=sys.executable, opened=str(opened)))
    browser.chmod(0o755)
    (files := tmp_path / "tmp").mkdir()
    homes = {"HOLDFAST_HOME": str(tmp_path / "home"), "TMPDIR": str(files)}
    env = job_environment(TERM="xterm", DISPLAY=":7", BROWSER=f"{browser} %s", **homes)
    argv = [sys.executable, str(ROOT / "examples/demo.py"), "--steps", "45"]
    with Terminal(argv, env=env, cwd=tmp_path, columns=100) as terminal:
        terminal.patience_s = 1000.0
        terminal.until(lambda: opened.exists() and opened.read_text(), "a browser")
        terminal.shows("Ctrl-C ends this")
        text = "\n".join(terminal.whole_text())
        assert len(re.findall("^> step .* (?:was killed with SIGKILL|was lost)$", text, re.MULTILINE)) == 2, text
        [(calm, struck)] = re.findall(r"final weights undisturbed (\w{16}), with faults (\w{16}):", text)
        assert calm == struck
        [told] = opened.read_text().splitlines()
        assert re.match(r"http://127\.0\.0\.1:\d+/\?code=\S+ <!doctype html>", told, re.IGNORECASE)
        assert told.split()[0] in text.replace("\n", ""), "it is printed, too"
        [index] = files.glob("holdfast-demo-*/disturbed/run/releases/*.files")
        assert list(json.loads(index.read_bytes())["files"]) == ["gpt.py"], "each run copies no more than its script"
        terminal.type("\x03")
        terminal.until(lambda: terminal.process.poll() is not None, "the end")
        assert terminal.process.returncode == 0
        assert list(files.glob("holdfast-demo-*")) == []


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo, with its output in a file, and whose two runs are over at once."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def both_runs(folder: Path, steps: int) -> tuple[int, Path]:
        for run in ("undisturbed", "disturbed"):
            (folder / run / "run").mkdir(parents=True)
            (folder / run / "ckpt").mkdir()
        return 0, folder / "disturbed/run"

    monkeypatch.setattr(module, "_demo", both_runs)
    monkeypatch.setattr(module, "console", Console(file=io.StringIO(), highlight=False, width=80))
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    return module


def test_without_a_terminal_the_page_is_named_and_what_it_reads_stays(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 0
    page, stays = demo.console.file.getvalue().splitlines()
    program, *words = shlex.split(page.removeprefix("the page of what happened: "))
    [folder] = tmp_path.glob("holdfast-demo-*")
    assert words[-2:] == ["dash", str(folder / "disturbed/run")] and Path(program).exists()
    assert str(folder) in stays
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == ["disturbed", "disturbed/run"]


def test_without_a_page_nothing_stays(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--no-page"])
    assert demo.main() == 0
    [told] = demo.console.file.getvalue().splitlines()
    assert told.startswith(f"removing {tmp_path}/holdfast-demo-")
    assert list(tmp_path.glob("holdfast-demo-*")) == []
