"""Sends notices about the job to the user's command or URL, without the job waiting for either."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import aiohttp
import msgspec

from holdfast.controller_interfaces import Notes
from holdfast.core.decide.job_view import JobView
from holdfast.core.record.hook_notices import (
    HookLimits,
    HookNotice,
    HookNotices,
    JobStanding,
    NoticePacer,
    format_slack,
)
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.decoding import from_json
from holdfast.linux import own_process_settings
from holdfast.logs.secret_masking import Masker, argv_secrets, env_secrets, last_bytes
from holdfast.model.journal_entry import Entry

_PROGRESS = "hooked.json"
_PAUSES_S = (0.0, 1.0, 2.0)  # before each try to post
_WORDS = 300  # characters of what a command said that are told when it failed
_TAIL = 1 << 16  # bytes of it that are masked before they are cut
_VARIABLE = 4096  # characters; the notice has the whole
_LOG_BYTES = 1 << 20
_AGAIN = (429, 500, 502, 503, 504)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_log = logging.getLogger("holdfast.controller")


class HookProgress(msgspec.Struct, frozen=True):
    """The note hooked.json: the newest journal entry whose notices were sent to the hooks."""

    seq: int


class UserHooks:
    """Sends notices about journal entries to the hooks; a new controller continues where the last one stopped."""

    def __init__(
        self,
        limits: HookLimits,
        run_id: str,
        run_dir: Path,
        cwd: str,
        *,
        notes: Notes,
        say: Callable[[str], None],
        mask: Masker,
    ) -> None:
        """`mask` learns the secrets in environments of releases."""
        self.failures = 0
        self._mask = mask
        self._limits = limits
        self._run_dir = run_dir
        self._cwd = cwd
        self._say = say
        self._notices = HookNotices(run_id)
        self._pacer = NoticePacer(limits.least_s)
        self._news = asyncio.Event()
        self._over = False
        self._said: set[str] = set()  # which hooks have failed
        self._notes = notes
        self._seq = _read_progress(notes)

    @property
    def is_enabled(self) -> bool:
        return bool(self._limits.command or self._limits.url)

    def on_entry(self, entry: Entry, standing: JobStanding) -> None:
        for release in standing.known.values():
            self._mask.learn([*env_secrets(release.env), *argv_secrets(release.argv)])
        for notice in self._notices.on_entry(entry, standing):
            if notice.seq > self._seq and self.is_enabled:
                self._pacer.add_notice(notice)
                self._news.set()

    async def run(self) -> None:
        """Send notices one at a time; return when finish_up was called and all notices are sent."""
        while True:
            upto, now = self._pacer.newest_seq, math.inf if self._over else time.monotonic()
            if notice := self._pacer.next_notice(now):
                await self._tell_notice(notice, upto)
                continue
            if self._over:
                return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pacer.wait_s(now)):
                    await self._news.wait()

    def finish_up(self) -> None:
        """Send all remaining notices now, because the job has ended."""
        self._over = True
        self._news.set()

    async def _tell_notice(self, notice: HookNotice, upto: int) -> None:
        # It may end on somebody's console, and leaves the host.
        notice = msgspec.convert(self._mask.mask_tree(strip_tree(msgspec.to_builtins(notice))), HookNotice)
        ran, posted = await asyncio.gather(self._run_command(notice), self._post_notice(notice))
        self._note_failure("command", ran)
        self._note_failure("url", posted)
        self._seq = max(self._seq, upto)
        with contextlib.suppress(OSError):  # then the next controller says it once more
            self._notes.put_note(_PROGRESS, msgspec.json.encode(HookProgress(self._seq)))

    def _note_failure(self, which: str, why: str) -> None:
        if not why:
            return
        self.failures += 1
        why = "\n".join(self._mask.mask_lines(why.split("\n")))  # it quotes what a command has said
        _log.warning("hook.%s %s", which, why)
        if which not in self._said:
            self._said.add(which)
            self._say(f"hook.{which} {why}; its notice may be lost, and later failures go only to controller.log")

    # --- a command ---------------------------------------------------------------------------------------------

    async def _run_command(self, notice: HookNotice) -> str:
        """Run the user's command; returns why it failed, or ""."""
        if not self._limits.command:
            return ""
        try:
            # Files and no pipes: whatever it leaves behind may hold them open as long as it likes.
            with _notice_file(notice) as told, _log_file(self._run_dir) as log:
                began = log.tell()
                code = await self._execute_command(notice, told, log)
                log.seek(max(began, log.seek(0, os.SEEK_END) - _TAIL - 1))
                said = self._mask.mask_end(last_bytes(log.read(_TAIL + 1), _TAIL).decode("utf-8", "replace"), _WORDS)
        except OSError as e:
            return f"cannot be started: {e}"
        if code is None:
            return f"did not end within {self._limits.timeout_s:g} s and was killed"
        return f"failed with code {code}{f': {said}' if said else ''}" if code else ""

    async def _execute_command(self, notice: HookNotice, told: BinaryIO, log: BinaryIO) -> int | None:
        """Return the command's exit code, or None if it took too long and was killed."""
        process = await asyncio.create_subprocess_exec(
            *own_process_settings.shell_argv(self._limits.command),
            stdin=told,
            stdout=log,
            stderr=log,
            env={**os.environ, **_notice_env(notice, self._run_dir)},
            cwd=self._cwd,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            await process.wait()

    # --- an address --------------------------------------------------------------------------------------------

    async def _post_notice(self, notice: HookNotice) -> str:
        """Post a notice. Return why it failed, or "". The URL may hold a secret, so only its host is ever shown."""
        if not self._limits.url:
            return ""
        host = urlsplit(self._limits.url).hostname or ""
        tries = [f"did not answer within {self._limits.timeout_s:g} s"]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.timeout_s):
                await self._try_to_post(notice, tries, trust_env=host not in _LOOPBACK)
        return f"({host}) {tries[-1]}" if tries[-1] else ""

    async def _try_to_post(self, notice: HookNotice, tries: list[str], trust_env: bool) -> None:
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            why, again = await self._post_once(notice, trust_env)
            tries.append(why)
            if not again:
                return

    async def _post_once(self, notice: HookNotice, trust_env: bool) -> tuple[str, bool]:
        """Post once. Return why the notice was not accepted, and whether to try again."""
        slack = self._limits.format == "slack"
        body = msgspec.json.encode({"text": format_slack(notice)} if slack else notice)
        try:
            async with (
                aiohttp.ClientSession(trust_env=trust_env) as session,
                session.post(
                    self._limits.url,
                    data=body,
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as answer,
            ):
                if answer.status < 300:
                    return "", False
                return f"answered {answer.status}", answer.status in _AGAIN
        except (aiohttp.ClientError, OSError, ValueError) as e:
            return f"cannot be reached: {type(e).__name__}", True


def _notice_file(notice: HookNotice) -> BinaryIO:
    file = os.fdopen(os.memfd_create("notice"), "w+b")
    file.write(msgspec.json.encode(notice))
    file.seek(0)
    return file


def _log_file(run_dir: Path) -> BinaryIO:
    """Open RUN_DIR/hook.log for the output of commands; a large log is emptied first."""
    path = run_dir / "hook.log"
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.unlink()
    return path.open("a+b")


def _notice_env(notice: HookNotice, run_dir: Path) -> dict[str, str]:
    found = {
        "HOLDFAST_TOPIC": notice.topic,
        "HOLDFAST_TEXT": notice.text,
        "HOLDFAST_RUN_ID": notice.run_id,
        "HOLDFAST_RUN_DIR": str(run_dir),
        "HOLDFAST_PHASE": notice.phase,
    }
    if notice.incident:
        found["HOLDFAST_INCIDENT"] = str(notice.incident.number)
    if notice.code is not None:
        found["HOLDFAST_CODE"] = str(notice.code)
    if notice.release:
        found |= {"HOLDFAST_RELEASE": str(notice.release.number), "HOLDFAST_OWNER": notice.owner}
    return {name: value.replace("\0", "")[:_VARIABLE] for name, value in found.items()}


def job_standing(view: JobView) -> JobStanding:
    return JobStanding(
        asking=view.question,
        until=view.asks_until,
        fates=view.fates,
        told=view.fate_reasons,
        known=view.releases,
    )


def _read_progress(notes: Notes) -> int:
    try:
        return from_json(notes.get_note(_PROGRESS), HookProgress).seq
    except (OSError, msgspec.DecodeError):
        return 0
