"""What the design tests look at in a source file. Each is parsed once in a process, and its tree is not kept."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PROSE = re.compile(r"(?:\b[a-z]{2,}\b[ ,]+){2,}[a-z]{2,}")  # three words in a row
INNER = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements stand; there are none in expressions


class Shape(NamedTuple):
    """Of a function."""

    line: int
    name: str
    lines: int
    is_table: bool
    positional: int
    depth: int


class Import(NamedTuple):
    line: int
    level: int  # how many dots
    names: tuple[str, ...]


class Source(NamedTuple):
    depth: int  # at module level
    functions: tuple[Shape, ...]
    scopes: tuple[tuple[int, str], ...]  # line and name of every function and class
    catch_alls: tuple[str, ...]  # the functions that catch everything
    imports: tuple[Import, ...]
    import_lines: int  # at module level
    fragments: tuple[int, ...]  # lines of assertions that look for a piece of a sentence in a text


@cache
def look(text: str) -> Source:
    tree = ast.parse(text)
    found = list(statements(tree))
    functions = [node for node in found if isinstance(node, Function)]
    return Source(
        depth(tree),
        tuple(shape(function) for function in functions),
        tuple((node.lineno, node.name) for node in found if isinstance(node, SCOPES)),
        tuple(catch_alls(tree, functions) if "except" in text or "suppress" in text else ()),
        tuple(one for node in found for one in imports(node)),
        sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)),
        tuple(line for node in found for line in fragments(node)),
    )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for field in INNER:
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


def depth(node: ast.AST) -> int:
    """How many blocks stand inside one another. elif is no deeper than its if; match and case, being tables, are none;
    a function or class defined inside is measured by itself."""
    deepest = 0
    for field in INNER:
        inside = getattr(node, field, ())
        for child in inside:
            if isinstance(child, SCOPES):
                continue
            is_elif = field == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(inside) == 1
            deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def shape(function: Function) -> Shape:
    matches = sum(length(statement) for statement in function.body if isinstance(statement, ast.Match))
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    positional = len(names) - (names[:1] in (["self"], ["cls"]))
    lines = length(function)
    return Shape(function.lineno, function.name, lines, 2 * matches > lines, positional, depth(function))


def catch_alls(tree: ast.Module, functions: list[Function]) -> Iterator[str]:
    found = [node for node in ast.walk(tree) if catches_all(node)]
    if found:
        owner = {id(inner): function.name for function in functions for inner in ast.walk(function)}
        yield from (owner.get(id(node), "") for node in found)


def catches_all(node: ast.AST) -> bool:
    match node:
        case ast.ExceptHandler(type=None):
            return True
        case ast.ExceptHandler(type=ast.Tuple(elts=caught)):
            pass
        case ast.ExceptHandler(type=one):
            caught = [one] if one else []
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=caught):
            pass
        case _:
            return False
    return any(isinstance(name, ast.Name) and name.id in ("Exception", "BaseException") for name in caught)


def imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, 0, tuple(alias.name.split("."))) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module.split(".") if node.module else []
        yield from (Import(node.lineno, node.level, (*module, alias.name)) for alias in node.names)


def fragments(node: ast.AST) -> Iterator[int]:
    """Yield the line of each piece of a sentence in `assert "..." in text` or `with raises(..., match="...")`."""
    if isinstance(node, ast.Assert):
        compared = (one for one in ast.walk(node.test) if isinstance(one, ast.Compare))
        searched = [one.left for one in compared if isinstance(one.ops[0], ast.In | ast.NotIn)]
    elif isinstance(node, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        searched = [word.value for call in calls for word in call.keywords if word.arg == "match"]
    else:
        return
    yield from (text.lineno for text in searched if is_prose(text))


def is_prose(node: ast.expr) -> bool:
    """Return whether a text in this expression has three words in a row."""
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return any(PROSE.search(text) for text in texts)
