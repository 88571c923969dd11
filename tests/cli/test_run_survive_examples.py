"""Examples of ranks that go on in their processes: one is killed, and the last line is that of a calm run."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.rungs import CALM, reaches, said

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).parents[2] / "examples"
TWO = ("--nnodes", "2", "--nproc-per-node", "2")


@pytest.mark.parametrize("name", ["survive_ddp", "elastic_pipeline"])
def test_its_last_line_is_that_of_a_calm_run(start: Start, start_shared: Start, name: str) -> None:
    script = (EXAMPLES / f"{name}.py").read_text().replace('"STEPS", "200"', '"STEPS", "40"')
    calm = start_shared(*TWO, *CALM, script=script, name=name)
    calm.ends(0)
    calm.run_dir.rename(calm.run_dir.with_name(f"run-{name}"))
    job = start(*TWO, *CALM, script=script)
    reaches(job, 19)
    job.kill(job.rank(2))
    job.ends(0)
    before, after = job.ranks(4), job.ranks(4, generation=2)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    [[pid, *told]], [[_, *wanted]] = said(job, "process"), said(calm, "process")
    assert (int(pid), told) == (before[0], wanted)
