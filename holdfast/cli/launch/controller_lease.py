"""The lease of a run whose journal is in Postgres: only the `holdfast run` that has it may run the controller."""

import contextlib
import secrets
import socket
import time

from holdfast.journal import postgres_lease
from holdfast.journal.journal_errors import JournalAwayError, JournalError
from holdfast.journal.postgres_lease import LEASE_S, START_S
from holdfast.journal.postgres_link import PostgresLink
from holdfast.model.job_phase import Phase

_LOOK_S = 0.25  # a look costs one row; what is lost here, the job stands still


class ControllerLease:
    """Tells which host runs the controller, and claims the lease for this host when no host does."""

    def __init__(self, url: str, run_id: str, *, goes_on: bool = False) -> None:
        """With `goes_on`, an ended run may be claimed again if it ended only because its nodes' time was up."""
        self.url, self.run_id, self._goes_on = url, run_id, goes_on
        self.holder = f"{socket.gethostname()} {secrets.token_hex(8)}"  # no other `holdfast run` has it
        self.place = self.holder.replace(" ", "-")  # of its run directory
        self._link = PostgresLink(url)
        self._looked_at = 0.0
        self.seen_seq = 0  # the journal had so many entries when this host looked; it can only have more

    def try_to_claim(self) -> bool:
        """Claim the lease for a controller that is about to start here. Return False if another host has it or the run
        ended. Raise JournalAwayError if the database does not answer."""
        return postgres_lease.claim_run(self._link, self.run_id, self.holder, "", START_S, ended=self._goes_on)

    def is_free(self) -> bool:
        """Return whether the run goes on and has no controller. Return False if the database does not answer, or was
        asked less than a second ago."""
        if time.monotonic() < self._looked_at + _LOOK_S:
            return False
        self._looked_at = time.monotonic()
        with contextlib.suppress(JournalError):
            if found := postgres_lease.look_at_run(self._link, self.run_id):
                self.seen_seq = max(self.seen_seq, found.seq)
                return not found.held and found.phase is not Phase.DONE
        return False

    def await_turn(self) -> bool:
        """Wait until the run has no controller, then claim the lease. Return False if the run has ended. Keeps waiting
        while the database does not answer."""
        while True:
            with contextlib.suppress(JournalAwayError):
                if self.is_free() and self.try_to_claim():
                    return True
                if self.has_ended():
                    return False
            time.sleep(_LOOK_S)

    def has_ended(self) -> bool:
        found = postgres_lease.look_at_run(self._link, self.run_id)
        return found is not None and found.phase is Phase.DONE

    def carrier_text(self) -> str:
        """Name the host that runs the controller; "another host" if the database cannot tell."""
        with contextlib.suppress(JournalError):
            if found := postgres_lease.look_at_run(self._link, self.run_id):
                return found.address or found.holder.partition(" ")[0]
        return "another host"

    def is_training(self) -> bool:
        with contextlib.suppress(JournalError):
            found = postgres_lease.look_at_run(self._link, self.run_id)
            return found is not None and found.phase is Phase.TRAINING
        return False

    def await_claim(self) -> bool:
        """Claim the lease. If another host holds it, wait for two durations of a lease. Return False if that host still
        holds it, or if the run has ended."""
        until = time.monotonic() + 2 * LEASE_S
        while not self.try_to_claim():
            if (self.has_ended() and not self._goes_on) or time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True
