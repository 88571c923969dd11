"""The tables of the journal in Postgres, by version, and how a database gets from one version to another."""

from collections.abc import Iterator

from holdfast.journal.journal_errors import JournalError
from holdfast.journal.postgres_link import PostgresLink

SCHEMA = 5
_LOCK = 7_403_411_204_582  # any number: who changes the tables holds the lock of it
_BEGINNING = (
    "create schema if not exists holdfast",
    "create table holdfast.version (version int not null)",
    "insert into holdfast.version values (0)",
)
# Not by to_regclass: in a transaction that has waited for another, it answers from what was known before.
_PRESENT = (
    "select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
    " where n.nspname = 'holdfast' and c.relname = 'version')"
)

# Each step leads from the version before it to its own, and back. A step only adds what older programs need not know,
# so that controllers of both versions can go on while it is made.
_FORWARD = {
    1: (
        "create table holdfast.run (run_id text primary key, start bytea not null, epoch bigint not null default 0,"
        " holder text not null, expires_at timestamptz not null, alive_at timestamptz, seq bigint not null default 0,"
        " chain bytea not null, phase text not null default 'new', began_at timestamptz not null default now())",
        "create table holdfast.entry (run_id text not null references holdfast.run on delete cascade,"
        " seq bigint not null, at float8 not null, event bytea not null, decision bytea not null,"
        " epoch bigint not null, chain bytea not null, primary key (run_id, seq))",
        "create table holdfast.note (run_id text not null references holdfast.run on delete cascade,"
        " name text not null, content bytea not null, primary key (run_id, name))",
    ),
    # For people: where the controller of a run answers.
    2: ("alter table holdfast.run add column address text not null default ''",),
    # What all runs share: the list of blocked hosts.
    3: ("create table holdfast.shared (name text primary key, content bytea not null)",),
    # That entries and notes were written by who knows the job's secret; '': an older version has left no proof.
    4: ("alter table holdfast.run add column if not exists proof bytea not null default ''",),
    # For people: which checkpoints a run has, without its storage.
    5: (
        "create table if not exists holdfast.checkpoint ("
        " run_id text not null references holdfast.run on delete cascade, place text not null, base text not null,"
        " step bigint not null, generation bigint, author text not null, ranks bigint, bytes bigint,"
        " doubted boolean not null, why text not null, written_at timestamptz, seen_at timestamptz not null,"
        " primary key (run_id, place))",
    ),
}
# Older programs need not know what stays, and controllers go on meanwhile. Rows that nobody updates would be untrue.
_BACK: dict[int, tuple[str, ...]] = {5: ("delete from holdfast.checkpoint",)}


def read_version(link: PostgresLink) -> int:
    """Return the version of the tables; 0 if there are none."""
    [(present,)] = link.execute(_PRESENT)
    if not present:
        return 0
    [(version,)] = link.execute("select version from holdfast.version")
    return int(version)


def require_schema(link: PostgresLink) -> None:
    """Raise JournalError unless the tables have this holdfast's version."""
    if (version := read_version(link)) != SCHEMA:
        raise JournalError(_why_not(link, version))


def prepare_schema(link: PostgresLink) -> None:
    """Make the journal's tables, or migrate older tables. Raise JournalError if the tables are of a newer version."""
    if (version := read_version(link)) > SCHEMA:
        raise JournalError(_why_not(link, version))
    if version < SCHEMA:
        migrate_schema(link, SCHEMA)


def migrate_schema(link: PostgresLink, to: int) -> int:
    """Bring the tables to version `to`: the current one, or the one before. Return the version that they had so far."""
    if not SCHEMA - 1 <= to <= SCHEMA:
        raise JournalError(f"this holdfast can bring tables to version {SCHEMA} or back to {SCHEMA - 1}, not to {to}")
    with link.transaction():
        link.execute(f"select pg_advisory_xact_lock({_LOCK})")  # programs that start at once make them one by one
        before = read_version(link)
        if before > SCHEMA:
            raise JournalError(_why_not(link, before))
        for step in (*(_BEGINNING if before == 0 else ()), *_steps_between(before, to)):
            link.execute(step)
        link.execute(f"update holdfast.version set version = {to}")
    return before


def _steps_between(before: int, to: int) -> Iterator[str]:
    for version in range(before + 1, to + 1):
        yield from _FORWARD[version]
    for version in range(before, to, -1):
        yield from _BACK[version]


def _why_not(link: PostgresLink, version: int) -> str:
    if version > SCHEMA:
        mend = f"use that one, or let it bring them back with holdfast journal {link.url} --schema {SCHEMA}"
        return f"the tables at {link.url} are of version {version}, of a newer holdfast than this ({SCHEMA}); {mend}"
    if version:
        return f"the tables at {link.url} are of version {version}, and this holdfast wants {SCHEMA}; " + (
            f"bring them forward with holdfast journal {link.url} --schema {SCHEMA}"
        )
    return f"{link.url} has no journal of holdfast"
