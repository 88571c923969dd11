"""A connection to Postgres that gives up on a server which does not answer, and reconnects when it is needed."""

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg import errors, pq

from holdfast.journal.journal_errors import JournalAwayError, JournalError

ANSWER_S = 3.0  # for one statement; a server that is frozen, or behind a cut cable, never answers
_ALIVE = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 2, "tcp_user_timeout": 3000}
_CONNECT_S = 3  # libpq takes whole seconds, and at least two
# Durable is what it says, whatever the server's default is; a stronger default is left as it is.
_DURABLE = "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'"
# The world's failures, after which another try may succeed; the last is a server that has become a standby.
_AWAY = (psycopg.OperationalError, psycopg.InterfaceError, errors.ReadOnlySqlTransaction)
T = TypeVar("T")


class _BoundedConnection(psycopg.Connection[tuple[Any, ...]]):
    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        return super().wait(_give_up_late(gen, time.monotonic() + ANSWER_S), *args, **kwargs)


def _give_up_late(gen: Generator[Any, Any, T], until: float) -> Generator[Any, Any, T]:
    """Run psycopg's generator to its end and return its result. Raise OperationalError after monotonic time `until`."""
    try:
        wanted = next(gen)
        while True:
            wanted = gen.send((yield wanted))
            if time.monotonic() > until:
                raise psycopg.OperationalError(f"no answer for {ANSWER_S:g} s")
    except StopIteration as e:
        answer: T = e.value
        return answer


def why_no_url(url: str) -> str:
    """Return what is wrong with a database address, as the end of a sentence that begins with the address; "" if it can
    be used."""
    if not url.startswith(("postgres://", "postgresql://")):
        return "is no address of a database; write it as postgres://HOST/DATABASE"
    try:
        given = pq.Conninfo.parse(url.encode())
    except psycopg.OperationalError as e:
        return f"is no address of a database: {one_line(e).replace(url, 'ADDRESS')}"
    if secret := next((option for option in given if option.val and option.dispchar == b"*"), None):
        place = "put a password into ~/.pgpass, and anything else into a service file"
        return f"has a {secret.keyword.decode()}, which every user of this host could read; leave it out and {place}"
    return ""


def one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__


class PostgresLink:
    """One connection, opened when it is first needed and after it broke. Statements are committed one by one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._open: _BoundedConnection | None = None

    def execute(self, statement: str, values: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. Raise JournalAwayError if the server does not answer, or drops us: then
        nobody knows whether the statement was carried out. Any other error is a JournalError."""
        try:
            found = self._connection().execute(statement, values)
            return found.fetchall() if found.description else []
        except _AWAY as e:
            self.close()
            raise JournalAwayError(f"the journal at {self.url} does not answer: {one_line(e)}") from None
        except psycopg.Error as e:
            raise JournalError(f"{self.url} cannot be used as a journal: {one_line(e)}") from None

    @contextlib.contextmanager
    def transaction(self, manner: str = "") -> Iterator[None]:
        """Run statements in one transaction: all of them are committed, or none."""
        self.execute(f"begin {manner}")
        try:
            yield
            self.execute("commit")
        except JournalError:
            self.close()
            raise

    def _connection(self) -> _BoundedConnection:
        if self._open is None or self._open.closed:
            self._open = _BoundedConnection.connect(
                self.url,
                autocommit=True,
                connect_timeout=_CONNECT_S,
                application_name="holdfast",
                prepare_threshold=None,  # a pool between us and the server may not know them
                **_ALIVE,  # type: ignore[arg-type]
            )
            self._open.execute(_DURABLE)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            with contextlib.suppress(psycopg.Error):
                self._open.close()
            self._open = None
