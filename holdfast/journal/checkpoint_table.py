"""The table of checkpoints in Postgres: what a run's storage holds, for people who cannot reach that storage.

No controller reads it. Rows are not proved: whoever can write to the database can change what people see here."""

from datetime import datetime

import msgspec

from holdfast.core.snapshots.checkpoint_listing import CheckpointListing, ListedCheckpoint, fit_text
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.postgres_link import PostgresLink

# The lock of the run's row decides between this writer and whoever takes over, as with entries.
_PUT = """
with mine as (
    select run_id from holdfast.run where run_id = %(run)s and epoch = %(epoch)s and holder = %(holder)s for update
), gone as (
    delete from holdfast.checkpoint as old using mine
    where old.run_id = mine.run_id and old.base = %(base)s and old.step >= %(since)s
        and old.place <> all(%(places)s::text[])
), put as (
    insert into holdfast.checkpoint
        (run_id, base, seen_at, place, step, generation, author, ranks, bytes, doubted, why, written_at)
    select run_id, %(base)s, clock_timestamp(), place, step, generation, author, nullif(ranks, 0), nullif(bytes, 0),
        doubted, why, case when at > 0 then to_timestamp(at) end
    from mine, unnest(%(places)s::text[], %(steps)s::bigint[], %(generations)s::bigint[], %(authors)s::text[],
        %(ranks)s::bigint[], %(bytes)s::bigint[], %(doubted)s::boolean[], %(whys)s::text[], %(ats)s::float8[])
        as row (place, step, generation, author, ranks, bytes, doubted, why, at)
    on conflict (run_id, place) do update
    set base = excluded.base, seen_at = excluded.seen_at, step = excluded.step, generation = excluded.generation,
        author = excluded.author, ranks = excluded.ranks, bytes = excluded.bytes, doubted = excluded.doubted,
        why = excluded.why, written_at = excluded.written_at
)
select run_id from mine
"""
_MOST_AT = 1e11  # the year 5138; later times fit into no timestamp
_LIST = """
select run_id, base, place, step, generation, author, ranks, bytes, doubted, why, written_at, seen_at
from holdfast.checkpoint where %(run)s::text is null or run_id = %(run)s
order by run_id, base, step desc, written_at desc nulls last, place desc
"""


class CheckpointRow(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    base: str  # the folder or URL of several
    place: str
    step: int
    generation: int | None  # of its author
    author: str  # the run that wrote it
    ranks: int | None
    bytes: int | None
    doubted: bool
    why: str  # no run resumes from it; empty: nothing is known against it
    written_at: datetime | None
    seen_at: datetime


def write_listing(link: PostgresLink, lease: dict[str, object], listing: CheckpointListing) -> bool:
    """Replace the rows of the listing's storage; False if the lease (run, epoch, holder) is another's."""
    base = fit_text(listing.base, len(listing.base))
    found = {f"{base.rstrip('/')}/{fit_text(one.name)}": one for one in listing.checkpoints}
    values = {"base": base, "since": listing.since, "places": list(found), **_columns(list(found.values()))}
    return bool(link.execute(_PUT, lease | values))


def _columns(found: list[ListedCheckpoint]) -> dict[str, object]:
    return {
        "steps": [one.step for one in found],
        "generations": [one.generation for one in found],
        "authors": [fit_text(one.run) for one in found],
        "ranks": [one.world for one in found],
        "bytes": [one.bytes for one in found],
        "doubted": [one.doubted for one in found],
        "whys": [fit_text(one.why) for one in found],
        "ats": [min(one.at, _MOST_AT) for one in found],
    }


def list_checkpoints(link: PostgresLink, run_id: str | None = None) -> list[CheckpointRow]:
    """Return the rows of one run, or of all runs: run by run, storage by storage, the newest step first."""
    try:
        return [msgspec.convert(values, CheckpointRow) for values in link.execute(_LIST, {"run": run_id})]
    except msgspec.ValidationError as e:
        raise JournalError(f"the table of checkpoints in {link.url} is damaged: {e}") from None
