"""Draws the mermaid diagrams of docs/ as figures for the site, in a browser; needs playwright and Debian's chromium.

python -m tests.mermaid_figures mermaid.min.js     (of the npm package mermaid; 11.17 drew those that are there)
"""

import shutil
import sys
from pathlib import Path

from tests.site_pages import DOCS, find_diagrams

_LOOKS = "{startOnLoad: false, htmlLabels: false, theme: 'neutral', fontFamily: 'sans-serif', deterministicIds: true}"


def draw_figures(library: str) -> None:
    from playwright.sync_api import sync_playwright

    figures = find_diagrams()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content("<body></body>")
        page.add_script_tag(content=library)
        page.evaluate(f"mermaid.initialize({_LOOKS})")
        for name, diagram in figures.items():
            drawn = page.evaluate("async text => (await mermaid.render('figure', text)).svg", diagram)
            (DOCS / name).write_text(f"{drawn}\n")
        browser.close()
    for old in DOCS.glob("figures/mermaid-*.svg"):
        if old.relative_to(DOCS).as_posix() not in figures:
            old.unlink()


if __name__ == "__main__":
    draw_figures(Path(sys.argv[1]).read_text())
