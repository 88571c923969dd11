"""Bad releases: the job's own code with a defect added, delivered by `holdfast update`."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from holdfast.chaos.injection_records import CannotInject, InjectedFault
from holdfast.chaos.injection_scene import InjectionReport, InjectionScene
from holdfast.chaos.job_observer import JobObserver

_MOST_BYTES, _MOST_FILES = 16 << 20, 2000
SPOILT = {
    "syntax": "def broken(:\n",
    "import": "import no_such_module_of_chaos\n",
    "raise": 'raise RuntimeError("chaos: a bad release")\n',
    "late": """\
import torch.optim.optimizer as _optimizer
_steps = [0]
def _fail(*_):
    _steps[0] += 1
    if _steps[0] == 3:
        raise RuntimeError("chaos: a bad release")
_optimizer.register_optimizer_step_post_hook(_fail)
""",
}
REFUSED = ("syntax", "import")


def bring_bad_release(scene: InjectionScene, fault: InjectedFault) -> InjectionReport:
    """Update the job to a defective release; holdfast should refuse it before ranks stop, or roll it back."""
    how = fault.text or "raise"
    if how not in SPOILT:
        raise CannotInject(f"there is no bad release '{how}'; there are {', '.join(SPOILT)}")
    entry = scene.sight.run.entry
    script = Path(entry.cwd, entry.argv[0])
    if entry.module or not entry.python or not script.is_file():
        raise CannotInject("only a job that runs a Python script can get a bad release")
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as folder:
        tree = Path(folder) / "tree"
        _copy_tree(script.parent, tree)
        spoil_script(tree / script.name, how)
        told = update_job(scene.sight, tree)
    if told.returncode not in (0, 1):
        raise CannotInject(f"holdfast update was refused: {told.stderr.strip() or told.stdout.strip()}")
    filled = msgspec.structs.replace(fault, text=how)
    if how in REFUSED:
        blind = "it is refused before any rank is stopped"
        return InjectionReport(what=f"a release with a bad {how}", fault=filled, alarms=(), blind=blind)
    return InjectionReport(what=f"a release that fails ({how})", fault=filled)


def update_job(sight: JobObserver, tree: Path) -> subprocess.CompletedProcess[str]:
    """Run `holdfast update --now` with this tree; does not wait for the update to finish."""
    return sight.run_command(
        "update", str(tree), "--now", "--no-wait", "--run", str(sight.run_dir), "--message", "chaos"
    )


def _copy_tree(root: Path, tree: Path) -> None:
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    if len(files) > _MOST_FILES or sum(path.stat().st_size for path in files) > _MOST_BYTES:
        raise CannotInject(f"{root} is too large to be copied for a bad release")
    for path in files:
        beside = tree / path.relative_to(root)
        beside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, beside)


def spoil_script(script: Path, how: str) -> None:
    """Insert the defect at the top of a script, after any `from __future__` imports."""
    lines = script.read_text().splitlines(keepends=True)
    at = 0
    for number, line in enumerate(lines):
        if line.startswith("from __future__ import"):
            at = number + 1
    script.write_text("".join([*lines[:at], SPOILT[how], *lines[at:]]))
