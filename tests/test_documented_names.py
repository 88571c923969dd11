"""Holds names in documents: variables, functions of the package and fields of orders are those of the code."""

import json
import re
from pathlib import Path

import msgspec

from tests.test_docs import PAGES, ROOT, files


def test_variables_in_documents_are_those_of_the_program() -> None:
    code = "\n".join(path.read_text() for path in files(ROOT / "holdfast") if path.suffix == ".py")
    assert [name for page in PAGES for name in unknown_variables(page, code)] == []


def unknown_variables(page: Path, code: str) -> list[str]:
    named = sorted(set(re.findall(r"\bHOLDFAST_[A-Z_]+\b", page.read_text())))
    return [f"{page}: {name}" for name in named if not re.search(rf"\b{name}\b", code)]


def test_names_of_the_python_api_in_documents_are_there() -> None:
    assert [name for page in PAGES for name in unknown_names(page)] == []


def unknown_names(page: Path) -> list[str]:
    """Names that a page takes from the package: holdfast.step(...)."""
    import holdfast

    named = sorted(set(re.findall(r"(?<![\w./@-])holdfast\.([A-Za-z]+)\(", page.read_text())))
    return [f"{page}: {name}" for name in named if not hasattr(holdfast, name)]


def test_bodies_of_orders_in_documents_have_the_fields_of_orders() -> None:
    assert any('"verb"' in page.read_text() for page in PAGES)
    assert [field for page in PAGES for field in unknown_fields(page)] == []


def unknown_fields(page: Path) -> list[str]:
    from holdfast.controller.order_admission import OrderBody

    bodies = [json.loads(body) for body in re.findall(r'\{"verb": [^{}]*\}', page.read_text())]
    known = {field.name for field in msgspec.structs.fields(OrderBody)}
    return [f"{page}: {name}" for body in bodies for name in body if name not in known]


def test_names_that_are_not_there_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        '`HOLDFAST_RUN`, `HOLDFAST_RUM`; `holdfast.step(1)`, `holdfast.stop()`; {"verb": "stop", "by": "a"}'
    )
    assert [name.split(": ")[1] for name in unknown_variables(page, "A = 'HOLDFAST_RUN'")] == ["HOLDFAST_RUM"]
    assert [name.split(": ")[1] for name in unknown_names(page)] == ["stop"]
    assert [name.split(": ")[1] for name in unknown_fields(page)] == ["by"]
