"""The summary of several runs as one file to mail, in the style of the page. It has no script and fetches nothing."""

from collections.abc import Iterable, Sequence
from html import escape

from holdfast.dash.page_assets import digest_of, read_assets

_NUMBER = " "  # at the end of a column's name: what is below stands to the right


def write_week_page(
    headline: str, said: Iterable[str], tables: Iterable[tuple[str, Sequence[str], Iterable[Sequence[str]]]]
) -> str:
    style = read_assets()["page.css"]
    rule = f"default-src 'none'; style-src '{digest_of(style)}'"
    lead = "".join(f'<p class="lead">{escape(text)}</p>' for text in said)
    body = "".join(_table_text(*table) for table in tables)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>holdfast: seven days</title>\n'
        f"<style>{style}</style></head>\n"
        f'<body><main><section class="now"><h1>{escape(headline)}</h1>{lead}</section>\n{body}</main></body></html>\n'
    )


def _table_text(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = [' class="num"' if name.endswith(_NUMBER) else "" for name in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name.strip())}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    cells = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(text)}</td>' for text, kind in zip(row, kinds, strict=True))}</tr>\n"
        for row in rows
    )
    return (
        f'<section class="sheet"><header><h2>{escape(title)}</h2></header><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div></section>\n"
    )
