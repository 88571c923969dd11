"""docs/MODULES.md: every module of the package and the first sentence of its docstring, by folder.

python -m tests.module_map > docs/MODULES.md
"""

import ast
import re
import textwrap
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEAD = """# Modules

Every module and what it is for: the first sentence of its docstring. `python -m tests.module_map` writes this
page, and a test compares it. [ARCHITECTURE.md](ARCHITECTURE.md#layers) says which folder may import which.
"""


def wrap_text(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\w[.])\s", text)[0]


def render_map() -> str:
    paths = sorted((ROOT / "holdfast").rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path))
    pages = [_HEAD]
    for folder, found in groupby(paths, key=lambda path: path.parent):
        modules = list(found)
        pages.append(f"\n## {folder.relative_to(ROOT).as_posix()}\n")
        if modules[0].name == "__init__.py":
            pages.append(f"\n{wrap_text(first_sentence(modules.pop(0)))}\n")
        if modules:
            items = (wrap_text(f"* `{path.name}`: {first_sentence(path)}", "  ") for path in modules)
            pages.append("\n" + "".join(f"{item}\n" for item in items))
    return "".join(pages)


if __name__ == "__main__":
    print(render_map(), end="")
