"""Where the page's facts come from: a run directory and its controller, a journal alone, or a distant controller."""

import http.client
import ssl
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.cli.run_dirs import run_directory, run_journal, run_liveness
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import list_generations
from holdfast.controller_interfaces import Journal
from holdfast.core.decoding import from_json
from holdfast.dash.page_source import JobPresence, SourceError
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.event import Entry
from holdfast.wire.agent_messages import TOKEN_HEADER
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused

_WAIT_S, _TRACE_S = 3.0, 15.0
_LINES = 80  # of a rank's output
_MOST_BYTES = 1 << 28
_NO_CONTROLLER = "there is no controller: this is a journal alone"


class JournalSource:
    """The journal file of a run that has no controller, such as a simulation."""

    may_order = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None

    def read_entries(self, after: int) -> Iterator[Entry]:
        try:
            self._journal = self._journal or self.open_journal()
            yield from self._journal.read(after)
        except run_journal.NoJournalError:
            return  # it will be there presently
        except (JournalError, UsageError) as e:
            raise SourceError(str(e)) from None

    def open_journal(self) -> Journal:
        return SqliteJournal(self._path, read_only=True)

    def look_at_job(self) -> JobPresence:
        return JobPresence()

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        raise SourceError(_NO_CONTROLLER)

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        raise SourceError("a journal alone has no output of ranks")

    def find_archive(self, digest: str) -> Path:
        raise SourceError("a journal alone has no files of releases")


class RunSource(JournalSource):
    """A run directory on this host; live facts come from its controller, if there is one, through its socket."""

    def open_journal(self) -> Journal:
        return run_journal.open_to_read(self._path)

    def look_at_job(self) -> JobPresence:
        try:
            status = ask_controller(self._path, "/api/v1/status", wait_s=_WAIT_S)
        except ControllerNotRunning:
            self.may_order = False
            return JobPresence(absence=run_liveness.ending_text(self._path))
        self.may_order = True
        return JobPresence(status=status, now=time.time())

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return ask_controller(self._path, path, body, _TRACE_S)
        except RequestRefused as e:
            raise SourceError(e.why) from None
        except ControllerNotRunning as e:
            raise SourceError(str(e)) from None

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        try:
            log_dir = Path(run_directory.read_spec(self._path).log_dir)
        except UsageError as e:
            raise SourceError(str(e)) from None
        for number in [generation] if generation else reversed(list_generations(log_dir)):
            if lines := tuple(_last_lines(log_dir / f"gen-{number}" / f"rank-{rank}")):
                return (f"generation {number}", *lines)
        raise SourceError(f"rank {rank} has printed nothing on this host; its node may keep it on another one")

    def find_archive(self, digest: str) -> Path:
        if (path := self._path / "releases" / f"{digest}.tar").is_file():
            return path
        raise SourceError(f"{path} is not there: releases were made on another host, or removed")


def _last_lines(folder: Path) -> Iterable[str]:
    for name in ("stdout.log", "stderr.log"):
        lines: deque[bytes] = deque(maxlen=_LINES)
        try:
            with (folder / name).open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - (1 << 18)))
                lines.extend(file)
        except OSError:
            continue
        yield from (f"{name[3:6]}  {line.decode('utf-8', 'replace').rstrip()}" for line in lines)


class ControllerSource:
    """A controller on any host, reached at its port with a token."""

    may_order = True

    def __init__(self, address: str, token: str, authority: Path | None) -> None:
        self._place = urlsplit(address)
        self._token = token
        self._tls = ssl.create_default_context(cafile=authority) if self._place.scheme == "https" else None

    def read_entries(self, after: int) -> Iterator[Entry]:
        while True:
            answer = self._send("GET", f"/api/v1/entries?after={after}", None)
            try:
                entries = from_json(answer, list[Entry])
            except msgspec.DecodeError as e:
                raise SourceError(f"the entries of {self._place.netloc} cannot be read: {e}") from None
            yield from entries
            if not entries:
                return
            after = entries[-1].seq

    def look_at_job(self) -> JobPresence:
        try:
            return JobPresence(status=self._ask("GET", "/api/v1/status", None), now=time.time())
        except SourceError as e:
            return JobPresence(absence=str(e))

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        raise SourceError("output of ranks stays on their hosts; holdfast logs shows it there")

    def find_archive(self, digest: str) -> Path:
        raise SourceError("files of releases stay on the controller's host; holdfast dash shows them there")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            return from_json(self._send(method, path, body), object)
        except msgspec.DecodeError:
            raise SourceError(f"the server at {self._place.netloc} is not holdfast") from None

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        host, port = self._place.hostname or "", self._place.port
        link = (
            http.client.HTTPSConnection(host, port, timeout=_TRACE_S, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(host, port, timeout=_TRACE_S)
        )
        try:
            sent = msgspec.json.encode(body) if body is not None else None
            link.request(method, path, sent, {TOKEN_HEADER: self._token})
            answer = link.getresponse()
            content = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as e:
            raise SourceError(f"the controller at {self._place.netloc} does not answer: {e}") from None
        finally:
            link.close()
        if answer.status != http.HTTPStatus.OK:
            raise SourceError(_refusal_text(content, answer.status))
        return content


def _refusal_text(content: bytes, status: int) -> str:
    try:
        return str(from_json(content, dict[str, object])["error"])
    except (msgspec.DecodeError, KeyError):
        return f"HTTP {status}"
