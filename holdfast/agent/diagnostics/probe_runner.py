"""Runs probes in a separate process; a probe that hangs or dies becomes a failed finding.

This side needs no torch. It passes on the findings that the process prints. If the process is silent for longer than
the current probe may take, dies, or uses too much memory, that probe has failed and a fresh process runs the next.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from holdfast.agent.probes import PROBES, SKIPPED, START, START_S, ProbeEntry, ProbeLine, choose_probes
from holdfast.agent.system.child_last_line import read_last_line
from holdfast.core.diagnose.probe_assessment import is_starved
from holdfast.core.incident.incident_text import describe_exit
from holdfast.decoding import make_decoder
from holdfast.model.probe_findings import Finding, PairMeeting

_LOOK_S = 0.1  # how often its memory is looked at
_GONE_S = 10.0  # a process that can end has ended by then
_SMALL_S = 20.0  # a budget below this asks for the small sizes
_STARVED = 3  # times as long a niced probe gets only if it is given processors
_REPEATS = 20  # take as long again as a probe may
_LINE_BYTES = 1 << 20
_told = make_decoder(msgspec.json.Decoder(ProbeLine))


class ProbeTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a probe process, and additions to its environment."""

    nice: int = 10
    memory_bytes: int = 8 << 30  # of its own; more is taken for a leak
    hang_s: float = 0.0  # for every probe, instead of its own deadline
    env: dict[str, str] = {}  # besides ours


async def run_probes(
    level: int,
    budget_s: float,
    python: str,
    where: Path,
    *,
    only: Sequence[str] = (),
    repeats: int = 1,
    terms: ProbeTerms | None = None,
) -> AsyncIterator[Finding]:
    """Yield findings as probes make them. All probes together get `budget_s` seconds, or all the time they need if it
    is 0. `where` is a folder on the disk to test, `python` the interpreter that has torch."""
    terms = terms or ProbeTerms()
    left_s, behind = budget_s, [p.name for p in PROBES if only and p.name not in only]
    while rest := choose_probes(level, skip=",".join(behind)):
        if budget_s and left_s <= 0:
            for probe in rest:
                yield Finding(probe=probe.name, level=probe.level, ok=None, detail=SKIPPED)
            return
        flags = [f"--level={level}", f"--skip={','.join(behind)}", f"--budget={left_s}", f"--repeats={repeats}"]
        flags += ["--small"] if 0 < budget_s < _SMALL_S else []
        rows = [ProbeEntry(p.name, p.level, p.deadline_s * (1 + repeats / _REPEATS)) for p in rest]
        run = _ProbeProcess([python, "-P", "-m", "holdfast.agent.probes", *flags, f"--where={where}"], rows, terms)
        async for finding in run.read_findings():
            yield finding
        if run.broken and run.broken.starved and terms.nice > 0:  # once more, and before those that need a processor
            terms = msgspec.structs.replace(terms, nice=0)
            behind += [name for name in run.behind if name != run.broken.probe]
            continue
        behind += run.behind
        left_s -= run.took_s
        if run.broken:
            yield run.broken
            if run.broken.probe == START:
                return  # the next process would come no further
        elif not run.behind:
            return


async def run_link(
    meeting: PairMeeting, python: str, *, terms: ProbeTerms | None = None, argv: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """Run this node's end of a pair test, with `argv` (e.g. `nsenter ...`) before the command; return the findings."""
    said = msgspec.json.encode(meeting).decode()
    link = ProbeEntry("link", 2, meeting.deadline_s + _GONE_S)  # it is to tell itself whom it waited for
    run = _ProbeProcess(
        [*argv, python, "-P", "-m", "holdfast.agent.probes.link", f"--meeting={said}"], [link], terms or ProbeTerms()
    )
    found = [finding async for finding in run.read_findings()]
    return (*found, run.broken) if run.broken else tuple(found)


class _ProbeProcess:
    """One process that runs probes, from its start to its end."""

    def __init__(self, argv: list[str], rest: list[ProbeEntry], terms: ProbeTerms) -> None:
        self._argv = [*argv, "--json", f"--nice={terms.nice}", f"--parent={os.getpid()}"]
        self._terms = terms
        self._rows = {probe.name: probe for probe in rest}
        self.behind: list[str] = []  # what need not be tried again
        self.broken: Finding | None = None
        self.took_s = 0.0  # of the budget
        self._at = START
        self._since = time.monotonic()
        self._pid = 0
        self._queued_s = 0.0  # until the current probe began
        self._starved = False

    async def read_findings(self) -> AsyncIterator[Finding]:
        words = os.memfd_create("holdfast-probes")  # not a file: the disk may be what is wrong
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=words,
                env={**os.environ, **self._terms.env},
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as e:
            self.broken = self._failed_finding(f"the probe process cannot start: {e.strerror}")
            os.close(words)
            return
        self._pid = process.pid
        try:
            while line := await self._next_line(process):
                if told := self._on_line(line):
                    yield told
            if not self.broken:
                await self._await_end(process, words)
        finally:
            await self._kill_process(process)
            self._on_probe_start("")
            os.close(words)

    async def _next_line(self, process: asyncio.subprocess.Process) -> bytes:
        """Return the next line that the process prints; empty at the end, or when the process exceeds a limit."""
        assert process.stdout
        while not self.broken:
            try:
                async with asyncio.timeout(_LOOK_S):
                    return await process.stdout.readline()
            except TimeoutError:
                if why := self._check_limits(process.pid):
                    self.broken = self._failed_finding(why)
            except ValueError:
                self.broken = self._failed_finding(f"the probe printed a line of more than {_LINE_BYTES} bytes")
        return b""

    async def _await_end(self, process: asyncio.subprocess.Process, words: int) -> None:
        try:
            async with asyncio.timeout(_GONE_S):
                code = await process.wait()
        except TimeoutError:
            self.broken = self._failed_finding(
                f"the probe process has reported all findings but did not exit within {_GONE_S:g} s"
            )
        else:
            self.broken = self._failed_finding(_describe_exit(code, words)) if code else None

    async def _kill_process(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process and its process group; if it does not die, report that it hangs in the kernel."""
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(_GONE_S):
                await process.wait()
        except ProcessLookupError:
            pass
        except TimeoutError:  # it hangs in the kernel, most likely in a driver; we do not
            why = self.broken.detail if self.broken else "the probe process should end"
            self.broken = self._failed_finding(f"{why}, and SIGKILL did not end it: it hangs in the kernel")

    def _check_limits(self, pid: int) -> str:
        row = self._rows.get(self._at)
        limit_s = self._terms.hang_s or row.deadline_s if row else START_S
        took_s = time.monotonic() - self._since
        if took_s > limit_s or (self._terms.nice > 0 and took_s > limit_s / _STARVED):
            waited_s = min(took_s, _queued_s(pid) - self._queued_s)
            self._starved = is_starved(waited_s, took_s)
            if self._starved or took_s > limit_s:
                waited = f", and waited for a processor for {waited_s:.3g} s of them" if self._starved else ""
                return f"the probe did not finish within {min(limit_s, took_s):.3g} s{waited}"
        if (used := _own_bytes(pid)) > self._terms.memory_bytes:
            return f"the probe took {used / 1e9:.1f} GB of memory and was killed"
        return ""

    def _on_line(self, line: bytes) -> Finding | None:
        try:
            told = _told(line)
        except msgspec.DecodeError:
            self.broken = self._failed_finding("the probe printed a line that is not a finding")
            return None
        if told.began:
            self._on_probe_start(told.began)
        elif told.finding and told.finding.probe not in self.behind and told.finding.ok is None:
            self.behind.append(told.finding.probe)
        return told.finding

    def _on_probe_start(self, to: str) -> None:
        now = time.monotonic()
        if self._at != START:
            self.took_s += now - self._since
            if self._at not in self.behind:
                self.behind.append(self._at)
        self._at, self._since, self._queued_s = to or START, now, _queued_s(self._pid)

    def _failed_finding(self, why: str) -> Finding:
        row = self._rows.get(self._at)
        took_s = round(time.monotonic() - self._since, 3)
        level, ok = row.level if row else 1, None if self._starved else False
        return Finding(probe=self._at, level=level, ok=ok, detail=why, took_s=took_s, starved=self._starved)


def _describe_exit(code: int, words: int) -> str:
    said = read_last_line(words) if code > 0 else ""
    return said or f"the probe process {describe_exit(code)}"


def _own_bytes(pid: int) -> int:
    """Return the private anonymous memory of a process in bytes; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    rows = (line.split() for line in status.splitlines() if line.startswith("RssAnon:"))
    return next((int(row[1]) << 10 for row in rows), 0)


def _queued_s(pid: int) -> float:
    """Return for how long a process was ready and waited for a processor; 0 if the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
