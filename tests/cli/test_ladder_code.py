"""The ladder, where code is to blame: an update goes back, and no machine leaves."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.rungs import CALM, PART, Case, chains, climbed, reaches

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TYPO = PART.format(name="two").replace("{chain} {step}", "{chian} {step}")


def test_a_typo_in_an_update_is_rolled_back(start: Start, tmp_path: Path) -> None:
    case = Case(start, tmp_path)
    job = case.chain("--nnodes", "2", "--standbys", "1", *CALM, HOLDFAST_GATE="20")
    reaches(job, 19)
    case.writes(PART.format(name="two").replace("def mixed(", "def mixed "))
    refused = case.does("update", "--now")
    assert refused.returncode == 1 and job.status()["generation"] == 1, "what does not compile stops nobody"
    case.updates(TYPO)
    job.until(lambda: job.status().get("generation") == 2, "the launch of the update")
    case.opens()
    job.ends(0)
    found = climbed(job)
    assert found.path == "launch pause launch stop rollback launch end"
    assert (found.restarts, found.evicted) == (2, ())
    assert [launch.release.number for launch in found.launches] == [1, 3, 1]
    [record] = job.report().incidents
    assert record.rolled_back == 3 and "NameError" in record.cause
    assert chains(job, 2) == {("one",)}, "no step was made by what was rolled back, none lost, none made twice"
