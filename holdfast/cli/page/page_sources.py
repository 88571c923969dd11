"""Where the page's facts come from: a run directory and its controller, a journal alone, or a distant controller."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.run_dirs import run_directory, run_journal, run_liveness
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_dirs.distant_controller import DistantController
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import list_generations
from holdfast.controller_interfaces import Journal
from holdfast.core.terminal_sanitizer import cut_words
from holdfast.dash.page_source import JobPresence, SourceError, may_order
from holdfast.decoding import from_json
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.linux.regular_files import read_end
from holdfast.logs.secret_masking import argv_secrets, env_secrets, last_bytes, make_secret_masker, trim_line
from holdfast.model.decider_events import Begin, Order
from holdfast.model.journal_entry import Entry
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused

_WAIT_S, _TRACE_S = 3.0, 15.0
_LINES, _TAIL_BYTES = 80, 1 << 18  # of a rank's output
_SHOWN_CHARS = 1 << 13  # of a line; twice as many are masked
_RANKS = "/api/v1/ranks/"
_NO_CONTROLLER = "there is no controller: this is a journal alone"


class JournalSource:
    """The journal file of a run that has no controller, such as a simulation."""

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

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        return None

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        raise SourceError("a journal alone has no output of ranks")

    def find_archive(self, digest: str) -> Path:
        raise SourceError("a journal alone has no files of releases")


class RunSource(JournalSource):
    """A run directory on this host; live facts come from its controller, if there is one, through its socket."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Pages are shown and mailed. When the run has ended nobody knows its environment any more.
        self._mask = make_secret_masker(_run_secrets(path))

    def read_entries(self, after: int) -> Iterator[Entry]:
        for entry in super().read_entries(after):
            if isinstance(entry.event, Order | Begin) and (release := entry.event.release):
                self._mask.learn([*env_secrets(release.env), *argv_secrets(release.argv)])
            yield entry

    def open_journal(self) -> Journal:
        return run_journal.open_to_read(self._path)

    def look_at_job(self) -> JobPresence:
        try:
            status = ask_controller(self._path, "/api/v1/status", wait_s=_WAIT_S)
        except ControllerNotRunning:
            return JobPresence(absence=run_liveness.ending_text(self._path))
        return JobPresence(status=status, now=time.time(), may_order=may_order(status))

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return ask_controller(self._path, path, body, _TRACE_S)
        except ControllerNotRunning as e:
            raise SourceError(_reason_of(e)) from None

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = ask_controller(self._path, f"{_RANKS}{rank}", wait_s=_WAIT_S)
        except ControllerNotRunning:
            return None
        return found

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        try:
            run = run_directory.read_spec(self._path)
        except UsageError as e:
            raise SourceError(str(e)) from None
        log_dir = Path(run.log_dir)
        for number in [generation] if generation else reversed(list_generations(log_dir)):
            if lines := tuple(_last_lines(log_dir / f"gen-{number}" / f"rank-{rank}")):
                return (
                    f"generation {number}",
                    *(cut_words(line, _SHOWN_CHARS) for line in self._mask.mask_lines(lines)),
                )
        elsewhere = "" if run.fleet == "local" else " on this host; its node may keep it on another one"
        raise SourceError(f"rank {rank} has printed nothing{elsewhere}")

    def find_archive(self, digest: str) -> Path:
        if (path := self._path / "releases" / f"{digest}.tar").is_file():
            return path
        raise SourceError(f"{path} is not there: releases were made on another host, or removed")


def _run_secrets(run_dir: Path) -> list[str]:
    """Return the secrets in the environment of a run's ranks, as far as it is still there."""
    try:
        return env_secrets(run_directory.node_environment(run_dir))
    except (OSError, ValueError, UsageError):
        return []


def _last_lines(folder: Path) -> Iterable[str]:
    for name in ("stdout.log", "stderr.log"):
        try:
            text = last_bytes(read_end(folder / name, _TAIL_BYTES + 1), _TAIL_BYTES)
        except FileNotFoundError:
            continue
        except OSError as e:
            yield f"{name[3:6]}  cannot read {name}: {e.strerror}"
            continue
        lines = text.decode("utf-8", "replace").removesuffix("\n").split("\n") if text else []
        yield from (f"{name[3:6]}  {trim_line(line.rstrip())}" for line in lines[-_LINES:])


class ControllerSource:
    """A controller on any host, reached at its port with a token."""

    def __init__(self, controller: DistantController) -> None:
        self._controller = controller

    def read_entries(self, after: int) -> Iterator[Entry]:
        while True:
            try:
                entries = from_json(self._controller.fetch("GET", f"/api/v1/entries?after={after}"), list[Entry])
            except msgspec.DecodeError as e:
                raise SourceError(f"the entries of {self._controller.name} cannot be read: {e}") from None
            except ControllerNotRunning as e:
                raise SourceError(_reason_of(e)) from None
            yield from entries
            if not entries:
                return
            after = entries[-1].seq

    def look_at_job(self) -> JobPresence:
        try:
            status = self._controller.ask("/api/v1/status")
        except ControllerNotRunning as e:
            return JobPresence(absence=_reason_of(e))
        return JobPresence(status=status, now=time.time(), may_order=may_order(status))

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return self._controller.ask(path, body)
        except ControllerNotRunning as e:
            raise SourceError(_reason_of(e)) from None

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._controller.ask(f"{_RANKS}{rank}")
        except ControllerNotRunning:
            return None
        return found

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        raise SourceError("output of ranks stays on their hosts; holdfast logs shows it there")

    def find_archive(self, digest: str) -> Path:
        raise SourceError("files of releases stay on the controller's host; holdfast dash shows them there")


def _reason_of(e: ControllerNotRunning) -> str:
    return e.why if isinstance(e, RequestRefused) else str(e)
