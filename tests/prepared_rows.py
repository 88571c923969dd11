"""Writes the built-in rows about last words anew, parsed and with the literals of their patterns.

python -m tests.prepared_rows
"""

from holdfast.logs import catalog_files, prepared_catalog


def render_rows() -> bytes:
    sources = catalog_files.read_sources()
    return prepared_catalog.format_prepared(sources, catalog_files.parse_sources(sources))


if __name__ == "__main__":
    (catalog_files.WORDS / prepared_catalog.NAME).write_bytes(render_rows())
