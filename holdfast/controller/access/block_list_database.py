"""The block list in Postgres, which all runs that keep their journals in that database share."""

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from holdfast.controller.access.block_list_file import BlockListError, Entries, with_entry, without_expired
from holdfast.core.membership.host_blocking import BlockedHost
from holdfast.decoding import from_json
from holdfast.journal import postgres_schema
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.postgres_link import PostgresLink

_NAME = "blocked.json"
_READ = "select content from holdfast.shared where name = %(name)s"
_MAKE = "insert into holdfast.shared (name, content) values (%(name)s, '[]') on conflict do nothing"
_WRITE = "update holdfast.shared set content = %(content)s where name = %(name)s"


class BlockListDatabase:
    """The block list in a database; a missing list is an empty list. Each call opens its own connection, because calls
    come from several threads."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read_entries(self) -> Entries:
        """Return all entries, including expired ones. Raise BlockListError if the list cannot be read."""
        with self._open_link() as link:
            postgres_schema.require_schema(link)
            return self._read(link, _READ)

    def add_entry(self, entry: BlockedHost) -> None:
        """Add an entry. It replaces older entries that block no other host or GPU and do not expire later."""
        self.change(entry.at, lambda entries: with_entry(entries, entry))

    def change(self, now: float, rewrite: Callable[[Entries], Entries]) -> None:
        """Replace the list in one transaction: remove expired entries, and pass the others through `rewrite`. Raises
        BlockListError."""
        with self._open_link() as link:
            postgres_schema.prepare_schema(link)
            with link.transaction():
                link.execute(_MAKE, {"name": _NAME})
                left = rewrite(without_expired(self._read(link, f"{_READ} for update"), now))
                link.execute(_WRITE, {"name": _NAME, "content": msgspec.json.encode(left)})

    @contextlib.contextmanager
    def _open_link(self) -> Iterator[PostgresLink]:
        try:
            with contextlib.closing(PostgresLink(self._url)) as link:
                yield link
        except JournalError as e:
            raise BlockListError(f"the list of blocked hosts cannot be used: {e}") from None

    def _read(self, link: PostgresLink, query: str) -> Entries:
        found = link.execute(query, {"name": _NAME})
        try:
            return from_json(bytes(found[0][0]), Entries) if found else ()
        except msgspec.DecodeError as e:
            raise BlockListError(f"the list of blocked hosts in {self._url} is damaged: {e}") from None
