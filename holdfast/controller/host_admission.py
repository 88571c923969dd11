"""Refuses nodes of blocked hosts, and blocks hosts whose machines are at fault."""

import asyncio
from collections.abc import Callable

from holdfast.core.decide.job_view import JobView
from holdfast.core.membership.host_blocking import BlockedHost, BlockLimits, matching_entry
from holdfast.model.action import Block
from holdfast.model.event import Outcome
from holdfast.ports import BlockList
from holdfast.wire.agent_messages import Hello


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
        self._told = ""  # why the list could not be read, as the console was told

    def refusal_of(self, hello: Hello) -> str:
        """Say why this node's host is refused; "" if it is not. A list that cannot be read refuses nobody."""
        if not hello.identity.id:
            return ""
        try:
            entries, self._told = self._blocked.read_entries(), ""
        except OSError as e:
            if str(e) != self._told:
                self._told = str(e)
                self._say(f"{e}; hosts join although they may be blocked")
            return ""
        now = self._now()
        found = matching_entry(entries, hello.host, hello.identity, now)
        return self._refusal_text(*found, now) if found else ""

    def _refusal_text(self, entry: BlockedHost, what: str, now: float) -> str:
        was = f", which was on {entry.host}," if entry.host else ""
        where = "this host" if what == entry.host else f"{what}{was}"
        by = f"by {entry.who}" if entry.who else f"after incident {entry.incident} of run {entry.run_id}"
        by = by if entry.who or entry.incident else f"by run {entry.run_id}"
        left_h = (entry.until - now) / 3600
        return f"{where} is blocked {by} for another {left_h:.1f} h: {entry.reason}; {self._lift_text(what)}"

    def _lift_text(self, what: str) -> str:
        where = f" --list {self._limits.path}" if self._limits.path else ""
        return f"holdfast blocked{where} --lift {what} on the controller's host lets it join again"

    async def block_host(self, action: Block) -> Outcome:
        """Put the action's host on the list. A job that cannot do so goes on, and says so."""
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
        try:
            await asyncio.to_thread(self._blocked.add_entry, entry)
        except OSError as e:
            self._say(f"{action.host} is bad but not blocked, and may join again: {e}")
            return Outcome(action=action.id, ok=False, detail=str(e))
        what = action.host if identity.id else ", ".join(identity.gpus)
        self._say(f"{what} is blocked for {self._limits.age_s / 3600:g} h: {action.reason}; {self._lift_text(what)}")
        return Outcome(action=action.id, ok=True)
