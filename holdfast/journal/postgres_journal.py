"""The journal in Postgres, so that a controller on another machine can go on with a run when this machine is lost.

Entries carry the same chain of checksums as in a file. Every write is one statement that names the writer's lease and
the checksum of the entry before, so repeating it does no harm. While the server does not answer, the writer tries again
until shortly before its lease expires, and then fails. The next writer finds every committed entry.

Whoever can write to the database can forge entries with valid checksums. So every write leaves a proof of the newest
entry and of all notes, made with a key derived from the job's secret, and notes are encrypted. The proof is checked
before anybody acts on a journal."""

import contextlib
import logging
import time
from collections.abc import Iterator

import msgspec

from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.journal import checkpoint_table, postgres_lease, postgres_schema
from holdfast.journal.entry_chain import JournalRow, make_row, parse_row
from holdfast.journal.journal_errors import JournalAwayError, JournalDamagedError, JournalError, LeaseLostError
from holdfast.journal.journal_key import TAG_BYTES, DecryptionError, JournalKey
from holdfast.journal.lease_term import boot_time
from holdfast.journal.postgres_lease import LEASE_S, MARGIN_S, RENEW_S, LeasedRun
from holdfast.journal.postgres_link import PostgresLink
from holdfast.model.decider_events import Lost
from holdfast.model.journal_entry import Entry

_log = logging.getLogger("holdfast.journal")
_PAGE = 1000  # entries that are read at a time
_AGAIN_S = 0.1
_OURS = "run_id = %(run)s and epoch = %(epoch)s and holder = %(holder)s"
# The update locks the run's row, and thereby decides between us and whoever takes over.
_APPEND = f"""
with mine as (
    update holdfast.run set seq = %(seq)s, chain = %(chain)s, proof = %(proof)s, phase = %(phase)s,
        alive_at = clock_timestamp(), expires_at = clock_timestamp() + %(lease_s)s * interval '1 second'
    where {_OURS} and chain = %(before)s returning run_id
), put as (
    insert into holdfast.entry (run_id, seq, at, event, decision, epoch, chain)
    select run_id, row.* from mine, unnest(%(seqs)s::bigint[], %(ats)s::float8[], %(events)s::bytea[],
        %(decisions)s::bytea[], %(epochs)s::bigint[], %(chains)s::bytea[]) as row
)
select run_id from mine
"""
_RAISE = f"update holdfast.run set epoch = %(to)s where {_OURS} returning 1"
_RELEASE = f"update holdfast.run set expires_at = clock_timestamp() where {_OURS}"
_PAGE_AFTER = """
select seq, at, event, decision, epoch, chain from holdfast.entry
where run_id = %(run)s and seq > %(after)s order by seq limit %(page)s
"""
_CHAIN_AT = "select chain from holdfast.entry where run_id = %(run)s and seq = %(seq)s"
_PUT_NOTE = f"""
with mine as (update holdfast.run set proof = %(proof)s where {_OURS} and chain = %(chain)s returning run_id)
insert into holdfast.note (run_id, name, content) select run_id, %(name)s, %(content)s from mine
on conflict (run_id, name) do update set content = excluded.content returning 1
"""
_GET_NOTE = "select content from holdfast.note where run_id = %(run)s and name = %(name)s"
# In one statement, so that all of it is of one instant.
_PROVE = f"""
select seq, chain, start, proof, array(select name from holdfast.note where run_id = %(run)s order by name),
    array(select substring(content from 1 for {TAG_BYTES}) from holdfast.note where run_id = %(run)s order by name)
from holdfast.run where run_id = %(run)s
"""


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes: the name of one `holdfast run`, where its controller answers, and how long a lease lasts."""

    name: str
    address: str = ""
    lease_s: float = LEASE_S


class PostgresJournal:
    def __init__(
        self,
        url: str,
        run_id: str,
        holder: LeaseHolder | None = None,
        key: JournalKey | None = None,
        *,
        adopts: bool = False,
    ) -> None:
        """Open a run's journal for reading. With `holder`, take the run's lease and write. Raise JournalError on
        failure. A writer needs `key`. A reader without `key` cannot read notes or the environments of releases. With
        `adopts`, the journal may lack a proof of who wrote it, as older versions of holdfast leave none."""
        self.run_id = run_id
        self.lost: Lost | None = None  # a committed entry is not lost; what a failover loses, nodes know
        self.doubt = ""
        self._link = PostgresLink(url)
        self._holder, self._key = holder, key
        self._tags: dict[str, bytes] = {}  # of all notes, by name, when the journal was proved and since
        self._proven: tuple[int, bytes] | None = None  # the newest entry when the journal was proved, and its checksum
        self._rows: list[JournalRow] = []  # appended, and not known to be committed
        self._listings: dict[str, CheckpointListing] = {}  # by storage: not in the table yet
        self._broken: JournalError | None = None  # why nothing can be written any more
        self._asked_at = boot_time()
        try:
            found = self._open_run()
            self._epoch, self._phase, self.alive_at = found.epoch, found.phase, found.alive_at
            self._seq, self._chain, self._committed, self._start = found.seq, found.chain, found.chain, found.start
            if holder:
                self.prove(adopts=adopts)
        except JournalError:
            self._link.close()
            raise

    def _open_run(self) -> LeasedRun:
        if self._holder is None:
            postgres_schema.require_schema(self._link)
            if found := postgres_lease.look_at_run(self._link, self.run_id):
                return found
            raise JournalError(f"the journal at {self._link.url} has no run {self.run_id}")
        name, address, lease_s = self._holder.name, self._holder.address, self._holder.lease_s
        if begun := postgres_lease.begin_epoch(self._link, self.run_id, name, address, lease_s):
            return begun
        raise LeaseLostError(f"another controller has run {self.run_id} in {self._link.url}")

    @property
    def seq(self) -> int:
        """The number of the newest entry that this process knows of."""
        return self._seq

    def prove(self, *, adopts: bool = False) -> None:
        """Raise JournalDamagedError unless the entries and notes were written by holders of the job's secret. After
        this call, reading also raises if an entry or note has changed, or if another process has written one."""
        for seq, chain, start, proof, names, tags in self._link.execute(_PROVE, {"run": self.run_id}):
            self._seq, self._chain, self._committed, self._start = seq, chain, chain, start
            self._tags, self._proven = dict(zip(names, tags, strict=True)), (seq, chain)
            if proof and not self._own_key.is_proof(proof, seq, chain, self._tags):
                raise self._make_forged(f"{self._where} is not as its controllers have left it")
            if not proof and (seq or names) and not adopts:
                how = "go on with it by holdfast run --resume on the host that has its run directory"
                raise JournalDamagedError(
                    f"{self._where} has no proof of who wrote it, as older versions of holdfast leave none; {how}"
                )
            for name in names if not proof else ():
                self.put_note(name, self._stored_note(name))

    def _make_forged(self, what: str) -> JournalError:
        """Return the error for a change by others: LeaseLostError if by a new controller, else JournalDamagedError."""
        if self._holder and isinstance(why := self._why_not_ours(), LeaseLostError):
            return why
        known = "somebody has changed it, and who is not known, or its secret is another one"
        return JournalDamagedError(f"{what}: {known}; set HOLDFAST_TOKEN to the same value on every host")

    def at_one_instant(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which everything is read as of now, whatever others write meanwhile."""
        return self._link.transaction("isolation level repeatable read, read only")

    @property
    def _own_key(self) -> JournalKey:
        assert self._key, "whoever writes to a journal, or goes on with it, has its key"
        return self._key

    @property
    def epoch(self) -> int:
        """Return this writer's epoch, for a caller about to act; an expired lease is renewed first.
        Raises LeaseLostError or JournalAwayError if the lease cannot be renewed."""
        if self._holder and boot_time() >= self._deadline:
            self._commit()
        return self._epoch

    @property
    def _deadline(self) -> float:
        """Return the boot time until which nobody else can hold the lease, judged by our last request."""
        assert self._holder is not None
        return self._asked_at + self._holder.lease_s * (1 - MARGIN_S / LEASE_S)

    def raise_epoch(self, epoch: int) -> None:
        self._commit()
        if not self._retry(_RAISE, self._ours() | {"to": epoch}):
            raise self._break_off(self._why_not_ours())
        self._epoch = epoch

    # --- entries -----------------------------------------------------------------------------------------------

    def append(self, entry: Entry, durable: bool) -> None:
        if self._holder is None:
            raise JournalError(f"run {self.run_id} in {self._link.url} was opened to be read")
        if entry.seq != self._seq + 1:
            raise JournalError(
                f"run {self.run_id} in {self._link.url} has {self._seq} entries; {entry.seq} is not next"
            )
        row = make_row(entry, self._epoch, self._chain, self._own_key)
        self._rows.append(row)
        self._seq, self._chain, self._phase = row.seq, row.chain, entry.decision.phase
        if durable:
            self._commit()

    def flush(self) -> None:
        if self._holder and (self._rows or self._listings or boot_time() >= self._asked_at + self._renew_s):
            self._commit()
            self._write_listings()

    def put_listing(self, listing: CheckpointListing) -> None:
        """Have the next flush write down which checkpoints are at a storage."""
        self._listings[listing.base] = listing

    def _write_listings(self) -> None:
        """Write the listings that wait. The table is for people, so only a lost lease keeps us from going on."""
        while self._listings:
            base, listing = next(iter(self._listings.items()))
            try:
                written = checkpoint_table.write_listing(self._link, self._ours(), listing)
            except JournalAwayError:
                return  # the next flush tries again
            except JournalError as e:
                _log.warning("checkpoints in %s are not listed in the database: %s", base, e)
                written = True
            if not written:
                raise self._break_off(self._why_not_ours())
            del self._listings[base]

    @property
    def _renew_s(self) -> float:
        assert self._holder is not None
        return self._holder.lease_s * RENEW_S / LEASE_S

    def _commit(self) -> None:
        """Commit the appended entries and renew the lease."""
        asked_at, rows = boot_time(), self._rows
        columns = list(zip(*(msgspec.structs.astuple(row) for row in rows), strict=True)) or [()] * 6
        names = ("seqs", "ats", "events", "decisions", "epochs", "chains")
        values = self._ours() | {name: list(column) for name, column in zip(names, columns, strict=True)}
        assert self._holder is not None
        values |= {"seq": self._seq, "chain": self._chain, "before": self._committed, "phase": self._phase.value}
        values |= {"lease_s": self._holder.lease_s, "proof": self._make_proof(self._tags)}
        if not self._retry(_APPEND, values) and (why := self._why_not_ours()):
            raise self._break_off(why)
        self._asked_at, self._committed, self._rows = asked_at, self._chain, []

    def _make_proof(self, tags: dict[str, bytes]) -> bytes:
        return self._own_key.make_proof(self._seq, self._chain, tags)

    def _ours(self) -> dict[str, object]:
        assert self._holder is not None
        return {"run": self.run_id, "epoch": self._epoch, "holder": self._holder.name}

    def _retry(self, statement: str, values: dict[str, object]) -> list[tuple[object, ...]]:
        """Run a statement that does no harm if repeated. Repeat it while the server is away and the lease is ours."""
        if self._broken:
            raise self._broken
        while True:
            try:
                return self._link.execute(statement, values)
            except JournalAwayError as e:
                if boot_time() + _AGAIN_S >= self._deadline:
                    raise self._break_off(e) from None
                time.sleep(_AGAIN_S)
            except JournalError as e:
                raise self._break_off(e) from None

    def _break_off(self, why: JournalError | None) -> JournalError:
        """Refuse all writes from now on, because some may be missing on the server. Return the error that says why."""
        self._broken = why or JournalError(f"run {self.run_id} in {self._link.url} was written to by another process")
        return self._broken

    def _why_not_ours(self) -> JournalError | None:
        """Return why a write changed no row; None if an attempt whose answer was lost had made the change before."""
        query = "select epoch, holder, address, chain from holdfast.run where run_id = %(run)s"
        found = self._retry(query, {"run": self.run_id})
        assert self._holder is not None
        if not found:
            return JournalError(f"run {self.run_id} is gone from {self._link.url}")
        epoch, holder, address, chain = found[0]
        if (epoch, holder) != (self._epoch, self._holder.name):
            return LeaseLostError(f"another controller has taken run {self.run_id} over, at {address or holder}")
        if chain == self._chain:
            return None
        return JournalError(f"{self._link.url} has lost entries of run {self.run_id}, or got some that are not ours")

    def read(self, after: int = 0) -> Iterator[Entry]:
        if self._rows:
            self._commit()
        seq, chain = max(after, 0), self._start
        if seq:
            found = self._link.execute(_CHAIN_AT, {"run": self.run_id, "seq": seq})
            chain = bytes(found[0][0]) if found else chain
        while page := self._link.execute(_PAGE_AFTER, {"run": self.run_id, "after": seq, "page": _PAGE}):
            for values in page:
                row = parse_row(values)
                if row is None or not row.is_next_of(seq, chain):
                    raise JournalDamagedError(f"{self._where} is damaged: entry {seq + 1} is not as it was written")
                seq, chain = row.seq, row.chain
                self._check_place(seq, chain)
                yield self._decode(row)
        if self._proven and seq < self._proven[0]:
            raise self._make_forged(f"{self._where} lacks the entries after {seq}")

    def _check_place(self, seq: int, chain: bytes) -> None:
        """Raise JournalError if others have added or changed this entry since the proof was checked."""
        if self._proven and (seq > self._seq or (seq == self._proven[0] and chain != self._proven[1])):
            raise self._make_forged(f"entry {seq} of {self._where} was not written by its controllers")

    @property
    def _where(self) -> str:
        return f"run {self.run_id} in {self._link.url}"

    def _decode(self, row: JournalRow) -> Entry:
        try:
            if key := self._key:
                row = msgspec.structs.replace(
                    row, event=key.decrypt_env(row.event), decision=key.decrypt_env(row.decision)
                )
            return row.entry
        except (msgspec.DecodeError, ValueError, MemoryError, TypeError, RecursionError, DecryptionError) as e:
            raise JournalError(f"{self._where} cannot be used as a journal: {str(e) or type(e).__name__}") from None

    def close(self) -> None:
        """Commit the appended entries, and release the lease."""
        try:
            if self._holder and not self._broken:
                self.flush()
                self._retry(_RELEASE, self._ours())
        finally:
            self._link.close()

    # --- notes -------------------------------------------------------------------------------------------------

    def put_note(self, name: str, content: bytes) -> None:
        """Store a note, encrypted. Raise LeaseLostError if another controller has the lease."""
        if self._rows:
            self._commit()  # the proof is of what the server has
        encrypted = self._own_key.encrypt(name, content)
        tags = self._tags | {name: encrypted[:TAG_BYTES]}
        values = {"name": name, "content": encrypted, "chain": self._chain, "proof": self._make_proof(tags)}
        if not self._retry(_PUT_NOTE, self._ours() | values):
            raise self._break_off(self._why_not_ours())
        self._tags = tags

    def get_note(self, name: str) -> bytes:
        """Return a note's content, or b"". Raise JournalDamagedError if anybody but our controllers changed it."""
        encrypted = self._stored_note(name)
        try:
            if self._proven and self._tags.get(name, b"") != encrypted[:TAG_BYTES]:
                raise DecryptionError
            return self._own_key.decrypt(name, encrypted) if encrypted else b""
        except DecryptionError:
            raise self._make_forged(
                f"the note {name} of {self._where} is not as its controllers have left it"
            ) from None

    def _stored_note(self, name: str) -> bytes:
        found = self._link.execute(_GET_NOTE, {"run": self.run_id, "name": name})
        return bytes(found[0][0]) if found else b""

    def list_notes(self, prefix: str) -> list[str]:
        """Return the names of the notes that begin with `prefix`."""
        query = "select name from holdfast.note where run_id = %(run)s and starts_with(name, %(prefix)s) order by name"
        return [str(name) for (name,) in self._link.execute(query, {"run": self.run_id, "prefix": prefix})]
