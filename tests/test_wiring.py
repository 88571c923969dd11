"""Holds the wiring: whoever needs a function gets it when it is made, so that a forgotten wire is an error at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import statements

PACKAGE = Path(__file__).parents[1] / "holdfast"

# Not `chaos`, whose catalog has them as data.
PACKAGES = tuple("agent controller cli fleet sim client dash journal checkpoint core wire logs linux trainers".split())
STAND_INS = frozenset({"print", "tuple", "list", "dict", "set", "str", "int", "bool"})  # as functions that do nothing


class Wiring:
    """Finds, in one file, functions that stand in for a wire and functions that are given to another object."""

    def __init__(self, callables: set[str], aliases: set[str]) -> None:
        self.callables, self.aliases = callables, aliases
        self.faults: list[tuple[int, str]] = []

    def visit(self, tree: ast.Module) -> None:
        for node in statements(tree):
            match node:
                case ast.ClassDef():
                    self._visit_class(node)
                case ast.Assign():
                    self._visit_assign(node)
                case ast.AnnAssign():
                    self._visit_annotated(node)

    def _visit_class(self, node: ast.ClassDef) -> None:
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Lambda):
                self.faults.append((line.lineno, f"{ast.unparse(line.target)} has a function as its default"))

    def _visit_assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for one, value in pairs(target, node.value):
                self._look(one, value, is_function=isinstance(value, ast.Lambda))

    def _visit_annotated(self, node: ast.AnnAssign) -> None:
        stands_in = isinstance(node.value, ast.Name) and node.value.id in STAND_INS
        function = isinstance(node.value, ast.Lambda) or (stands_in and is_callable(node.annotation, self.aliases))
        self._look(node.target, node.value, is_function=function)

    def _look(self, target: ast.expr, value: ast.expr | None, *, is_function: bool) -> None:
        if not isinstance(target, ast.Attribute):
            return
        own = isinstance(target.value, ast.Name) and target.value.id == "self"
        name = ast.unparse(target)
        if own and is_function:
            self.faults.append((target.lineno, f"{name} has a function that stands in for a wire"))
        if not own and (isinstance(value, ast.Lambda) or target.attr in self.callables):
            self.faults.append((target.lineno, f"{name} is given to another object after it was made"))


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from pairs(one, other)
    else:
        for one in target.elts if isinstance(target, ast.Tuple) else (target,):
            yield one, value


def is_callable(annotation: ast.expr | None, aliases: set[str]) -> bool:
    """Whether an annotation is a function's, optional or not."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Callable")):
            return True
        case ast.Name(id=name):
            return name == "Callable" or name in aliases
        case ast.BinOp(left=left, right=right):
            return is_callable(left, aliases) or is_callable(right, aliases)
    return False


def function_aliases(trees: list[ast.Module]) -> set[str]:
    """Names for types of functions, such as `Ask = Callable[...]`."""
    lines = [line for tree in trees for line in tree.body if isinstance(line, ast.Assign)]
    return {ast.unparse(line.targets[0]) for line in lines if is_callable(line.value, set())}


def callable_attributes(trees: list[ast.Module], aliases: set[str]) -> set[str]:
    """Names of attributes that hold functions: by their annotation, or by that of the parameter they are set from."""
    found: set[str] = set()
    for node in (node for tree in trees for node in statements(tree)):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=name) | ast.Name(id=name)):
                found |= {name} if is_callable(node.annotation, aliases) else set()
            case ast.FunctionDef(name="__init__"):
                found |= set(_set_from_functions(node, aliases))
    return found


def _set_from_functions(init: ast.FunctionDef, aliases: set[str]) -> Iterator[str]:
    parameters = [*init.args.args, *init.args.kwonlyargs]
    functions = {one.arg for one in parameters if is_callable(one.annotation, aliases)}
    for line in (line for line in statements(init) if isinstance(line, ast.Assign)):
        for target, value in pairs(line.targets[0], line.value):
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in functions:
                yield target.attr


def faults(root: Path, packages: tuple[str, ...]) -> list[str]:
    trees = {path: ast.parse(path.read_text()) for name in packages for path in sorted((root / name).rglob("*.py"))}
    aliases = function_aliases([*trees.values()])
    callables = callable_attributes([*trees.values()], aliases)
    found = []
    for path, tree in trees.items():
        wiring = Wiring(callables, aliases)
        wiring.visit(tree)
        found += [f"{path.relative_to(root).as_posix()}:{line}: {fault}" for line, fault in wiring.faults]
    return found


def test_wires_are_given_at_the_start() -> None:
    assert faults(PACKAGE, PACKAGES) == []


BAD = {
    "a lambda": "class A:\n    def __init__(self):\n        self.say = lambda text: None",
    "a lambda with a type": "class A:\n    def __init__(self):\n        self.now: Callable[[], float] = lambda: 0.0",
    "a builtin": "class A:\n    def __init__(self):\n        self.say: Callable[[str], None] = print",
    "one of two": "class A:\n    def __init__(self):\n        self.a, self.b = 1, lambda: None",
    "a field": "class A(NamedTuple):\n    proved: Callable[[int], None] = lambda number: None",
    "a patch": "def wire(a, b):\n    a.hear = lambda: b.hear()",
    "a patch of a method": (
        "class A:\n    def __init__(self, tell: Callable[[str], bool]):\n        self.tell = tell\n"
        "def wire(a, b):\n    a.hands.tell = b.send"
    ),
    "a patch by an alias": (
        "Ask = Callable[[int], int]\nclass A:\n    ask: Ask | None = None\ndef wire(a, b):\n    a.x, a.ask = 1, b.f"
    ),
}
GOOD = (
    "Ask = Callable[[int], int]\n"
    "class A:\n"
    "    def __init__(self, ask: Ask, say: Callable[[str], None]) -> None:\n"
    "        self.ask, self._say = ask, say\n"
    "        self._on_first: Callable[[], None] | None = None\n"
    "        self.seen: list[str] = list()\n"
    "    def on_first(self, call: Callable[[], None]) -> None:\n"
    "        self._on_first = call\n"
    "def wire(b):\n"
    "    b.count = 1\n"
    "    return A(b.ask, lambda text: None)\n"
)


def test_bad_wiring_is_seen(tmp_path: Path) -> None:
    for number, text in enumerate(BAD.values()):
        (tmp_path / f"p{number}").mkdir()
        (tmp_path / f"p{number}" / "m.py").write_text(text)
    unseen = [what for number, what in enumerate(BAD) if not faults(tmp_path, (f"p{number}",))]
    assert unseen == []


def test_good_wiring_passes(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "m.py").write_text(GOOD)
    assert faults(tmp_path, ("p",)) == []
