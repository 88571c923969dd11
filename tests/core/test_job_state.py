"""The record of a job's state: who may write to it, and what holds when a phase begins."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.job_view import JobView
from holdfast.core.decide.ongoing_planned_restart import Pause
from holdfast.core.incident.open_incident import open_incident
from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_phase import Phase

PACKAGE = Path(__file__).parents[2] / "holdfast"
DECIDE = PACKAGE / "core" / "decide"
CRASH = Alarm(kind=Kind.CRASH, at=1.0, suspects=("a",), reason="exited with code 1")
STEP = Progress(generation=1, step=1, at=1.0, first_step=1, first_at=1.0, counted=False)


def state_in(phase: Phase) -> JobState:
    state = JobState()
    state.phase = phase
    return state


def with_incident(state: JobState) -> JobState:
    state.interruption = open_incident(1.0, 1, 1, None, CRASH)
    state.interruption.add_alarm(CRASH)
    return state


def with_pause(state: JobState) -> JobState:
    state.interruption = Pause.begin_pause(1.0, "held by ann", 1, None)
    return state


def behind_fence(state: JobState) -> JobState:
    state.fence.until = 9.0
    return state


def held(state: JobState) -> JobState:
    state.requests.held = "ann"
    return state


BROKEN: tuple[tuple[Phase, Callable[[JobState], JobState], Phase, str], ...] = (
    (Phase.HELD, lambda state: state, Phase.WAITING, "no wait is without end"),
    (Phase.WAITING, behind_fence, Phase.LAUNCHING, "ranks of an older generation may still train"),
    (Phase.WAITING, held, Phase.LAUNCHING, "wants no rank to run"),
    (Phase.STOPPING, with_incident, Phase.LAUNCHING, "a launch carries out the verdict"),
    (Phase.STARTING, lambda state: state, Phase.TRAINING, "a step proves"),
    (Phase.STARTING, with_pause, Phase.TRAINING, "the first step ends"),
    (Phase.TRAINING, lambda state: state, Phase.STOPPING, "so that a failure can be judged"),
    (Phase.STOPPING, with_incident, Phase.PROBING, "the alarms name none"),
    (Phase.TRAINING, lambda state: state, Phase.PAUSING, "is accounted to somebody"),
    (Phase.WAITING, lambda state: state, Phase.HELD, "only a person"),
    (Phase.STOPPING, with_incident, Phase.ENDING, "before the job ends"),
    (Phase.TRAINING, lambda state: state, Phase.LAUNCHING, "launching does not follow training"),
    (Phase.DONE, lambda state: state, Phase.LAUNCHING, "launching does not follow done"),
)
AWAITING = (Phase.LAUNCHING, Phase.STOPPING, Phase.PROBING, Phase.PAUSING, Phase.ENDING)


@pytest.mark.parametrize(("before", "make", "after", "why"), BROKEN)
def test_a_phase_whose_invariant_is_broken_is_not_entered(
    before: Phase, make: Callable[[JobState], JobState], after: Phase, why: str
) -> None:
    state = make(state_in(before))
    if why == "the first step ends":
        state.progress = STEP
    with pytest.raises(AssertionError, match=why):
        state.enter(after, 7 if after in AWAITING else 0)


def test_a_phase_that_an_outcome_ends_names_the_action_and_no_other_does() -> None:
    state, ending = state_in(Phase.TRAINING), state_in(Phase.ENDING)
    with pytest.raises(AssertionError, match=f"^{Phase.ENDING} awaits"):
        state.enter(Phase.ENDING)
    with pytest.raises(AssertionError, match=f"^{Phase.DONE} awaits 7"):
        ending.enter(Phase.DONE, 7)
    assert (state.phase, ending.phase) == (Phase.TRAINING, Phase.ENDING)
    state.enter(Phase.ENDING, 7)
    assert (state.phase, state.awaited) == (Phase.ENDING, 7)


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def writes(tree: ast.AST) -> Iterator[ast.Attribute | ast.Subscript]:
    """All attributes and items that are assigned to, changed in place or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_enter_alone_changes_the_phase_and_emit_alone_the_actions() -> None:
    found = {
        f"{path.stem}.{function.name}: {node.attr}"
        for path, tree in trees(DECIDE)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in writes(function)
        if isinstance(node, ast.Attribute) and node.attr in ("phase", "awaited", "actions")
    }
    assert found == {
        "job_state.__init__: phase",
        "job_state.__init__: awaited",
        "job_state.enter: phase",
        "job_state.enter: awaited",
        "job_state.begin_step: actions",
    }
    used = [
        f"{path.stem}: {ast.unparse(node)}"
        for path, tree in trees(DECIDE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "actions"
    ]
    assert used == ["job_state: self.actions.extend"]


def test_handlers_import_the_state_in_one_direction() -> None:
    order = ["job_state", "launching", "incident_course", "planned_restart", "controller_takeover", "operator_requests"]
    order.append("decider")
    for number, name in enumerate(order):
        text = (DECIDE / f"{name}.py").read_text()
        later = {f"holdfast.core.decide.{other}" for other in order[number:]}
        assert later.isdisjoint(imported(ast.parse(text))), name
        assert "TYPE_CHECKING" not in text


# What every trespass names; most files do not, and need not be parsed.
NAMED = re.compile(r"job_state|(?<![a-z])(decider|view)(?![a-z])")


def trespasses(tree: ast.AST) -> Iterator[str]:
    """Where code outside of core goes past the view: to the state itself, or to write through a decider or a view."""
    yield from (f"imports {name}" for name in imported(tree) if name.startswith("holdfast.core.decide.job_state"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_state" and ends_in(node.value, "decider", "view"):
            yield f"{node.lineno}: {ast.unparse(node)}"
    for node in writes(tree):
        if ends_in(node.value, "decider", "view"):
            yield f"{node.lineno}: writes {ast.unparse(node)}"


def ends_in(node: ast.expr, *names: str) -> bool:
    """Whether an expression is one of these names, or an attribute, item or call below one."""
    while True:
        match node:
            case ast.Name(id=name):
                return name.strip("_") in names
            case ast.Attribute(value=inner, attr=name):
                if name.strip("_") in names:
                    return True
                node = inner
            case ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case _:
                return False


def test_what_the_view_hands_out_cannot_be_changed() -> None:
    state = JobState()
    view = JobView(state)
    state.nodes.standbys.gone["b"] = None
    state.requests.held = "ann"
    assert (dict(view.gone), view.held_by) == ({"b": None}, "ann"), "it shows what is so now"
    with pytest.raises(AttributeError):
        view.phase = Phase.DONE  # type: ignore[misc]
    with pytest.raises(AttributeError):
        view.more = 1  # type: ignore[attr-defined]
    properties = [name for name, found in vars(JobView).items() if isinstance(found, property)]
    assert len(properties) > 20
    assert [name for name in properties if isinstance(getattr(view, name), list | dict | set)] == []


def test_nobody_outside_of_core_reaches_past_the_view() -> None:
    outside = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "core"]
    assert len(outside) > 100
    texts = {path: path.read_text() for path in outside}
    named = {path: text for path, text in texts.items() if NAMED.search(text)}
    assert len(named) > 30
    found = {path: list(trespasses(ast.parse(text))) for path, text in named.items()}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from holdfast.core.decide.job_state import JobState",
        "from holdfast.core.decide import job_state",
        "controller._decider._state.generation",
        "self.view._state.nodes",
        "world.decider.phase = 1",
        "view.generation += 1",
        "view.gone['b'] = None",
        "del self._view.job",
    ],
)
def test_a_trespass_is_seen(text: str) -> None:
    assert NAMED.search(text) and list(trespasses(ast.parse(text)))
