"""The summary of several runs as one file to mail, in the style of the page. It has no script and fetches nothing."""

from collections.abc import Iterable

from holdfast.dash.page_assets import digest_of, read_assets
from holdfast.dash.scriptless_html import PlainTable, write_sheets


def write_week_page(headline: str, said: Iterable[str], tables: Iterable[PlainTable]) -> str:
    style = read_assets()["page.css"]
    rule = f"default-src 'none'; style-src '{digest_of(style)}'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>holdfast: seven days</title>\n'
        f"<style>{style}</style></head>\n"
        f"<body><main>{write_sheets(headline, said, tables)}</main></body></html>\n"
    )
