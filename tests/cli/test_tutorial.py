"""The script of docs/TUTORIAL.md, struck as it says: what the page shows is what a reader gets."""

import re
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job

PAGE = Path(__file__).parents[2] / "docs/TUTORIAL.md"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_tutorial_is_true(start: Start) -> None:
    text = PAGE.read_text()
    [script] = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    [flags] = re.findall(r"holdfast run (.*) train\.py", text)
    job = start(*flags.split(), script=script)
    job.until(lambda: "[rank 0] step 100 loss" in job.text(), "a line of the script")
    job.kill(job.rank(1))
    job.says("restarted in place")
    job.until(lambda: has_standby(job), "steps after the kill, and a standby")
    job.kill(job.rank(0, generation=2), signal.SIGSTOP)
    job.ends(0)
    for words in (
        "rank 1 on n1 was killed by SIGKILL (sender unknown); stopping all ranks",
        "rank 0 is stopped; evicted n0, admitted n2 and resumed from step",
        "done: 2 incidents",
        "step 600 was last written to storage",
    ):
        # Which of three nodes come first, and are seated, is chance on a busy machine.
        assert words in text and re.search(re.sub(r"\bn\d", r"n\\d", re.escape(words)), job.text()), words
    lost = [record.good_step - (record.resumed_from or 0) for record in job.report().incidents]
    assert len(lost) == 2 and max(lost) <= 1, "a step at most, which was not sealed yet"


def has_standby(job: Job) -> bool:
    found = job.status()
    return found.get("generation") == 2 and found["phase"] == "training" and "ready" in str(found["nodes"])
