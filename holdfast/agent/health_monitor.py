"""The health monitor: reads each source at its own pace in its own thread, and passes on the detectors' alarms.

A driver or file system that hangs blocks only the thread that reads it. The other sources go on, and the agent reports
the source that does not answer. The threads are daemons, so no thread can keep an agent from ending.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.sources import Read, Signal, SourceAbsent, tensor_activity
from holdfast.agent.sources.gpu import GpuSource, load_nvml
from holdfast.agent.sources.host import HostSource
from holdfast.agent.sources.kernel_log import KernelLogSource
from holdfast.agent.sources.network import NetworkSource
from holdfast.agent.sources.rank_logs import RankLogSource
from holdfast.agent.system import procfs
from holdfast.agent.system.oom_kills import OomKills, knows_pids
from holdfast.core.detect.health import HealthDetector, driver_deadline_s
from holdfast.core.detect.lines import LineDetector, MachineUse
from holdfast.core.detect.link_traffic import TrafficMeter
from holdfast.core.detect.user_log_rules import RuleDetector
from holdfast.core.incident.alarm_rate_limit import AlarmRateLimit
from holdfast.core.log_analysis import megatron_progress
from holdfast.core.log_analysis.megatron_progress import MegatronProgress
from holdfast.core.record.gpu_peak import peak_of_ranks
from holdfast.linux.regular_files import read_start
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm
from holdfast.model.observation import Gauge, Line, LinkTraffic, StepValues, Strain
from holdfast.wire import run_and_node_specs
from holdfast.wire.holder_messages import HolderRank, RankKey
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.run_and_node_specs import NodeSpec

_KERNEL, _GPUS, _HOST, _NETWORK, _LOGS = "kernel log", "GPUs", "host", "network", "ranks' logs"
_LOGS_S = 1.0
_LOOK_S = 2.0  # how often the threads themselves are looked at
_SLICE_S = 0.02  # of the loop, for what ranks write: it may be made of nothing but lines that rows look for
_HURRY_S = 0.05  # what a rank's end may wait for the kernel's log
_SHORT_BYTES = 1024  # of files that hold a pid or a host's name
_log = logging.getLogger("holdfast.agent")


class MonitorPorts(msgspec.Struct, frozen=True):
    """What the monitor needs from its agent: a callback for alarms, the ranks, the clocks and NVML."""

    noticed: Callable[[Alarm], None]
    on_traffic: Callable[[tuple[LinkTraffic, ...]], None]
    on_logged: Callable[[StepValues, str], None]  # a loss in a rank's line, and where it is read from
    list_ranks: Callable[[], list[HolderRank]]  # the ranks here, those that have ended among them
    offset_s: Callable[[], float]  # controller's clock minus ours
    clock: AgentClock
    nvml: Callable[[], object] = load_nvml


class SourceFeed:
    """One source of readings: the interval between reads, and the state of the thread that reads."""

    def __init__(self, name: str, pace_s: float, make: Callable[[], Read], *, shared: bool = True) -> None:
        self.name = name
        self.stuck = "gpu.stuck_s" if name == _GPUS else "source.stuck_s"
        self.pace_s = pace_s
        self.make = make
        self.shared = shared  # of the host, so that one node of it is enough
        self.asked_at: float | None = None  # since when we wait for an answer
        self.absent = False
        self.behind = False  # the loop has not yet heard all that was read
        self.had_turn = False  # the loop has heard what was read first, or another node reads it
        self.lock = threading.Lock()
        self.wake = threading.Event()
        self.thread: threading.Thread | None = None


class HealthMonitor:
    def __init__(self, node_dir: Path, node: NodeSpec, ties: MonitorPorts) -> None:
        self._spec, self._dir, self._ties = node, node_dir, ties
        self._clock = ties.clock
        settings = node.settings
        limits = settings.health
        self._alone = "{node}" in limits.root
        self._root = Path(limits.root.replace("{node}", node.node))
        self._health = HealthDetector(limits, catalog_files.load_health(limits.catalog))
        self._lines = LineDetector(settings.lines, catalog_files.load_lines(settings.lines.catalog))
        self._rules = RuleDetector(settings.rules)
        self._megatron = MegatronProgress()
        self._flood = AlarmRateLimit()
        self._traffic = TrafficMeter()
        self._speaker: int | None = None  # the lock by which this node speaks for its host
        self._deciding = threading.Lock()  # on that
        self._gpus: frozenset[str] = frozenset()
        self._gpu_models: tuple[str, ...] = ()
        self._gpu_peaks = catalog_files.load_gpu_peaks()
        self.peak_flops = 0.0  # of this node's ranks; 0: not known
        self.tensor_share: float | None = None  # of the time, the GPUs' tensor cores worked; None: not known
        self._host: HostSource | None = None
        self._kernel: KernelLogSource | None = None
        self._generation = 0
        self.kills = OomKills(self._root)
        self._knows_pids = knows_pids(self._root)
        self._ended = threading.Event()
        self.logs: RankLogSource | None = None
        self._feeds = {
            feed.name: feed
            for feed in (
                SourceFeed(_KERNEL, limits.kernel_s, self._make_kernel, shared=False),
                SourceFeed(_GPUS, limits.gpu_s, self._make_gpu),
                SourceFeed(_HOST, limits.host_s, self._make_host),
                SourceFeed(_NETWORK, limits.network_s, self._make_network),
                SourceFeed(_LOGS, _LOGS_S, self._make_logs, shared=False),
            )
        }

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.kills.count_now(self._clock.monotonic())
        for feed in self._feeds.values():
            feed.thread = threading.Thread(
                target=self._run_feed, args=(feed,), name=f"holdfast {feed.name}", daemon=True
            )
            feed.thread.start()
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                self._check_feeds()
        finally:
            self._ended.set()
            for feed in self._feeds.values():
                feed.wake.set()

    def on_rank_exit(self, at: float) -> None:
        """Read the kernel log now, so that its alarms precede the report of the exit. Wake the GPU and host sources."""
        feed = self._feeds[_KERNEL]
        if self._kernel and feed.lock.acquire(timeout=_HURRY_S):
            try:
                found = self._kernel.read()
            finally:
                feed.lock.release()
            self._on_signals(feed, [msgspec.structs.replace(signal, at=min(signal.at, at)) for signal in found])
        for name in (_GPUS, _HOST):
            self._feeds[name].wake.set()

    @property
    def strains(self) -> tuple[Strain, ...]:
        """Return the strains of this machine, which may explain trouble of the job."""
        return self._health.strains

    @property
    def links_read(self) -> bool:
        """Return whether this agent or another node has read the host's links; True if the host has none."""
        return self._feeds[_NETWORK].absent or self._feeds[_NETWORK].had_turn

    def has_oom_kill(self) -> bool:
        """Return whether the kernel has just killed a process on this node for lack of memory."""
        return self.kills.has_recent()

    def scarcely(self) -> str:
        """Return in words a sign of scarce memory; "" if there is none, or if the kernel log can be read instead."""
        return self.kills.scarcely(self._clock.monotonic()) if self._feeds[_KERNEL].absent else ""

    # --- threads -----------------------------------------------------------------------------------------------

    def _run_feed(self, feed: SourceFeed) -> None:
        """Read a source at its pace, in its thread, until the monitor ends; return at once if the source is absent."""
        feed.asked_at = self._clock.monotonic()
        try:
            read = feed.make()
        except SourceAbsent as e:
            feed.absent, feed.asked_at = True, None
            _log.info("not watching %s: %s", feed.name, e)
            return
        while not self._ended.is_set():
            if not feed.shared or self._speaks_for_host():
                feed.asked_at = self._clock.monotonic()
                with feed.lock:
                    found = read()
                if feed.behind:
                    _log.info("skipped %d lines of the ranks' logs: too many to read them all", len(found))
                elif found and not self._hand_on(feed, found):
                    return
            else:
                feed.had_turn = True
            feed.asked_at = None
            feed.wake.wait(feed.pace_s)
            feed.wake.clear()

    def _hand_on(self, feed: SourceFeed, found: list[Signal]) -> bool:
        feed.behind = feed.name == _LOGS
        try:
            self._loop.call_soon_threadsafe(self._on_signals, feed, found)
        except RuntimeError:
            return False  # the agent has ended
        return True

    def _make_kernel(self) -> Read:
        self._kernel = KernelLogSource(self._now, self._clock, self._root)
        return self._kernel.read

    def _make_gpu(self) -> Read:
        source = GpuSource(self._ties.nvml(), self._now, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._gpus = frozenset(gpu.bus for gpu in source.gpus if gpu.bus)
        self._gpu_models = tuple(gpu.model for gpu in source.gpus)
        return source.read

    def _make_host(self) -> Read:
        self._host = HostSource(self._now, self._clock, self._ties.offset_s, self._watched_paths, self._root)
        return self._host.read

    def _make_network(self) -> Read:
        note = (self._dir if self._alone else self._dir.parent) / f".links-{socket.gethostname()}"
        return NetworkSource(self._now, note, self._root).read

    def _make_logs(self) -> Read:
        spec = self._spec
        self.logs = RankLogSource(
            self._now, spec.log_dir, self._running_ranks, spec.settings.lines.bytes_s, self._is_worth_splitting
        )
        return self.logs.read

    def _is_worth_splitting(self, text: bytes) -> bool:
        """Return whether to split this piece of a log: a line of it may match a rule or the catalog, or be
        Megatron's."""
        if self._spec.settings.rules.rule or megatron_progress.SIGN in text:
            return True
        return self._lines.catalog.may_match(text, rank=True)

    def _now(self) -> float:
        return self._clock.wall() + self._ties.offset_s()

    def _running_ranks(self) -> list[RankKey]:
        return [held.rank_key for held in self._ties.list_ranks() if held.code is None]

    def _watched_paths(self) -> list[str]:
        """Return the paths that the job writes to, and the checkpoint storages of this host's ranks. A standby has no
        ranks of its own, so ranks of the host's other nodes count too."""
        paths = [self._spec.entry.cwd, self._spec.log_dir, str(self._dir), "/dev/shm"]
        wanted = self._dir.glob("want-*.json") if self._alone else self._dir.parent.glob("*/want-*.json")
        for path in wanted:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                storage = run_and_node_specs.read_json(path, ArenaRequest).storage
                paths += [storage.url] if storage else []
        return list(dict.fromkeys(paths))

    def _speaks_for_host(self) -> bool:
        """Return whether this node reads the host-wide sources on behalf of all nodes of its host."""
        with self._deciding:
            if not self._alone and self._speaker is None:
                self._speaker = _lock_file(self._dir.parent / f".host-{socket.gethostname()}")
            return self._alone or self._speaker is not None

    # --- in the loop -------------------------------------------------------------------------------------------

    def _on_signals(self, feed: SourceFeed, found: list[Signal]) -> None:
        """Turn signals into alarms. A large backlog is handled in slices, so that beats can be sent in between."""
        if feed.name == _NETWORK and (links := self._traffic.on_gauges(s for s in found if isinstance(s, Gauge))):
            self._ties.on_traffic(links)
        if feed.name == _GPUS:
            told = [s.value / 100 for s in found if isinstance(s, Gauge) and s.name == tensor_activity.GAUGE]
            self.tensor_share = sum(told) / len(told) if told else None
        owned = self._make_owned(feed)
        until = self._clock.monotonic() + _SLICE_S
        for place, signal in enumerate(found):
            if feed.behind and self._clock.monotonic() > until:
                self._loop.call_soon(self._on_signals, feed, found[place:])
                return
            match signal:
                case Gauge():
                    self._send_alarm(self._health.on_gauge(signal, owned.suspects))
                case Line() if feed.name != _GPUS or self._feeds[_KERNEL].absent:  # an Xid is told once
                    self._send_alarm(self._lines.on_line(signal, owned))
                    self._on_rank_line(signal)
        feed.behind, feed.had_turn = False, True

    def _on_rank_line(self, line: Line) -> None:
        for alarm in self._rules.on_line(line):
            self._send_alarm(alarm)
        if line.rank >= 0 and (told := self._megatron.on_line(line)):
            self._ties.on_logged(told, self._megatron.source)

    def _check_feeds(self) -> None:
        now = self._clock.monotonic()
        self.kills.count_now(now)
        self.peak_flops = self._find_peak()
        running = self._running_ranks()
        generation = max((generation for generation, _ in running), default=0)
        if generation != self._generation:
            self._generation = generation
            self._rules.on_launch(self._now(), tuple(rank for _, rank in running))
        for alarm in self._rules.tick(self._now()) if running else ():
            self._send_alarm(alarm)
        for feed in self._feeds.values():
            waited_s, limits = now - (feed.asked_at or now), self._spec.settings.health
            late = waited_s > (driver_deadline_s(limits) if feed.name == _GPUS else limits.deadline_s)
            self._send_alarm(self._stuck_alarm(feed, feed.stuck, waited_s if late else 0.0))
            if feed.thread and not feed.thread.is_alive() and not feed.absent:
                self._send_alarm(self._stuck_alarm(feed, "source.broken", 1.0))

    def _find_peak(self) -> float:
        ranks, told = self._spec.nproc, self._spec.settings.pace.peak_flops
        if told:
            return ranks * told
        running = [held.pid for held in self._ties.list_ranks() if held.code is None]
        peak = peak_of_ranks(ranks, ranks * len(self._host_nodes()), self._gpu_models, self._gpu_peaks)
        return peak if peak and running and all(procfs.computes_on_gpu(pid, self._root) for pid in running) else 0.0

    def _stuck_alarm(self, feed: SourceFeed, gauge: str, value: float) -> Alarm | None:
        nodes = self._host_nodes() if value and feed.name == _GPUS else (self._spec.node,)
        return self._health.on_gauge(Gauge(name=gauge, of=feed.name, value=value, at=self._now()), nodes)

    def _send_alarm(self, alarm: Alarm | None) -> None:
        if alarm and (passed := self._flood.admit_alarm(self._clock.monotonic(), alarm)):
            _log.warning("%s (%s): %s", alarm.kind, alarm.stance, passed.reason)
            self._ties.noticed(passed)

    def _make_owned(self, feed: SourceFeed) -> MachineUse:
        suspects = self._host_nodes()
        return MachineUse(
            node=self._spec.node,
            suspects=suspects,
            speaks=self._alone or self._speaker is not None,
            gpus=self._gpus,
            disks=self._host.disks if self._host else frozenset(),
            ranks={held.pid: held.rank_key.rank for held in self._ties.list_ranks() if self._knows_pids},
            bereaved=feed.name == _KERNEL and self.kills.has_recent(),
            elsewhere=self._rank_pids() if feed.name == _KERNEL and len(suspects) > 1 else frozenset(),
        )

    def _rank_pids(self) -> frozenset[int]:
        """Return the pids of this generation's ranks, including those of other nodes that share the log folder."""
        files = Path(self._spec.log_dir).glob(f"gen-{self._generation}/rank-*/pid")
        return frozenset(int(text) for path in files if (text := _read_text(path).strip()).isdecimal())

    def _host_nodes(self) -> tuple[str, ...]:
        """Return the nodes of this run on this host; an alarm about the host concerns all of them."""
        if self._alone:
            return (self._spec.node,)
        here = socket.gethostname()
        found = {path.parent.name for path in self._dir.parent.glob("*/lock") if _read_text(path) == here}
        alive = {name for name in found if (self._dir.parent / name / "holder.pid").exists()}
        return tuple(sorted(alive | {self._spec.node}))


def _lock_file(path: Path) -> int | None:
    """Lock a file until this process ends; return its fd, or None if another process holds the lock. Return -1 if
    locking fails: the caller then acts as if it had the lock, because all nodes may report, but not none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        return None if isinstance(e, BlockingIOError) else -1
    return fd


def _read_text(path: Path) -> str:
    try:
        return read_start(path, _SHORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
