"""What fails before any step was made is the job's own doing, and costs no node."""

import msgspec
import pytest

from holdfast.core.incident.ladder import GAVE_UP, find_verdict
from holdfast.model.incident_record import Remedy
from tests.core.diagnose.test_ladder import CRASH, SCRIPT, case, past

CHOSEN = msgspec.structs.replace(CRASH, code=3, klass="", group="", reason="exited with code 3")


@pytest.mark.parametrize("cap", [None, 5, 1])
def test_a_code_of_its_own_before_any_step_costs_no_node(cap: int | None) -> None:
    """Whatever the script does not like, it is the same on every machine."""
    before = case(CHOSEN, ever=False, step=-1, max_restarts=cap)
    assert find_verdict(before).remedy is Remedy.RESTART
    verdict = find_verdict(msgspec.structs.replace(before, past=past(-1), rounds=1, restarts=1))
    assert verdict.remedy is (Remedy.RESTART if cap == 5 else Remedy.GIVE_UP)
    if cap is None:
        assert CHOSEN.reason in verdict.reason
    assert find_verdict(case(CHOSEN, past=past(10))).remedy is Remedy.EVICT, "after steps it may be the machine"


def test_a_code_of_its_own_amid_other_failures_may_be_their_echo() -> None:
    mixed = case(CHOSEN, ever=False, step=-1, past=past(-1), rounds=2)
    assert find_verdict(mixed).remedy is Remedy.RESTART
    assert find_verdict(msgspec.structs.replace(mixed, rounds=3)).remedy is Remedy.GIVE_UP


def test_what_the_environment_lacks_is_not_tried_again() -> None:
    lacking = msgspec.structs.replace(
        SCRIPT, action="fix_config", hint="install a CUDA build of torch", confidence=0.84
    )
    verdict = find_verdict(case(lacking, ever=False, step=-1))
    assert verdict.remedy is Remedy.GIVE_UP and lacking.hint in verdict.reason


def test_an_exception_before_any_step_is_tried_once_more() -> None:
    first = case(SCRIPT, ever=False, step=-1)
    assert find_verdict(first).remedy is Remedy.RESTART
    again = find_verdict(msgspec.structs.replace(first, past=past(-1), rounds=1, restarts=1))
    assert again.code == GAVE_UP


def test_an_exception_before_any_step_is_tried_as_often_as_the_user_says() -> None:
    before = case(SCRIPT, ever=False, step=-1, max_restarts=3)
    for restarts in range(3):
        tried = msgspec.structs.replace(before, past=past(*[-1] * restarts), rounds=restarts, restarts=restarts)
        assert find_verdict(tried).remedy is Remedy.RESTART
    assert find_verdict(msgspec.structs.replace(before, restarts=3)).code == 1
    assert find_verdict(msgspec.structs.replace(before, max_restarts=0)).code == 1


@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"raised": "SyntaxError"},
        {"klass": "import_dependency", "action": "fix_config"},
        {"klass": "", "reason": "exited with code 3 (SystemExit: 3)"},
    ],
    ids=["it cannot be read", "a module is missing", "it ended itself"],
)
def test_what_a_restart_cannot_change_is_not_tried_again(changes: dict[str, str], cap: int | None) -> None:
    certain = msgspec.structs.replace(SCRIPT, **changes)
    assert find_verdict(case(certain, ever=False, step=-1, max_restarts=cap)).code == GAVE_UP


def test_a_file_that_is_missing_may_come() -> None:
    missing = msgspec.structs.replace(SCRIPT, klass="file_not_found", action="fix_config", hint="check the path")
    first = case(missing, ever=False, step=-1)
    assert find_verdict(first).remedy is Remedy.RESTART
    assert missing.hint in find_verdict(msgspec.structs.replace(first, past=past(-1))).reason
