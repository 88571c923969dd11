"""Refuses nodes of blocked hosts, and blocks hosts whose machines are at fault."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.controller_interfaces import BlockList
from holdfast.core.decide.job_view import JobView
from holdfast.core.membership.host_blocking import BlockedHost, BlockLimits, matching_entry
from holdfast.model.action import Block
from holdfast.model.decider_events import Outcome
from holdfast.model.job_and_seats import HostIdentity

_READ_S = 2.0  # a list that takes longer lies on a file system that hangs


class HostAdmission:
    def __init__(
        self,
        blocked: BlockList,
        limits: BlockLimits,
        view: JobView,
        *,
        now: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._blocked, self._limits, self._view, self._now, self._say = blocked, limits, view, now, say
        self._entries: tuple[BlockedHost, ...] = ()  # as read last
        self._reading: Future[tuple[BlockedHost, ...] | OSError] | None = None
        self._asked_at = 0.0
        self._told = ""  # why the list could not be read, as the console was told

    async def read_list(self, identity: HostIdentity) -> None:
        """Read the block list before a node is admitted, but wait only for a limited time, in case storage hangs. After
        this time the list from the last reading applies. If the list cannot be read, no host is refused."""
        if not identity.id:
            return
        now = asyncio.get_running_loop().time
        if self._reading is None or self._reading.done():
            self._reading, self._asked_at = self._blocked.read_entries(), now()
        reading = self._reading
        if not reading.done():
            await asyncio.wait([asyncio.wrap_future(reading)], timeout=max(0.0, self._asked_at + _READ_S - now()))
        if not reading.done():
            self._say_once("the list of blocked hosts does not answer; only hosts that it named before are refused")
        elif isinstance(found := reading.result(), OSError):
            self._entries = ()
            self._say_once(f"{found}; hosts join although they may be blocked")
        else:
            self._entries, self._told = found, ""

    def _say_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._say(text)

    def refusal_of(self, host: str, identity: HostIdentity) -> str:
        """Return why this host is refused according to the block list as last read; "" if it is not refused."""
        now = self._now()
        found = matching_entry(self._entries, host, identity, now)
        return self._refusal_text(*found, now) if found else ""

    def _refusal_text(self, entry: BlockedHost, what: str, now: float) -> str:
        was = f", which was on {entry.host}," if entry.host else ""
        where = "this host" if what == entry.host else f"{what}{was}"
        by = f"by {entry.who}" if entry.who else f"after incident {entry.incident} of run {entry.run_id}"
        by = by if entry.who or entry.incident else f"by run {entry.run_id}"
        left_h = (entry.until - now) / 3600
        return f"{where} is blocked {by} for another {left_h:.1f} h: {entry.reason}; {self._lift_text(what)}"

    def _lift_text(self, what: str) -> str:
        words = filter(None, ("holdfast blocked", self._blocked.flag, f"--lift {what}"))
        return f"{' '.join(words)} on the controller's host lets it join again"

    async def block_host(self, action: Block) -> Outcome:
        """Put the action's host on the block list. If that fails, the job says so and goes on."""
        now, identity = self._now(), action.identity
        entry = BlockedHost(
            host=action.host,
            id=identity.id,
            gpus=identity.gpus,
            reason=action.reason,
            run_id=self._view.job.run_id,
            incident=action.incident,
            at=now,
            until=now + self._limits.age_s,
        )
        if failed := await asyncio.wrap_future(self._blocked.add_entry(entry)):
            self._say(f"{action.host} is bad but not blocked, and may join again: {failed}")
            return Outcome(action=action.id, ok=False, detail=str(failed))
        what = action.host if identity.id else ", ".join(identity.gpus)
        self._say(f"{what} is blocked for {self._limits.age_s / 3600:g} h: {action.reason}; {self._lift_text(what)}")
        return Outcome(action=action.id, ok=True)
