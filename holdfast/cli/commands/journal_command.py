"""`holdfast journal`: upgrades or downgrades the tables of a journal database, and removes runs that have ended."""

import sys

from holdfast.cli.run_dirs.journal_database_connection import open_database
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.journal.journal_errors import JournalError


def main(argv: list[str]) -> int:
    parser = CommandParser(
        prog="holdfast journal",
        description="Show which version the tables of a database of journals have, change it, or forget a run.",
    )
    parser.add_argument("url", metavar="URL", help="postgres://HOST/DATABASE")
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("--schema", type=int, metavar="N", help="bring the tables to this version; one back is possible")
    verbs.add_argument("--forget", metavar="RUN", help="remove a run that has ended, with its entries")
    args = parser.parse_args(argv)
    try:
        return _look_after(args.url, args.schema, args.forget)
    except (UsageError, JournalError) as e:
        print(f"holdfast journal: {e}", file=sys.stderr)
        return 2


def _look_after(url: str, schema: int | None, forget: str | None) -> int:
    with open_database(url) as link:
        from holdfast.journal import postgres_lease, postgres_schema

        if schema is not None:
            before = postgres_schema.migrate_schema(link, schema)
            print(f"the tables are of version {schema}" + (f"; they were of {before}" if before != schema else ""))
            return 0
        version = postgres_schema.read_version(link)
        if forget is not None:
            postgres_lease.forget_run(link, forget)
            print(f"run {forget} is forgotten")
            return 0
        known = f"this holdfast wants {postgres_schema.SCHEMA}"
        runs = counted_noun(len(postgres_lease.list_runs(link)), "run") if version == postgres_schema.SCHEMA else ""
        print(f"the tables are of version {version}, {known}" + (f"; {runs}" if runs else ""))
    return 0
