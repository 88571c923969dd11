"""The web page's view of a job: one value, folded from the journal, for the live page and for a page in one file."""

from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import msgspec

from holdfast.core.incident.incident_text import count_failures
from holdfast.core.record.incident_story import IncidentStory, StoryFold
from holdfast.core.record.job_account import Account, Span, TimeUse
from holdfast.core.record.job_report import report_of
from holdfast.core.record.ledger import Ledger
from holdfast.core.record.lost_time_bill import Bill, draw_bill
from holdfast.core.record.named_ranks import NamedRanks, RankNaming
from holdfast.core.record.node_history import NodeHistory, NodeStory, ProbeResult
from holdfast.core.record.open_trouble import OpenIncident
from holdfast.core.record.page_lateness import HeldLateness
from holdfast.core.record.page_rows import (
    PageChange,
    PageIncident,
    PageSpan,
    show_change,
    show_incident,
    show_span,
)
from holdfast.core.record.release_pace import ReleasePace, describe_paces
from holdfast.model.action import Launch, Stage
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, MeshReport, Order, Progress
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Dims, Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.stored_checkpoint_report import StorageReport

_POINTS = 1200  # of the curve; of twice as many, every second one stays
_STORAGE = 50  # reports of checkpoints, the newest
_RECENT_S = 120.0  # over which the present pace is measured
_GOOD = (TimeUse.TRAIN, TimeUse.REDO)


class PagePoint(msgspec.Struct, frozen=True, array_like=True):
    """One report of progress."""

    at: float
    step: int
    loss: float | None
    generation: int


class PageNode(msgspec.Struct, frozen=True, array_like=True):
    node: str
    role: str
    first_rank: int
    nproc: int
    host: str
    near: tuple[str, ...]
    alarms: int
    incidents: int
    last: str
    lag: int  # steps behind the furthest node, of a job that runs; 0: none, or not known
    phase: str  # what its ranks do when they do not train
    probes: tuple[ProbeResult, ...]  # the newest


class PageRelease(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    source: str
    who: str
    message: str
    at: float
    argv: tuple[str, ...]
    steps: int = 0
    redone: int = 0
    pace: str = ""


class PageHead(msgspec.Struct, frozen=True, kw_only=True):
    """The figures and sentences at the top of the page."""

    run_id: str
    phase: str
    now: str  # what happens, in one sentence
    since: float  # when that began
    watched: bool  # a controller tells more than the journal does
    over: bool
    code: int | None
    start_at: float
    end_at: float
    job_s: float
    step: int
    counted: str  # what steps are counted from; "": they have numbers of their own
    generation: int
    ranks: int
    mesh: Dims
    ettr: float | None
    hour_ettr: float | None
    at_most: str
    mttr_s: float | None
    lost_s: float
    incidents: int
    failures: int
    open_incident: int  # 0: none is open
    changes: int
    recent_steps_s: float | None  # of the last minutes; None: not known
    pace: ReleasePace | None  # steady, of the newest release
    loss: float | None
    redone: int
    storage: StorageReport | None
    roles: dict[str, int]
    said: dict[str, Any]  # of a live job: slow, floor, copies, disk, behind, held, asking, asks_until, waiting


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    head: PageHead
    causes: tuple[tuple[str, float], ...]  # of lost time, the largest first
    uses: tuple[tuple[str, float], ...]
    spans: tuple[PageSpan, ...]
    curve: tuple[PagePoint, ...]
    incidents: tuple[PageIncident, ...]
    opened: OpenIncident | None  # that has no record yet
    changes: tuple[PageChange, ...]
    nodes: tuple[PageNode, ...]
    named: tuple[RankNaming, ...]  # ranks of the newest launch
    releases: tuple[PageRelease, ...]
    paces: tuple[str, ...]
    stored: tuple[StorageReport, ...]
    orders: tuple[tuple[float, str, str], ...]
    job: Job | None
    limits: Limits | None
    opinions: tuple[str, ...]
    lateness: tuple[str, ...]  # of a live job, in rows of 64 ranks: a change sends the rows that changed


class PageFold:
    """Takes journal entries one by one; `make_view` may be called at any time."""

    def __init__(self) -> None:
        self.ledger, self.stories, self.history = Ledger(), StoryFold(), NodeHistory()
        self.named = NamedRanks()
        self.seq = 0
        self._job: Job | None = None
        self._limits: Limits | None = None
        self._mesh: Dims = ()
        self._points: list[PagePoint] = []
        self._newest: deque[PagePoint] = deque()  # of this generation, in the last minutes
        self._every, self._skipped = 1, 0
        self._stored: list[StorageReport] = []
        self._orders: list[tuple[float, str, str]] = []
        self._releases: dict[int, tuple[float, Release]] = {}
        self._reason = ""
        self._lateness = HeldLateness()

    def add(self, entry: Entry) -> None:
        self.seq = entry.seq
        self.ledger.add(entry)
        self.stories.add(entry)
        self.history.add(entry)
        self.named.add(entry)
        self._reason = entry.decision.reason or self._reason
        match entry.event:
            case Progress():
                self._add_point(entry.event)
            case Begin(job=job, limits=limits, release=release):
                self._job, self._limits, self._mesh = job, limits, job.mesh
                self._releases[release.number] = entry.at, release
            case MeshReport(mesh=mesh):
                self._mesh = self._mesh or mesh
            case StorageReport():
                self._stored = [*self._stored[1 - _STORAGE :], entry.event]
            case Order(verb=verb, who=who, node=node):
                self._orders.append((entry.at, who, f"{verb} {node}".strip()))
        for action in entry.decision.actions:
            if isinstance(action, Launch | Stage) and action.release.number:
                self._releases.setdefault(action.release.number, (entry.at, action.release))

    def _add_point(self, event: Progress) -> None:
        point = PagePoint(event.at, event.step, event.loss, event.generation)
        while self._newest and (
            self._newest[0].at < event.at - _RECENT_S or self._newest[0].generation != event.generation
        ):
            self._newest.popleft()
        self._newest.append(point)
        self._skipped += 1
        same = self._points and self._points[-1].generation == event.generation
        if same and self._skipped < self._every:
            return
        self._skipped = 0
        self._points.append(point)
        if len(self._points) >= 2 * _POINTS:
            self._points, self._every = self._points[::2], 2 * self._every

    def make_view(self, now: float | None, status: dict[str, Any] | None = None, absence: str = "") -> PageView:
        """Return the view. `now` extends the view beyond the last entry of a job that still runs. `status` is the
        report of the job's controller, and `absence` the reason why there is no controller."""
        account = self.ledger.make_account(now)
        report = report_of(account)
        bill = draw_bill(report)
        live = {node["node"]: node for node in (status or {}).get("nodes", ())}
        front = max((node["step"] for node in live.values()), default=-1)
        nodes = tuple(_show_node(story, live.get(name, {}), front) for name, story in self.history.nodes.items())
        paces = {pace.release: pace for pace in account.paces}
        return PageView(
            head=self._make_head(account, bill, nodes, status or {}, absence),
            causes=tuple(sorted(bill.causes.items(), key=lambda cause: -cause[1])),
            uses=tuple((use.value, spent) for use in TimeUse if (spent := account.spent_s(use)) > 0),
            spans=tuple(map(show_span, account.spans)),
            curve=tuple(self._points if self._is_shown() else [*self._points, self._newest[-1]]),
            incidents=tuple(show_incident(record, bill) for record in account.incidents),
            opened=account.standing.incident,
            changes=tuple(show_change(change, bill, number) for number, change in enumerate(account.changes, 1)),
            nodes=nodes,
            named=self.named.namings,
            releases=tuple(self._show_releases(account, paces)),
            paces=describe_paces(account.paces),
            stored=tuple(self._stored),
            orders=tuple(self._orders[-_STORAGE:]),
            job=self._job,
            limits=self._limits,
            opinions=account.opinions,
            lateness=self._lateness.hold(now, str((status or {}).get("lateness", ""))),
        )

    def tell_story(self, number: int) -> IncidentStory | None:
        """Return the story of an incident, which may still be open; None if there is no such incident."""
        if number == len(self.ledger.incidents) + 1:
            return self.stories.tell_open(number)
        return self.stories.stories.get(number)

    def find_releases(self, number: int) -> tuple[Release, Release] | None:
        """Return a release and the one before it, older first; None if there is no such pair."""
        before = max((known for known in self._releases if known < number), default=0)
        if number not in self._releases or not before:
            return None
        return self._releases[before][1], self._releases[number][1]

    def _is_shown(self) -> bool:
        """Return whether the newest progress point is already on the page's curve."""
        return not self._newest or (bool(self._points) and self._points[-1] is self._newest[-1])

    def _make_head(
        self, account: Account, bill: Bill, nodes: tuple[PageNode, ...], status: dict[str, Any], absence: str
    ) -> PageHead:
        ended = f"ended with code {account.code}: {account.ending}" if account.phase is Phase.DONE else absence
        opened, now_open = self.stories.tell_open(0) is not None, account.standing.incident
        stands = {"held": account.standing.held, "asking": account.standing.asking} | status
        stands["slow"] = stands.get("slow") if stands.get("slows") else ""
        told = "slow floor copies disk behind held asking asks_until waiting waiting_until queued".split()
        return PageHead(
            run_id=self._job.run_id if self._job else "",
            phase=account.phase,
            now=str(status.get("now", "")) or ended or self._reason or "training",
            since=_stretch_start(account.spans, account.start_at),
            watched=bool(status),
            over=account.phase is Phase.DONE,
            code=account.code,
            start_at=account.start_at,
            end_at=account.end_at,
            job_s=account.job_s,
            step=max(account.step, status.get("step", -1)) if account.phase is Phase.TRAINING else account.step,
            counted=account.since,
            generation=account.generation,
            ranks=sum(story.nproc for story in self.history.nodes.values() if story.first_rank >= 0),
            mesh=self._mesh,
            ettr=account.ettr,
            hour_ettr=account.hour_ettr,
            at_most=account.at_most,
            mttr_s=account.mttr_s,
            lost_s=bill.lost_s,
            incidents=len(account.incidents) + opened,
            failures=count_failures(account.incidents) + (now_open.failures if now_open else 0),
            open_incident=len(account.incidents) + 1 if opened else 0,
            changes=len(account.changes),
            recent_steps_s=self._measure_pace(),
            pace=account.paces[-1] if account.paces else None,
            loss=self._newest[-1].loss if self._newest else None,
            redone=sum(ran.redone for ran in account.ran),
            storage=account.storage,
            roles=_count_roles(nodes),
            said={name: stands[name] for name in told if stands.get(name) not in (None, "", 0, -1, {})},
        )

    def _measure_pace(self) -> float | None:
        """Return the steps per second of the last minutes of this generation; None if they are not known."""
        if len(self._newest) < 2 or self.ledger.phase is not Phase.TRAINING:
            return None
        first, last = self._newest[0], self._newest[-1]
        return (last.step - first.step) / (last.at - first.at) if last.at > first.at else None

    def _show_releases(self, account: Account, paces: dict[int, ReleasePace]) -> Iterable[PageRelease]:
        made = {ran.release: ran for ran in account.ran}
        for number, (at, release) in sorted(self._releases.items()):
            ran = made.get(number)
            yield PageRelease(
                number=number,
                source=release.source,
                who=release.who,
                message=release.message,
                at=at,
                argv=release.argv,
                steps=ran.steps if ran else 0,
                redone=ran.redone if ran else 0,
                pace=describe_paces((paces[number],))[0] if number in paces else "",
            )


def _stretch_start(spans: tuple[Span, ...], start_at: float) -> float:
    """Return when the present stretch of training began or, if the job is not training, when it stopped training."""
    if not spans:
        return start_at
    good = spans[-1].use in _GOOD
    *_, first = takewhile(lambda span: (span.use in _GOOD) is good, reversed(spans))
    return first.start_at


def _count_roles(nodes: Iterable[PageNode]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in nodes:
        found[node.role] = found.get(node.role, 0) + 1
    return found


def _show_node(story: NodeStory, live: dict[str, Any], front: int) -> PageNode:
    """Return a node as the page shows it. `live` is the controller's report of it, `front` the job's furthest step."""
    return PageNode(
        node=story.node,
        role=str(live.get("role", "")) or story.role,
        first_rank=story.first_rank,
        nproc=story.nproc,
        host=story.host,
        near=story.near,
        alarms=story.alarms,
        incidents=story.incidents,
        last=story.last,
        lag=max(0, front - live["step"]) if live.get("step", -1) >= 0 else 0,
        phase=str(live.get("phase", "") or live.get("reason", "")),
        probes=tuple(story.probes),
    )
