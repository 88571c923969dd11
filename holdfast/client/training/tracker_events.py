"""Adds the job's incidents, restarts and ETTR to what a script logs to W&B, MLflow or TensorBoard.

The node writes the figures to a file. The script's logging calls look at that file at most once a second, and give new
figures to the tracker that they log to. A call delivers the figures itself if this takes microseconds. Otherwise it
starts a thread, which ends after the delivery. Nothing here imports a tracker, waits for one, or raises.
"""

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from holdfast.wire.progress_environment import FIGURES, GENERATION, TRACKERS

Found = TypeVar("Found")

WANDB, MLFLOW, BOARD = "W&B", "MLflow", "TensorBoard"
INCIDENT = "holdfast/incident"
_LOOK_S, _REST_S = 1.0, 60.0
_LAST_S = 3.0  # that the end of a script's run may wait for the incident before it: a beat, and another
_ASK_S = 0.05
_FLUSH_AFTER_S = 0.5  # writers queue what they are given
_TITLE = "holdfast: incident {}"


def attempt(deed: Callable[[], Found], otherwise: Found) -> Found:
    """Call `deed` and return its result, or `otherwise` if it raises anything. So the script's own call goes on."""
    try:
        return deed()
    except Exception:
        return otherwise


class Figures(NamedTuple):
    """The job's figures for a tracker, with the incidents that this tracker does not have yet."""

    version: int
    metrics: dict[str, float]
    incidents: dict[int, str]  # by number


class TrackerEvents:
    """Delivers the job's figures to the trackers of this rank. If the script has several runs of a tracker, only the
    first run that logs gets the figures."""

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._path, self._clock = folder, os.path.join(folder, FIGURES), clock
        self._pid = os.getpid()
        self._used: list[str] = []
        self._sinks: dict[str, Callable[[], object]] = {}  # weak references, by tracker
        self._look_at, self._version = 0.0, 0
        self._told: dict[str, Any] = {}  # the file, as it was at `_version`
        self._delivered: dict[str, int] = {}  # version, by tracker
        self._incidents: dict[str, set[int]] = {}  # that each tracker has
        self._rest_until: dict[str, float] = {}  # trackers that could not be reached
        self._thread: threading.Thread | None = None
        self.mlflow_step = 0  # newest that the script logged
        self.board_step: object = None

    def find_due(self, tracker: str, sink: object) -> Figures | None:
        """Return the figures that this run or writer should get now; None if there are no new ones."""
        if os.getpid() != self._pid:
            return None  # a child of the rank, such as one that loads data
        if tracker not in self._used:
            self._announce_use(tracker)
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._read_file()
        if not self._is_first(tracker, sink) or now < self._rest_until.get(tracker, 0.0):
            return None
        return self._list_new(tracker)

    def find_last(self, tracker: str, sink: object) -> Figures | None:
        """Return the figures that this run or writer should get at its end; None if there are no new ones. After a
        restart, wait up to three seconds for the sentence about the incident, as it comes a moment after the first
        step."""
        if os.getpid() != self._pid or tracker not in self._used or not self._is_first(tracker, sink):
            return None
        until = time.monotonic() + _LAST_S
        self._read_file()
        while self._is_later and (self._is_stale or self._told.get("open")) and time.monotonic() < until:
            time.sleep(_ASK_S)
            self._read_file()
        return self._list_new(tracker)

    def _list_new(self, tracker: str) -> Figures | None:
        if self._delivered.get(tracker, 0) == self._version or self._is_stale:
            return None
        known = self._incidents.setdefault(tracker, set())
        told = self._told
        metrics = {f"holdfast/{name}": told[name] for name in ("incidents", "restarts", "lost_s", "ettr")}
        return Figures(
            self._version,
            {name: float(value) for name, value in metrics.items() if value is not None},
            {note["number"]: note["text"] for note in told["notes"] if note["number"] not in known},
        )

    def mark_delivered(self, tracker: str, figures: Figures) -> None:
        self._delivered[tracker] = figures.version
        self._incidents[tracker] |= figures.incidents.keys()

    def finish_delivery(self, tracker: str, figures: Figures, deliver: Callable[[], object]) -> None:
        """Deliver figures in a thread, like `start_delivery`, and wait for it and for an earlier one for a bounded
        time."""
        for _ in range(2):
            if self._thread is not None:
                self._thread.join(_LAST_S)
            if self._delivered.get(tracker) != figures.version:
                self.start_delivery(tracker, figures, deliver)

    def start_delivery(self, tracker: str, figures: Figures, deliver: Callable[[], object]) -> None:
        """Deliver figures in a thread beside training; do nothing while an earlier delivery runs. After a failure, a
        later call delivers the newest figures again."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.mark_delivered(tracker, figures)

        def run() -> None:
            try:
                deliver()
            except Exception:  # the run is over, or its server is away
                self._rest_until[tracker] = self._clock() + _REST_S
                self._incidents[tracker] -= figures.incidents.keys()
                self._delivered[tracker] = -1

        self._thread = threading.Thread(target=run, name="holdfast-tracker", daemon=True)
        self._thread.start()

    @property
    def _is_stale(self) -> bool:
        """Return whether the figures were made for an earlier generation than this process is of, or there are none."""
        told: int = self._told.get("generation", -1)
        return told < int(os.environ.get(GENERATION, "0"))

    @property
    def _is_later(self) -> bool:
        return int(os.environ.get(GENERATION, "0")) > 1

    def _is_first(self, tracker: str, sink: object) -> bool:
        first = self._sinks[tracker]() if tracker in self._sinks else None
        if first is None and sink is not None:
            self._sinks[tracker], first = weakref.ref(sink), sink
        return first is sink

    def _read_file(self) -> None:
        try:
            version = os.stat(self._path).st_mtime_ns
        except OSError:
            return
        if version != self._version:
            with open(self._path, "rb") as file:
                self._told = json.load(file)
            self._version = version

    def _announce_use(self, tracker: str) -> None:
        """Write to a file beside the keeper's socket that this rank uses a tracker; the node reads the file."""
        self._used.append(tracker)
        place = os.path.join(self._folder, TRACKERS)
        whole = f"{place}.{self._pid}"
        with open(whole, "w", encoding="utf-8") as file:
            file.write(" and ".join(self._used))
        os.replace(whole, place)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def log_with_figures(events: TrackerEvents, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments for W&B's `Run.log`, with the job's figures added to the script's row. In a separate row the
    figures would advance W&B's count of steps."""
    run = args[0]
    if (figures := events.find_due(WANDB, run)) is None:
        return args, kwargs
    step = kwargs.get("step", args[2] if len(args) > 2 else None)
    row = kwargs.get("data", args[1] if len(args) > 1 else None)
    if not isinstance(row, Mapping) or (isinstance(step, int) and step < getattr(run, "step", 0)):
        return args, kwargs  # W&B leaves such a row out
    texts = [f"incident {number}: {text}" for number, text in figures.incidents.items()]
    row = {**row, **figures.metrics} | ({INCIDENT: "; ".join(texts)} if texts else {})
    events.mark_delivered(WANDB, figures)
    if texts:
        events.start_delivery(WANDB, figures, lambda: _alert(run, figures.incidents))
    return (args, kwargs | {"data": row}) if "data" in kwargs else ((run, row, *args[2:]), kwargs)


def _alert(run: Any, incidents: Mapping[int, str]) -> None:
    for number, text in incidents.items():
        run.alert(title=_TITLE.format(number), text=text, level="WARN")


def end_wandb(events: TrackerEvents, run: Any) -> None:
    """Put the last figures into the summary of a W&B run that ends, as a row would be one more step."""
    if (figures := events.find_last(WANDB, run)) is None:
        return
    events.mark_delivered(WANDB, figures)
    texts = [f"incident {number}: {text}" for number, text in figures.incidents.items()]
    run.summary.update(figures.metrics | ({INCIDENT: "; ".join(texts)} if texts else {}))
    _alert(run, figures.incidents)


def add_to_mlflow(events: TrackerEvents, fluent: ModuleType, run_id: str | None, step: object) -> None:
    """Log the job's figures to the run `run_id`, to which the script has just logged, or else to the active run."""
    # Runs are known by their ids; each call makes another object. The first thread that logs is the one that trains.
    if (figures := events.find_due(MLFLOW, fluent)) is None:
        return
    events.mlflow_step = step if isinstance(step, int) else 0
    if deliver := _make_batch(fluent, run_id, figures, events.mlflow_step):
        events.start_delivery(MLFLOW, figures, deliver)


def end_mlflow(events: TrackerEvents, fluent: ModuleType) -> None:
    """Log the last figures to the active run of MLflow, which ends."""
    figures = events.find_last(MLFLOW, fluent)
    if figures and (deliver := _make_batch(fluent, None, figures, events.mlflow_step)):
        events.finish_delivery(MLFLOW, figures, deliver)


def _make_batch(fluent: ModuleType, run_id: str | None, figures: Figures, step: int) -> Callable[[], object] | None:
    """Return a function that logs figures to this run, or else to the active run; None if there is neither."""
    run = None if run_id else fluent.active_run()
    run_id = run_id or (run.info.run_id if run else None)
    if run_id is None:
        return None
    entities, at_ms = sys.modules["mlflow.entities"], int(time.time() * 1000)
    metrics = [entities.Metric(name, value, at_ms, step) for name, value in figures.metrics.items()]
    tags = [entities.RunTag(f"holdfast.incident.{n}", text) for n, text in figures.incidents.items()]
    client = fluent.MlflowClient
    return lambda: client().log_batch(run_id, metrics=metrics, tags=tags)


def add_to_board(events: TrackerEvents, plain: Callable[..., Any], writer: Any, step: object) -> None:
    """Write the job's figures to the script's own event file, as scalars and text, at the step that the script logs."""
    events.board_step = step
    if (figures := events.find_due(BOARD, writer)) is None:
        return
    _write_board(events, figures, plain, writer)
    if hasattr(writer, "flush"):
        _flush_later(weakref.ref(writer))


def end_board(events: TrackerEvents, plain: Callable[..., Any], writer: Any) -> None:
    """Write the last figures to a writer that the script closes."""
    if figures := events.find_last(BOARD, writer):
        _write_board(events, figures, plain, writer)


def _write_board(events: TrackerEvents, figures: Figures, plain: Callable[..., Any], writer: Any) -> None:
    events.mark_delivered(BOARD, figures)
    for name, value in figures.metrics.items():
        plain(writer, name, value, events.board_step)
    for number, text in figures.incidents.items():
        writer.add_text(INCIDENT, f"incident {number}: {text}", events.board_step)


def _flush_later(found: Callable[[], Any]) -> None:
    """Have a thread flush the writer; else a rank that is killed within the writer's two minutes takes all with it."""

    def run() -> None:
        time.sleep(_FLUSH_AFTER_S)
        if (writer := found()) is not None:
            attempt(writer.flush, None)  # the script may have closed it

    threading.Thread(target=run, name="holdfast-flush", daemon=True).start()
