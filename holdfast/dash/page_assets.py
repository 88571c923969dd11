"""The page's files: separate ones for a browser that fetches them, or all joined into one file for a mail."""

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import msgspec

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_MAIN = "page.js"
_WAIT = '<p class="wait" role="status">Reading the journal…</p>'
_NO_SCRIPT = (
    '<noscript><p class="wait">This page needs JavaScript. <code>holdfast report</code> shows the same in a'
    " terminal.</p></noscript>"
)
_NOTE = '<p class="wait">This is a summary. A browser that runs scripts shows the whole page.</p>'
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.M)
_EXPORT = re.compile(r"^export (?:(?:async )?function|const) (\w+)", re.M)


@cache
def served_assets() -> dict[str, str]:
    """Return the files that a browser fetches, by name. All modules are joined into one script, because each request
    takes time."""
    assets = read_assets()
    modules = {name for name in assets if name.endswith(".js")} - {_MAIN}
    return {name: text for name, text in assets.items() if name not in modules} | {_MAIN: join_modules(assets)}


def read_assets() -> dict[str, str]:
    """Return the files of the page by name."""
    files = resources.files("holdfast.dash").joinpath("assets").iterdir()
    return {file.name: file.read_text("utf-8") for file in files if file.name.rpartition(".")[2] in TYPES}


def join_modules(assets: dict[str, str]) -> str:
    """Return all modules as one script: each becomes a function that is called once and returns its exports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = assets[name]
        for _, needed in _IMPORT.findall(text):
            if needed not in parts:
                add(needed)
        exports = ", ".join(_EXPORT.findall(text))
        body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_module_name(found[2])};\n", text)
        body = re.sub(r"^export ", "", body, flags=re.M)
        parts[name] = f"const {_module_name(name)} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"

    add(_MAIN)
    return "".join(parts.values())


def _module_name(name: str) -> str:
    return f"module_{name.partition('.')[0]}"


def render_page(title: str, sections: dict[str, Any], stories: dict[int, Any], summary: str) -> str:
    """Return a job's page as one HTML file that loads nothing from the network and runs only its own script. `summary`
    is HTML that is seen where no script runs."""
    assets = read_assets()
    script, style = join_modules(assets), assets["page.css"]
    embedded = msgspec.json.encode({"sections": sections, "stories": stories}).decode()
    embedded = embedded.replace("<", "\\u003c")  # a text in it cannot end the element
    policy = f"default-src 'none'; img-src data:; script-src '{digest_of(script)}'; style-src '{digest_of(style)}'"
    icon = base64.b64encode(assets["mark.svg"].encode()).decode()
    page = assets["page.html"]
    rule = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    shown = f'<script type="application/json" id="embedded">{embedded}</script>'
    put = {
        'href="assets/mark.svg"': f'href="data:image/svg+xml;base64,{icon}"',
        '<link rel="stylesheet" href="assets/page.css">': f"<style>{style}</style>",
        '<script type="module" src="assets/page.js"></script>\n': "",
        "<title>holdfast</title>": f"<title>{escape(title)}</title>",
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n{rule}',
        _WAIT: summary or _WAIT,
        _NO_SCRIPT: f"<noscript>{_NOTE}</noscript>" if summary else _NO_SCRIPT,
        "</body>": f"{shown}\n<script>{script}</script>\n</body>",
    }
    for old, new in put.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def digest_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
