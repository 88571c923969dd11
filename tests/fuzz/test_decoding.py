"""Nothing is decoded but by decoding.py, whose errors are known; and each type that is decoded is fuzzed."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.codecs import CODECS

ROOT = Path(__file__).parents[2] / "holdfast"
BARE = re.compile(r"msgspec\.(json|msgpack)\.decode\(|(?<!decoder\()msgspec\.(json|msgpack)\.Decoder\((?!\[)")


def test_nobody_decodes_by_himself() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "decoding.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BARE.search(line)
    ]
    assert not found, "use from_json, from_msgpack or decoder of decoding.py"


# Decoded elsewhere: the test that feeds it with hostile bytes, by the text of the type in the code.
ELSEWHERE = {
    "ModelAnswer": "test_logs.py::test_an_answer_of_a_model",
    "Settings": "test_settings.py::test_a_file_of_settings",
    "types[name]": "test_settings.py::test_words_after_set",
    "Scenario": "test_settings.py::test_a_scenario",
    "tuple[kind, ...]": "test_settings.py::test_a_catalog",
    "tuple[CatalogRow, ...]": "test_settings.py::test_a_catalog",
    "FlightReport": "test_memory.py::test_a_flight_log_of_any_words",
}
# What such a use decodes, where its text does not say it; the codecs or tests that cover it.
GENERIC = {
    ("agent/probes/probe_team.py", "line"): ("team step", "team exchange"),
    ("checkpoint/manifest.py", "kind"): ("manifest", "part", "author"),
    ("cli/launch/enrolment_client.py", "kind"): ("challenge", "enrolled"),
    ("client/checkpointing/pickle_free_collectives.py", "kind"): ("rank report",),
    ("wire/run_and_node_specs.py", "kind"): ("run", "node", "listening", "ended"),
}
# Made by this very process out of values that it has checked, or a part of the package.
OWN = frozenset(
    {
        "IncidentSpan", "HookNotice",  # texts that were stripped and masked
        "LearnedWords", "PreparedFile", "tuple[SecretKind, ...]", "_File",  # catalogs of the package
        "tuple[CostRange, ...]", "FailureMix", "PriceSheet", "PublishedPolicy", "ExpectedRows", "InjectedFault",
        "CheckpointRow", "LeasedRun",  # columns of a statement, typed by the database
    }
)  # fmt: skip
# What any JSON is; it is looked at field by field.
FREE = frozenset({"object", "dict[str, object]", "dict[str, Any]", "dict[str, msgspec.Raw]", "list[str]"})
# What a controller of this run answers to a person's command on the same host, or by TLS and a token.
ANSWERS = frozenset(
    {"ReleaseOverview", "ComparedJobs", "Report", "WeekSummary", "StorageReport", "JobStacks", "_Stacks"}
    | {"PodView", "HostView"}  # and an API server that is known by its certificate
)


def uses() -> Iterator[tuple[str, str]]:
    """Every type that is decoded somewhere: the file, and the type as the code writes it."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (found := _decoded_type(node)) is not None:
                yield str(path.relative_to(ROOT)), ast.unparse(found)


def _decoded_type(call: ast.Call) -> ast.expr | None:
    name = ast.unparse(call.func)
    if name.split(".")[-1] in ("from_json", "from_msgpack", "read_json") or name == "msgspec.convert":
        given = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "type")]
        return given[0] if given else None
    return call.args[0] if name in ("msgspec.json.Decoder", "msgspec.msgpack.Decoder") and call.args else None


def spelled(kind: Any) -> str:
    """A type as code spells it, without the modules of its names."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return "Number"  # the only bounds in a type that a decoder names
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join('...' if arg is Ellipsis else spelled(arg) for arg in args)}]"
    if args:
        return " | ".join(map(spelled, args))
    return str(getattr(kind, "__name__", kind))


ALIASES = {
    "Answer": "of the judge",
    "Dims": "mesh",
    "Entries": "blocked",
    "Event": "event",
    "FromAgent": "from agent",
    "FromKeeper": "from keeper",
    "FromZygote": "from zygote",
    "Request": "opinion request",
    "SurvivorOrder": "to a survivor",
    "ToAgent": "to agent",
    "ToHolder": "to holder",
    "ToKeeper": "to keeper",
}


def test_every_type_that_is_decoded_is_fuzzed() -> None:
    known = {spelled(kind) for _, kind, _ in CODECS.values()} | ALIASES.keys()
    known |= ELSEWHERE.keys() | OWN | FREE | ANSWERS
    missing = [
        f"{file}: {text}"
        for file, text in uses()
        if known.isdisjoint({text, re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)}) and (file, text) not in GENERIC
    ]
    assert not missing, "give each a line in tests/fuzz/codecs.py, or name the test that feeds it"


def test_what_is_said_to_be_fuzzed_is() -> None:
    named = {name for names in GENERIC.values() for name in names} | {*ALIASES.values()}
    assert named <= CODECS.keys()
    for where in ELSEWHERE.values():
        file, test = where.split("::")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()
    texts = {text for _, text in uses()}
    assert OWN | ANSWERS | FREE | ELSEWHERE.keys() <= texts, "no longer decoded: take it out"
    assert GENERIC.keys() <= {*uses()}


@pytest.mark.parametrize(
    "text", ["from_json(a, B)", "read_json(a, b.C)", "msgspec.json.Decoder(D)", "f(g.from_msgpack(x, E))"]
)
def test_uses_are_seen(text: str) -> None:
    found = [_decoded_type(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert len([one for one in found if one is not None]) == 1
