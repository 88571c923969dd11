"""Sentences and tables as HTML without a script, in the style of the page; what attributes say of tables is for readers
of mail that leave out the style."""

from collections.abc import Iterable, Sequence
from html import escape

_NUMBER = " "  # at the end of a column's name: what is below stands to the right
_WORD = 12  # characters of a time or a number, which are never broken
_NARROW = 3  # columns that a phone has room for; the rows of other tables become cards there
PlainTable = tuple[str, Sequence[str], Iterable[Sequence[str]]]  # its title, its columns, its rows


def write_sheets(headline: str, said: Iterable[str], tables: Iterable[PlainTable]) -> str:
    lead = "".join(f'<p class="lead">{escape(text)}</p>\n' for text in said)
    body = "".join(_write_table(*table) for table in tables)
    return f'<section class="now"><h1>{escape(headline)}</h1>\n{lead}</section>\n{body}'


def _write_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = [name.strip() for name in columns]
    kinds = ['class="num" align="right"' if name.endswith(_NUMBER) else 'align="left"' for name in columns]
    head = "".join(f'<th scope="col" {kind}>{escape(name)}</th>' for name, kind in zip(names, kinds, strict=True))
    body = "".join(f"<tr>{_write_cells(names, kinds, row)}</tr>\n" for row in rows)
    cards = ' class="cards"' if len(names) > _NARROW else ""
    table = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    return (
        f'<section class="sheet"><header><h2>{escape(title)}</h2></header>\n'
        f'<div class="scroll"><table{cards} cellpadding="6" cellspacing="0">{table}</table></div></section>\n'
    )


def _write_cells(names: list[str], kinds: list[str], row: Sequence[str]) -> str:
    return "".join(
        f'<td valign="top" data-name="{escape(name)}" {kind}{_keep_whole(text)}>{escape(text)}</td>'
        for name, kind, text in zip(names, kinds, row, strict=True)
    )


def _keep_whole(text: str) -> str:
    return " nowrap" if " " not in text and len(text) <= _WORD else ""
