"""Opens the database of journals that a command names; the Postgres client is an optional dependency."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli.run_flags.flag_table import UsageError

if TYPE_CHECKING:
    from holdfast.journal.postgres_link import PostgresLink


def check_database(url: str, flag: str = "") -> None:
    """Raise UsageError if no Postgres client is installed, or if `url` cannot be the address of a database. The error
    names `flag` but not the address, which may contain a password."""
    try:
        from holdfast.journal.postgres_link import why_no_url
    except ModuleNotFoundError as e:
        raise UsageError(f"{flag or 'this '}needs {e.name}: pip install 'holdfast[postgres]'") from None
    if fault := why_no_url(url):
        raise UsageError(f"{flag}ADDRESS {fault}")


@contextlib.contextmanager
def open_database(url: str, flag: str = "") -> Iterator["PostgresLink"]:
    check_database(url, flag)
    from holdfast.journal.postgres_link import PostgresLink

    with contextlib.closing(PostgresLink(url)) as link:
        yield link
