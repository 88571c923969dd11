"""What a script prints is no danger to the node that it runs on."""

from pathlib import Path

import psutil
import pytest

from holdfast.agent.rank import last_words_judge
from holdfast.logs import user_rows
from tests.agent.test_last_words_judge import ENDLESS, HOSTILE
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN

pytestmark = pytest.mark.e2e

# Its first life ends with a line that is judged for ever.
STALLS = TRAIN.replace(
    "while not",
    f"""
if not os.path.exists(f"{{folder}}/stalled"):
    open(f"{{folder}}/stalled", "w").close()
    holdfast.step(1, loss=1.0)
    print({HOSTILE!r}, file=sys.stderr, flush=True)
    os._exit(3)
while not""",
)


@pytest.mark.slow
def test_output_that_cannot_be_judged_evicts_nobody(start: Start, tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text(user_rows.format_row(ENDLESS))
    job = start("--nnodes", "1", "--set", f"words.catalog={rows}", script=STALLS)
    job.trains(generation=2)
    [judge] = psutil.Process(job.agent("n0")).children()
    assert "holdfast.agent.rank.last_words_judge" in judge.cmdline() and not judge.children(), "who was at it is gone"
    job.finish()
    job.ends(0)
    assert f"more than {last_words_judge.DEADLINE_S:g} s" in (job.run_dir / "nodes/n0/agent.log").read_text()
    [record] = job.report().incidents
    assert (record.kind, record.verdict.remedy, record.evicted) == ("crash", "restart", ())


def test_a_judge_dies_with_its_agent(start: Start) -> None:
    job = start("--nnodes", "1", script=TRAIN)
    job.trains()
    [judge] = psutil.Process(job.agent("n0")).children()
    job.kill(job.agent("n0"))
    job.until(lambda: not judge.is_running(), "the end of the judge")
    [another] = job.until(lambda: psutil.Process(job.agent("n0")).children(), "the next agent's judge")
    assert another.pid != judge.pid
    job.finish()
    job.ends(0)
