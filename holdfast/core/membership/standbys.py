"""The nodes that are not seated: waiting standbys, nodes on their way, and nodes that must not come back."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from holdfast.core.membership.fleet_states import FleetStates
from holdfast.core.membership.host_blocking import HostFaults
from holdfast.core.rank_ranges import format_nodes
from holdfast.model.action import Acquire, Block, Dismiss, Dismissal, Probe, Say
from holdfast.model.decider_events import Outcome, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.job_and_seats import Job

# Levels of the probes: of a node that the job waits for, of a standby, and of an evicted node that may come back.
BRIEF, CHECK, EXAMINATION = 1, 2, 3
_IN_A_ROW = 3  # nodes that fail their check, and nobody passes: it is not the nodes
RETRY_S = 10.0  # before a fleet that gave too few nodes is asked again
LONGEST_RETRY_S = 300.0  # and at most, if it refuses, or what it gives ends at once: each time twice as long
_LONGEST = 32  # times ready_s: no fleet is given longer for a node
_FOUND_WELL = "examined: nothing is wrong with it, and another has its place"


class Standbys:
    """The unseated nodes, as part of the job's state. Methods return the actions that they require."""

    def __init__(self, job: Job, limits: Limits, ids: Iterator[int]) -> None:
        self.job = job
        self.limits = limits
        self.pool: dict[str, Ready] = {}  # ready, not seated
        self.coming: dict[str, float] = {}  # acquired, and when; not heard of yet
        self.acquiring: dict[int, int] = {}  # Acquire without outcome: how many
        self.gone: dict[str, Kind | None] = {}  # released, and for which kind of alarm if for any
        self.departures: dict[str, str] = {}  # of these, why each has left
        self.unseated: set[str] = set()  # of these, who had no seat: standbys, and nodes that came or were coming
        self.examined: dict[int, str] = {}  # Probe without outcome: an evicted node that may come back
        self.suspects: dict[str, int] = {}  # evicted nodes yet to be examined, and the generation they were in
        self._linkless: dict[str, float] = {}  # of these, who has no link, and until when that is waited for
        self.checking: dict[int, str] = {}  # Probe without outcome: a node that has come, or a standby that waits
        self._failed = 0  # checks in a row
        self._checked: dict[str, float] = {}  # standbys, and when they are to be probed again
        self._met: dict[str, Ready] = {}
        self._arrived: dict[str, float] = {}  # when each has last reported as new or back
        self._evicted: set[str] = set()  # once before
        self._returned: set[str] = set()  # had fallen silent, are back, and are checked first
        self._turned_away: set[str] = set()  # told on the console that they may not return
        self._ids = ids
        self.faults = HostFaults(ids)
        self.fleet = FleetStates(limits.leave_s)
        self._retry_at: float | None = None
        self._pause_s = RETRY_S  # of the next pause that `pause_requests` makes
        self._patience_s = limits.ready_s  # as long as a node that was asked for may take; longer with a slow fleet
        self._came = False  # one that was asked for, since others were last given back as late

    @property
    def _is_checking_on(self) -> bool:
        return self.job.checks and self._failed < _IN_A_ROW

    @property
    def under_examination(self) -> set[str]:
        """Return the evicted nodes that are being examined or are about to be."""
        return {*self.suspects, *self.examined.values()}

    @property
    def under_probe(self) -> set[str]:
        """Return the unseated nodes that are being probed or are about to be."""
        return self.under_examination.union(self.checking.values())

    @property
    def hosts(self) -> dict[str, str]:
        return {node: ready.host for node, ready in self._met.items()}

    @property
    def queued(self) -> dict[str, str]:
        """Return the nodes that wait in the fleet's queue, each with the cluster's reason."""
        queued = {node for node in self.fleet.nodes if self.fleet.is_queued(node)}  # few, or none, of many that come
        return {node: self.fleet.nodes[node].reason for node in self.coming if node in queued} if queued else {}

    @property
    def patience_s(self) -> float:
        """Return how many seconds a requested node may take to arrive, as learned from earlier ones."""
        return self._patience_s

    @property
    def wanted_nodes(self) -> int:
        return self.job.max_nodes + self.job.standbys

    def request_missing(self, active: int, without_links: Set[str] = frozenset()) -> tuple[Acquire, ...]:
        """Return an action that asks the fleet for missing nodes, if any. A standby without its link does not count."""
        missing = self.count_missing(active, without_links)
        if missing <= 0 or self._retry_at is not None:
            return ()
        action = Acquire(id=next(self._ids), count=missing)
        self.acquiring[action.id] = action.count
        return (action,)

    def count_missing(self, active: int, without_links: Set[str] = frozenset()) -> int:
        """Return how many more nodes to ask the fleet for. Return 0 or less if no node is missing or the fleet cannot
        acquire nodes."""
        checked = set(self.checking.values()).difference(self.pool)
        linked = len(self.pool) + len(checked) - sum(node in self.pool or node in checked for node in without_links)
        have = active + linked
        have += len(self.coming) + sum(self.acquiring.values())
        return self.wanted_nodes - have if self.job.can_acquire else 0

    def on_acquired(self, now: float, event: Outcome, active: Set[str]) -> str:
        asked = self.acquiring.pop(event.action)
        # One that is up already may have reported before this outcome, or even left again.
        here = {*self.pool, *self.under_probe, *self.gone, *active}
        new = [n for n in event.nodes if n not in here]
        self.coming.update(dict.fromkeys(new, now))
        if not event.ok or len(event.nodes) < asked:
            self._retry_at = now + RETRY_S
        if not event.nodes:
            return f"the fleet gave no nodes: {event.detail or 'it did not say why'}"
        return f"the fleet gave {len(event.nodes)} of {asked}" + (f", {format_nodes(new)} will come" if new else "")

    def take_report(self, now: float, nodes: Mapping[str, FleetNode]) -> None:
        """Record the fleet's report. The deadline of a node that has just got a machine counts from now."""
        for node, seen in nodes.items():
            waited = node not in self.fleet.nodes or self.fleet.is_queued(node)
            if node in self.coming and waited and seen.state is not FleetState.QUEUED:
                self.coming[node] = now
        self.fleet.take_report(now, nodes)

    def pause_requests(self, now: float) -> float:
        """Request no nodes for a while. Return how long: twice as long each time, until a node comes."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_RETRY_S)
        self._retry_at = now + pause_s
        return pause_s

    def on_arrival(self, now: float, node: str) -> None:
        """Note how long a new node took to report. Later nodes get twice that time, but at least `ready_s`."""
        if node not in self.under_probe:
            self._arrived[node] = now
        if node not in self._met and node not in self.gone:
            took_s = now - self.coming.get(node, now)
            self._came, self._patience_s = True, max(self.limits.ready_s, 2 * took_s)
            self._pause_s, self.fleet.last_word = RETRY_S, ""

    def may_return(self, node: str) -> bool:
        """Return whether this node may join the job. A node that has left may not join again, with one exception: if
        the fleet cannot acquire nodes, a node that left because it fell silent may come back."""
        return node not in self.gone or (not self.job.can_acquire and self.gone[node] is Kind.SILENCE)

    def on_ready(self, event: Ready, level: int) -> tuple[Dismiss | Probe | Say, ...]:
        """Make a new node a standby, or probe it first if `level` is above 0. Dismiss a node that may not return."""
        node = event.node
        self.coming.pop(node, None)
        if not self.may_return(node):
            return self._turn_away(node)
        returns = node in self.gone
        self.gone.pop(node, None)
        self._met[node] = event
        self.fleet.doubt_gone(node)
        if node in self.under_probe:
            return ()
        self.faults.on_accepted(event)
        if level and self._is_checking_on and node not in self.pool:
            self._returned |= {node} if returns else set()
            told = (Say(text=f"{node} is back, and is checked before it may have ranks again"),) if returns else ()
            return (*told, self._start_check(node, level))
        self.pool[node] = event
        return (Say(text=f"{node} is back, and may have ranks again"),) if returns else ()

    def _turn_away(self, node: str) -> tuple[Dismiss | Say, ...]:
        """Dismiss a node that has left the job before. The console tells of each node once."""
        why = "it had left the job before"
        dismiss = Dismiss(id=next(self._ids), node=node, reason=why, cause=Dismissal.REFUSED)
        known = node in self._turned_away
        self._turned_away.add(node)
        late = f"{node} came after it had been given back, and is not taken"
        said = f"{node} is back, and is not taken again: {why}" if node in self._met else late
        return (dismiss,) if known else (dismiss, Say(text=said))

    def _start_check(self, node: str, level: int) -> Probe:
        action = Probe(id=next(self._ids), generation=0, nodes=(node,), level=level)
        self.checking[action.id] = node
        return action

    def on_checked(self, now: float, event: Outcome) -> tuple[str, tuple[Dismiss | Say, ...]]:
        """Make a checked node a standby, or dismiss it if it failed.

        If several nodes in a row fail, the check itself is at fault: no further nodes are checked.
        """
        node = self.checking[event.action]
        if node not in self._met or node in self.gone:
            del self.checking[event.action]
            return "", ()
        why = event.failed.get(node, "" if event.ok else event.detail)
        untested = node in event.untested
        self._failed = self._failed + 1 if why else self._failed if untested else 0
        returned = node in self._returned
        self._returned.discard(node)
        if why and self._failed < _IN_A_ROW:
            reason = f"failed its check: {why}"
            found, dismissed = f"{node} {reason}", self.dismiss_node(node, Kind.CRASH, reason, Dismissal.EVICTED)
            told = f"after its return: {found}" if returned else found
            return found, (*dismissed, Say(text=f"{told}; it gets no ranks", standbys=(node,)))
        del self.checking[event.action]
        self.pool[node] = self._met[node]
        self._checked[node] = now + self.limits.recheck_s
        if why:
            said = f"{self._failed} nodes in a row failed their check, so standbys are not checked any more: {why}"
            return said, (Say(text=said),)
        found = f"{node} {'is' if untested else 'passed its check and is'} a standby"
        found += f", unchecked: {event.detail}" if untested else ""
        told = f"after its return: {found}" if returned else found
        return found, (Say(text=told),) if returned or untested else ()

    @property
    def awaiting_checks(self) -> dict[str, float]:
        """Return the nodes that may have ranks once their checks have ended, and since when they are checked."""
        return {node: self._arrived[node] for node in self.checking.values() if node not in self.pool}

    def take_unchecked(self, nodes: Collection[str], stood_s: float) -> tuple[Say, ...]:
        """Make these nodes standbys, though their checks have not ended. What the checks still find is ignored."""
        for node in nodes:
            self.admit_node(node)  # it leaves its check, as any standby that gets a seat does
            self.pool[node] = self._met[node]
        told = f"the job has stood for {stood_s:.0f} s, and {format_nodes(nodes)} could not be checked in this time"
        return (Say(text=f"{told}: {'it gets' if len(nodes) == 1 else 'they get'} ranks unchecked"),)

    def recheck_due(self, now: float) -> tuple[Probe, ...]:
        """Return probes of the standbys whose last check is too old or missing."""
        if not self._is_checking_on or not self.limits.recheck_s:
            return ()
        busy = set(self.checking.values())
        due = [node for node in sorted(self.pool) if node not in busy and self._checked.get(node, 0.0) <= now]
        return tuple(self._start_check(node, CHECK) for node in due)

    def admit_node(self, node: str) -> None:
        """Remove a node that is now seated from the standbys and ignore any probe still running on it."""
        self.pool.pop(node, None)
        self._checked.pop(node, None)
        self._returned.discard(node)
        for id in [id for id, other in self.checking.items() if other == node]:
            del self.checking[id]

    def unseat_node(self, node: str) -> None:
        """Make a seated node a standby, because the job goes on without its seat."""
        self.pool[node] = self._met[node]

    def evict_node(
        self, node: str, kind: Kind, generation: int, *, examine: bool, drained: bool = False
    ) -> tuple[Dismiss, ...]:
        """Dismiss a seated node. At a node's first eviction, with `examine`, keep the node for an examination instead,
        after which it may be a standby. A silent node is never kept."""
        again = node in self._evicted
        self._evicted.add(node)
        if kind is Kind.SILENCE or again or not examine or not self.job.probes:
            cause = Dismissal.DRAINED if drained else self.fleet.dismissal_of(node)
            return self.dismiss_node(node, kind, "evicted", cause)
        self.suspects[node] = generation
        return ()

    def examine_evicted(self, without_links: Set[str]) -> tuple[Probe, ...]:
        """Return probes that examine the evicted nodes.
        A node whose link is down is examined once the link is up, as a probe of one node alone cannot test the link."""
        actions = []
        for node in [node for node in self.suspects if node not in without_links]:
            generation = self.suspects.pop(node)
            actions.append(Probe(id=next(self._ids), generation=generation, nodes=(node,), level=EXAMINATION))
            self.examined[actions[-1].id] = node
        return tuple(actions)

    def linkless_suspects(self, now: float, without_links: Set[str]) -> tuple[str, ...]:
        """Return the evicted nodes whose examination has been impossible for too long, because their links are down."""
        waiting = [node for node in self.suspects if node in without_links]
        self._linkless = {node: self._linkless.get(node, now + self.limits.wait_s) for node in waiting}
        return tuple(sorted(node for node, until in self._linkless.items() if until <= now))

    def on_examined(self, now: float, event: Outcome) -> tuple[str, tuple[Dismiss | Say, ...]]:
        """Make an examined node a standby again if nothing is wrong with it and the job needs one; else dismiss it."""
        node = self.examined.pop(event.action)
        if event.ok and node not in event.untested:
            self.faults.on_examined(node, event.failed.get(node, ""))
        why = event.failed.get(node, "" if event.ok else event.detail or "it could not be probed")
        if not why and node in event.untested:
            found, left = f"whether {node} is bad is not known", f"not examined: {event.detail}"
            actions = self.dismiss_node(node, Kind.CRASH, left, Dismissal.EVICTED)
            found += f": {event.detail}"
        elif why:
            found = f"{node} is bad: {why}"
            actions = self.dismiss_node(node, Kind.CRASH, f"examined: {why}", Dismissal.EVICTED)
        elif self.job.can_acquire and len(self.pool) >= self.job.standbys:
            found = f"{node} is given back, {_FOUND_WELL}"
            actions = self.dismiss_node(node, None, _FOUND_WELL, Dismissal.SPARE)
        else:
            self.pool[node], self._checked[node] = self._met[node], now + self.limits.recheck_s
            found, actions = f"nothing is wrong with {node}: it is a standby again", ()
        return found, (*actions, Say(text=f"after its eviction: {found}"))

    def dismiss_node(self, node: str, kind: Kind | None, reason: str, cause: Dismissal) -> tuple[Dismiss, ...]:
        """Forget a node and return the action that gives it back. Return no action for a silent node if the fleet
        cannot acquire nodes, because this node may come back."""
        beside = node in self.pool or node in self.coming or node in self.checking.values()
        (self.unseated.add if beside or kind is None else self.unseated.discard)(node)
        self.pool.pop(node, None)
        self.coming.pop(node, None)
        self._checked.pop(node, None)
        self._returned.discard(node)
        self.suspects.pop(node, None)
        self._linkless.pop(node, None)
        self.fleet.forget_node(node)
        for waiting in (self.examined, self.checking):
            for id in [id for id, other in waiting.items() if other == node]:
                del waiting[id]
        self.gone[node], self.departures[node] = kind, reason
        if kind is Kind.SILENCE and not self.job.can_acquire:
            return ()  # it shall find us when it comes back
        return (Dismiss(id=next(self._ids), node=node, reason=reason, cause=cause),)

    def block_hosts(self, active: Iterable[str]) -> list[Block | Say]:
        """Return the actions that block the hosts of nodes that have left because their machines are bad."""
        return self.faults.block_gone(self.gone, self._met, (*active, *self.pool, *self.under_probe))

    def doubt_all(self, now: float) -> None:
        """Wait for all standbys to report again, because their state is unknown and some may run ranks."""
        self.coming |= dict.fromkeys(sorted({*self.pool, *self.under_probe}), now)
        for known in (self.pool, self._checked, self.suspects, self.examined, self.checking):
            known.clear()

    def beside_job(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes among these that wait as standbys, are on their way, or are under probe."""
        return tuple(n for n in nodes if n in self.pool or n in self.coming or n in self.under_probe)

    def tick(self, now: float, *, standing: bool = False) -> tuple[Dismiss, ...]:
        """Give back requested nodes that are late, unless they are queued. Allow requests again if the pause in them is
        over. `standing` says that the job waits for nodes.

        If other nodes came in time, the late node counts as slow. If none came, the fleet gets twice as long from now
        on: a fleet that needs an hour would never deliver if it were asked anew every few minutes.
        """
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
        patience_s = self._arrival_limit_s(standing)
        awaited = {node: asked_at for node, asked_at in self.coming.items() if not self.fleet.is_queued(node)}
        late = sorted(node for node, asked_at in awaited.items() if asked_at + patience_s <= now)
        reason = f"not ready within {patience_s:g} s"
        if late and not self._came:
            self._patience_s = min(2 * patience_s, _LONGEST * self.limits.ready_s)
        self._came = self._came and not late
        return tuple(action for node in late for action in self.dismiss_node(node, None, reason, Dismissal.LATE))

    def _arrival_limit_s(self, standing: bool) -> float:
        """Return how long a node may take to arrive. With `standing`, the job waits for nodes. The limit is then lower,
        so that another node can be requested in time."""
        longest_s = max(self.limits.ready_s, self.limits.wait_s / 2) if standing else self._patience_s
        return min(self._patience_s, longest_s)

    def wake_at(self, *, steady: bool = False, standing: bool = False) -> float | None:
        """Return when standbys next need attention, or None. Causes are an arrival that is due, another request to the
        fleet, a node without a link, and, while the job is `steady`, probes."""
        patience_s = self._arrival_limit_s(standing)
        known = self.fleet.nodes  # empty where the fleet tells nothing, as at the start of thousands
        asked = (
            [at for node, at in self.coming.items() if not self.fleet.is_queued(node)]
            if known
            else self.coming.values()
        )
        waits = [min(asked) + patience_s] if asked else []
        waits += [self._retry_at] if self._retry_at is not None else []
        if steady or standing:
            waits += self._linkless.values()
        if steady and self._is_checking_on and self.limits.recheck_s:
            busy = set(self.checking.values())
            waits += [self._checked.get(node, 0.0) for node in self.pool if node not in busy]
        return min(waits, default=None)
