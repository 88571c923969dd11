"""Scripts as people publish them, none of which knows of us, through real faults: is what we say of them so?

`table.py` has the scripts and what can be known of each, `witness.py` what a test sees for itself, `truth.py` the
comparison of the two. How to add a script: CONTRIBUTING.md.
"""

import importlib.util
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.public import truth
from tests.public.conftest import LaunchPublic
from tests.public.play import Calm, Play, run_calm
from tests.public.table import SAVES, SCRIPTS, STEPS, Resuming, Script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# In `make test`, too; nobody waits there for a run without a fault to compare with.
QUICK, QUICK_STOP = ("nano_gpt-killed", "mnist-killed"), "nano_gpt"


def needed(name: str) -> Script:
    script = SCRIPTS[name]
    if script.needs and importlib.util.find_spec(script.needs) is None:
        pytest.skip(f"{script.needs} is not installed; make test-full has it")
    return script


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Of all workers of this run of the tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


def strike_killed(play: Play) -> None:
    play.job.kill(play.victim())
    play.busy.unlink()


def strike_frozen(play: Play) -> None:
    """The script was edited meanwhile, too, so that it goes on from a copy of what it was."""
    play.edit_comment()
    play.job.kill(play.victim(), signal.SIGSTOP)
    play.job.until(lambda: play.seen.generations > 1, "the next generation")
    play.busy.unlink()


INCIDENTS: dict[str, Callable[[Play], None]] = {"killed": strike_killed, "frozen": strike_frozen}
CASES = [
    pytest.param(name, fault, id=f"{name}-{fault}", marks=[] if f"{name}-{fault}" in QUICK else pytest.mark.slow)
    for name in SCRIPTS
    for fault in INCIDENTS
]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault(name: str, fault: str, launch: LaunchPublic, shared: Path) -> None:
    script = needed(name)
    calm: Calm | None = None if f"{name}-{fault}" in QUICK else run_calm(script, launch, shared)
    play = Play(script, launch).go_on()
    INCIDENTS[fault](play)
    ended_at = play.end()
    [record] = play.job.report().incidents
    cause = script.causes[fault]
    told = "" if "{good}" in cause else " at step {good}"  # once is enough
    truth.check_restart(play.job, play.seen, script, record, f"{cause}{told}; restarted in place")
    assert f"done: 1 incident, ETTR {play.job.report().at_most}" in play.job.sentences()[-1]
    play.check_sentences(ended_at, fault)
    truth.check_end(play.job, play.seen, script)
    truth.check_bill(play.seen, script, play.job.report(), ended_at)
    truth.check_losses([play.seen], script, calm.losses if calm else None)
    truth.check_files(play.job, script, calm.files if calm else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_update(name: str, launch: LaunchPublic, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = needed(name)
    calm = run_calm(script, launch, shared)
    play = Play(script, launch).go_on()
    play.edit_comment()
    code = main(["update", "--now", "--run", str(play.job.run_dir)])
    play.busy.unlink()
    ended_at = play.end()
    said = capsys.readouterr()
    assert code == 0, said.err
    assert re.search(r"\b1 file .* release 1\b", said.out) and "release 2 runs" in said.out
    [change] = play.job.report().changes
    assert play.job.report().incidents == ()
    truth.check_restart(play.job, play.seen, script, change, "release 2: restarted")
    assert f"done: 0 incidents, ETTR {play.job.report().at_most}" in play.job.sentences()[-1]
    play.check_sentences(ended_at, "updated")
    truth.check_end(play.job, play.seen, script)
    truth.check_bill(play.seen, script, play.job.report(), ended_at)
    truth.check_losses([play.seen], script, calm.losses)
    truth.check_files(play.job, script, calm.files)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK_STOP else pytest.mark.slow) for name in SCRIPTS]
)
def test_a_stop_and_another_run(name: str, launch: LaunchPublic, shared: Path) -> None:
    script = needed(name)
    calm: Calm | None = None if name == QUICK_STOP else run_calm(script, launch, shared)
    play = Play(script, launch).go_on()
    assert main(["stop", "--run", str(play.job.run_dir)]) == 0
    play.busy.unlink()
    ended_at = play.end(143)
    truth.check_stopped(play.job, play.seen, script, ended_at)
    play.check_sentences(ended_at, "stopped")
    play.job.run_dir.rename(play.job.folder / "run-stopped")

    again = Play(script, launch, name="again")
    ended_at = again.end()
    reached = play.seen.reached(1)
    kept = 0 if script.known is Resuming.ANEW else reached - reached % SAVES
    assert again.seen.origin(1) == kept, "the script finds what it had saved"
    told = STEPS - kept if script.known is Resuming.NOT else STEPS
    assert again.job.report().step == told and again.seen.reached(1) == STEPS
    since = "" if script.known is Resuming.RESUMED else "the start of this run"
    assert again.job.report().since == since, "only an optimizer that counts tells of an earlier run"
    again.check_sentences(ended_at)
    assert again.job.report().incidents == () and "done: 0 incidents, ETTR" in again.job.sentences()[-1]
    truth.check_bill(again.seen, script, again.job.report(), ended_at)
    truth.check_losses([play.seen, again.seen], script, calm.losses if calm else None)
    truth.check_files(again.job, script, calm.files if calm else None)
