"""A program for the ranks' interpreter: checks that a tree compiles and its imports resolve, without running it.

This program imports nothing of holdfast. It reads {"root", "script", "module", "first"} from its standard input and
answers {"fault": "..."}: one sentence with file and line, empty if nothing is wrong.
"""

import ast
import importlib.machinery
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple

# Who catches one of these around an import can do without it.
CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
UNKNOWABLE = {"globals", "setattr", "exec", "vars", "locals", "__getattr__", "__dict__"}  # may bind any name


PATHS = {"path", "meta_path", "path_hooks"}  # of sys: who changes one of these finds modules elsewhere
CHANGES = {"append", "insert", "extend"}


class ReleaseFault(Exception):
    """A fault of the release, in one sentence with file and line."""


class ImportOdds(NamedTuple):
    """Whether an import is certain to be executed, and whether its failure is caught."""

    certain: bool = True  # it is executed
    excused: bool = False  # somebody is ready for its failure

    def combine(self, other: "ImportOdds") -> "ImportOdds":
        return ImportOdds(self.certain and other.certain, self.excused or other.excused)


MAYBE, EXCUSED = ImportOdds(certain=False), ImportOdds(certain=False, excused=True)


class ImportStatement:
    """One import statement, with the modules and names that it asks for."""

    def __init__(self, node: ast.Import | ast.ImportFrom, odds: ImportOdds) -> None:
        self.line = node.lineno
        self.odds = odds
        self.level = node.level if isinstance(node, ast.ImportFrom) else 0
        self.modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        self.names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


class SourceFile:
    """One file of the tree: what it imports, what names it binds."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.tree = ast.parse(file.read(), path)
        self.wanted = list(_import_statements(self.tree.body, ImportOdds()))
        self.names: set[str] = set()
        self.open = False  # any name may be found in it
        self.moves_path = False
        for node in ast.walk(self.tree):
            self._visit_node(node)

    def _visit_node(self, node: ast.AST) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self.names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.names.add(name)
                self.open = self.open or name in UNKNOWABLE
            case ast.ExceptHandler(name=str(name)):
                self.names.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self.names |= {alias.asname or alias.name.split(".")[0] for alias in names}
                self.moves_path = self.moves_path or _takes_path(node)
                self.open = self.open or any(alias.name == "*" for alias in names)
            case ast.Global(names=names):
                self.names |= set(names)
            case ast.Name(id=name) if name in UNKNOWABLE:
                self.open = True
            case ast.Attribute(attr=name) if name in UNKNOWABLE:
                self.open = True
            case ast.Attribute(value=ast.Name(id="site"), attr="addsitedir"):
                self.moves_path = True
            case ast.Attribute(value=value, attr=attr) if attr in CHANGES and _is_path(value):
                self.moves_path = True
            case ast.Attribute(ctx=ast.Store()) if _is_path(node):
                self.moves_path = True
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if _is_path(value):
                self.moves_path = True


def _is_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id == "sys" and node.attr in PATHS)
    )


def _takes_path(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "sys" and any(a.name in PATHS for a in node.names)


def _import_statements(body: list[ast.stmt], odds: ImportOdds) -> Iterator[ImportStatement]:
    """Yield import statements in order, with their odds: whether they surely run, and whether failures are caught."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield ImportStatement(node, odds)
            case ast.If(test=test, body=inner, orelse=other):
                yield from _import_statements([] if _only_for_types(test) else inner, odds.combine(MAYBE))
                yield from _import_statements(other, odds.combine(MAYBE))
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=last):
                caught = any(_catches_import_error(handler) for handler in handlers)
                yield from _import_statements([*inner, *other], odds.combine(EXCUSED) if caught else odds)
                for handler in handlers:
                    yield from _import_statements(handler.body, odds.combine(MAYBE))
                yield from _import_statements(last, odds)
            case ast.With(body=inner) | ast.AsyncWith(body=inner):
                yield from _import_statements(inner, odds.combine(EXCUSED))  # contextlib.suppress, for one
            case ast.ClassDef(body=inner):
                yield from _import_statements(inner, odds)
            case ast.FunctionDef(body=inner) | ast.AsyncFunctionDef(body=inner):
                yield from _import_statements(inner, odds.combine(MAYBE))
            case ast.For(body=inner, orelse=other) | ast.While(body=inner, orelse=other):
                yield from _import_statements([*inner, *other], odds.combine(MAYBE))
            case ast.Match(cases=cases):
                for inner in (one.body for one in cases):
                    yield from _import_statements(inner, odds.combine(MAYBE))


def _only_for_types(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING") | ast.Constant(value=False):
            return True
    return False


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    found = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(found & CAUGHT or {n.attr for n in ast.walk(handler.type) if isinstance(n, ast.Attribute)} & CAUGHT)


def find_module_spec(name: str, path: list[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec as an import would, ignoring what this program has imported; None if there is no module."""
    try:
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)
    except KeyError:  # a folder without __init__.py, whose finder wants the parent to have been imported
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        folders = [os.path.join(folder, name.rpartition(".")[2]) for folder in path or ()]
        spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
        return spec


class ImportFollower:
    """Follows imports from the script through all modules of the tree that it reaches."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.sources: dict[str, SourceFile] = {}
        self.moves_path = False
        self.strict = False  # until all is read: what comes late may change the path for what came first

    def show_path(self, path: str) -> str:
        return os.path.relpath(os.path.realpath(path), self.root)

    def is_ours(self, path: str | None) -> bool:
        return bool(path) and os.path.realpath(str(path)).startswith(self.root + os.sep)

    def compile_all(self) -> None:
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(n for n in folders if not os.path.islink(os.path.join(folder, n)) and n.isidentifier())
            for name in sorted(files):
                if name.endswith(".py") and name[:-3].isidentifier():
                    self.load_source(os.path.join(folder, name))

    def load_source(self, path: str) -> SourceFile:
        path = os.path.realpath(path)
        if path not in self.sources:
            try:
                source = SourceFile(path)
                compile(source.tree, path, "exec", dont_inherit=True)
            except SyntaxError as e:
                raise ReleaseFault(f"{self.show_path(path)}, line {e.lineno}: does not compile: {e.msg}") from None
            except (ValueError, RecursionError, MemoryError) as e:
                raise ReleaseFault(f"{self.show_path(path)}: does not compile: {e}") from None
            except OSError as e:
                raise ReleaseFault(f"{self.show_path(path)}: cannot be read: {e.strerror}") from None
            self.sources[path] = source
        return self.sources[path]

    def follow_imports(self, entry: str, package: str) -> None:
        """Check the imports of `entry` and all files that it reaches. `package` is the package of `entry`, if any."""
        rest, seen = [(entry, package, ImportOdds())], {os.path.realpath(entry)}
        while rest:
            path, package, odds = rest.pop(0)
            source = self.load_source(path)
            self.moves_path = self.moves_path or source.moves_path
            for wanted in source.wanted:
                both = odds.combine(wanted.odds)
                found = [one for one in self._reached_files(source, package, wanted, both) if one[0] not in seen]
                seen |= {path for path, _ in found}
                rest += [(path, inner, both) for path, inner in found]

    def _reached_files(
        self, source: SourceFile, package: str, wanted: ImportStatement, odds: ImportOdds
    ) -> Iterator[tuple[str, str]]:
        """Yield the tree's files that an import statement executes, each with the package that it belongs to."""
        for module in wanted.modules:
            name = self._absolute_name(source, package, wanted, module)
            if not name:
                continue
            spec, files = self._resolve_module(source, name, wanted, odds)
            named = self._named_imports(source, spec, wanted, odds) if spec is not None and wanted.names else ()
            yield from ((os.path.realpath(path), inner) for path, inner in (*files, *named))

    def _absolute_name(self, source: SourceFile, package: str, wanted: ImportStatement, module: str) -> str:
        if not wanted.level:
            return module
        parts = package.split(".") if package else []
        if len(parts) < wanted.level:
            if wanted.odds.certain and self.strict:
                where = f"{self.show_path(source.path)}, line {wanted.line}"
                raise ReleaseFault(f"{where}: the relative import goes beyond the top-level package")
            return ""
        inside = parts[: len(parts) - wanted.level + 1]
        return ".".join([*inside, module] if module else inside)

    def _resolve_module(
        self, source: SourceFile, name: str, wanted: ImportStatement, odds: ImportOdds
    ) -> tuple[importlib.machinery.ModuleSpec | None, list[tuple[str, str]]]:
        """Return the module's spec (None if missing or outside the tree) and the tree's files that its import runs."""
        found: list[tuple[str, str]] = []
        path, spec = None, None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            prefix = ".".join(parts[:depth])
            spec = find_module_spec(prefix, path)
            if spec is None:
                self._report_missing(source, prefix, wanted, odds)
                return None, found
            locations = list(spec.submodule_search_locations or ())
            if not self.is_ours(spec.origin) and not any(map(self.is_ours, locations)):
                return None, found  # somebody else's: nobody can know what it has without running it
            if spec.origin and spec.origin.endswith(".py"):
                found.append((spec.origin, prefix if spec.submodule_search_locations else prefix.rpartition(".")[0]))
            if not locations and depth < len(parts):
                self._report_missing(source, ".".join(parts[: depth + 1]), wanted, odds)
                return None, found
            path = locations
        return spec, found

    def _report_missing(self, source: SourceFile, name: str, wanted: ImportStatement, odds: ImportOdds) -> None:
        """Raise ReleaseFault for a missing module, unless the code may do without it or may change sys.path."""
        if not self.strict or odds.excused or ("." not in name and (self.moves_path or not odds.certain)):
            return
        raise ReleaseFault(f"{self.show_path(source.path)}, line {wanted.line}: there is no module {name}")

    def _named_imports(
        self, source: SourceFile, spec: importlib.machinery.ModuleSpec, wanted: ImportStatement, odds: ImportOdds
    ) -> Iterator[tuple[str, str]]:
        """Yield modules that `from module import name` loads; raise ReleaseFault if the module lacks a name."""
        known = self.load_source(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        locations = list(spec.submodule_search_locations or ())
        for name in wanted.names:
            inner = find_module_spec(f"{spec.name}.{name}", locations) if locations else None
            if inner is not None and inner.origin and inner.origin.endswith(".py"):
                package = f"{spec.name}.{name}" if inner.submodule_search_locations else spec.name
                yield inner.origin, package
            elif (
                inner is None
                and known
                and name != "*"
                and self.strict
                and not odds.excused
                and not self._has_name(known, name)
            ):
                where = f"{self.show_path(source.path)}, line {wanted.line}"
                raise ReleaseFault(f"{where}: {self.show_path(known.path)} has no {name}")

    def _has_name(self, source: SourceFile, name: str) -> bool:
        return source.open or name in source.names or (name.startswith("__") and name.endswith("__"))


def find_fault(asked: dict[str, str]) -> str:
    reading = ImportFollower(asked["root"])
    try:
        reading.compile_all()
        path = [*sys.path]
        for reading.strict in (False, True):
            sys.path[:] = path
            if asked["module"]:
                _follow_module(reading, asked["module"], asked["first"])
            else:
                _follow_script(reading, asked["script"])
    except ReleaseFault as e:
        return str(e)
    return ""


def _follow_script(reading: ImportFollower, script: str) -> None:
    if os.path.isdir(script):
        sys.path.insert(0, script)
        script = os.path.join(script, "__main__.py")
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    if not os.path.isfile(script):
        raise ReleaseFault(f"{reading.show_path(script)}, the script to run, is missing")
    reading.follow_imports(script, "")


def _follow_module(reading: ImportFollower, module: str, first: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the interpreter is the user's
        raise ReleaseFault(f"to run a module of a release takes Python 3.11 or newer, and {sys.executable} is older")
    sys.path.insert(0, first)
    spec, path = None, None
    for depth in range(1, module.count(".") + 2):
        spec = find_module_spec(".".join(module.split(".")[:depth]), path)
        if spec is None:
            raise ReleaseFault(f"{module}, the module to run, is missing")
        path = list(spec.submodule_search_locations or ())
        if reading.is_ours(spec.origin) and spec.origin:
            reading.follow_imports(spec.origin, spec.name if path else spec.name.rpartition(".")[0])
    if path:
        spec = find_module_spec(f"{module}.__main__", path)
        if spec is None:
            raise ReleaseFault(f"{module}, the module to run, is a package without __main__")
        if reading.is_ours(spec.origin) and spec.origin:
            reading.follow_imports(spec.origin, module)


def main() -> None:
    warnings.simplefilter("ignore")
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # where this file lies
    asked = json.load(sys.stdin)
    sys.path[:] = [path for path in sys.path if path]
    json.dump({"fault": find_fault(asked)}, sys.stdout)


if __name__ == "__main__":
    main()
