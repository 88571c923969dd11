"""The nodes beside the seats: standbys that wait, nodes that were asked for, and those that are not to come back."""

from collections.abc import Iterable, Iterator, Set

from holdfast.model.action import Acquire, Dismiss, Probe
from holdfast.model.alarm import Kind
from holdfast.model.event import Limits, Outcome, Ready
from holdfast.model.topology import Job

EXAMINATION = 3  # level of the probes that let an evicted node come back
RETRY_S = 10.0  # before a fleet that gave too few nodes is asked again


class Standbys:
    """Part of the decider's state; its methods answer with the actions they call for."""

    def __init__(self, job: Job, limits: Limits, ids: Iterator[int]) -> None:
        self.job = job
        self.limits = limits
        self.pool: dict[str, Ready] = {}  # ready, not seated
        self.coming: dict[str, float] = {}  # acquired: by when each must be ready
        self.acquiring: dict[int, int] = {}  # Acquire without outcome: how many
        self.gone: dict[str, Kind | None] = {}  # released, and for which kind of alarm if for any
        self.examined: dict[int, str] = {}  # Probe without outcome: an evicted node that may come back
        self._met: dict[str, Ready] = {}
        self._evicted: set[str] = set()  # once before
        self._ids = ids
        self._retry_at: float | None = None

    @property
    def wanted(self) -> int:
        return self.job.max_nodes + self.job.standbys

    def refill(self, active: int) -> tuple[Acquire, ...]:
        """Ask the fleet for what is missing; in the background, nobody waits for standbys."""
        have = active + len(self.pool) + len(self.coming) + sum(self.acquiring.values())
        if have >= self.wanted or not self.job.can_acquire or self._retry_at is not None:
            return ()
        action = Acquire(id=next(self._ids), count=self.wanted - have)
        self.acquiring[action.id] = action.count
        return (action,)

    def acquired(self, now: float, event: Outcome, active: Set[str]) -> str:
        asked = self.acquiring.pop(event.action)
        # One that is up already may have reported before this outcome, or even left again.
        new = [n for n in event.nodes if n not in self.pool and n not in active and n not in self.gone]
        self.coming.update(dict.fromkeys(new, now + self.limits.ready_s))
        if not event.ok or len(event.nodes) < asked:
            self._retry_at = now + RETRY_S
        if not event.nodes:
            return f"the fleet gave no nodes: {event.detail or 'it did not say why'}"
        return f"the fleet gave {len(event.nodes)} of {asked}" + (f", {', '.join(new)} will come" if new else "")

    def ready(self, event: Ready) -> tuple[Dismiss, ...]:
        """Take a node that reports; one that left before is sent away again.

        Only where the fleet cannot acquire, a node that had fallen silent is welcome: nobody else will come.
        """
        self.coming.pop(event.node, None)
        if event.node in self.gone:
            if self.job.can_acquire or self.gone[event.node] is not Kind.SILENCE:
                return (Dismiss(id=next(self._ids), node=event.node, reason="it had left the job before"),)
            del self.gone[event.node]
        if event.node not in self.examined.values():
            self.pool[event.node] = event
        self._met[event.node] = event
        return ()

    def evict(self, node: str, kind: Kind, generation: int, *, answers: bool) -> tuple[Dismiss | Probe, ...]:
        """Part with a seated node. Where nobody else will come, one that still answers is examined, and comes back if
        nothing is wrong with it: once."""
        again = node in self._evicted
        self._evicted.add(node)
        if kind is Kind.SILENCE or not answers or again or self.job.can_acquire or not self.job.probes:
            return self.release(node, kind, "evicted")
        action = Probe(id=next(self._ids), generation=generation, nodes=(node,), level=EXAMINATION)
        self.examined[action.id] = node
        return (action,)

    def examination(self, event: Outcome) -> tuple[str, tuple[Dismiss, ...]]:
        """What was found on a node that had been evicted."""
        node = self.examined.pop(event.action)
        if why := event.failed.get(node, "" if event.ok else event.detail or "it could not be tried"):
            return f"{node} is bad: {why}", self.release(node, Kind.CRASH, f"examined: {why}")
        self.pool[node] = self._met[node]
        return f"nothing is wrong with {node}: it is a standby again", ()

    def release(self, node: str, kind: Kind | None, reason: str) -> tuple[Dismiss, ...]:
        """Part with a node, whether it was seated, waiting or coming."""
        self.pool.pop(node, None)
        self.coming.pop(node, None)
        for id in [id for id, other in self.examined.items() if other == node]:
            del self.examined[id]
        self.gone[node] = kind
        if kind is Kind.SILENCE and not self.job.can_acquire:
            return ()  # it shall find us when it comes back
        return (Dismiss(id=next(self._ids), node=node, reason=reason),)

    def lost(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those of these nodes that wait, are coming, or are examined."""
        return tuple(n for n in nodes if n in self.pool or n in self.coming or n in self.examined.values())

    def tick(self, now: float) -> tuple[Dismiss, ...]:
        """The clock has moved: late nodes are given back, and a fleet that gave too few may be asked again."""
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
        late = sorted(node for node, by in self.coming.items() if by <= now)
        reason = f"not ready within {self.limits.ready_s:g} s"
        return tuple(action for node in late for action in self.release(node, None, reason))

    def wake_at(self) -> float | None:
        waits = [*self.coming.values()] + ([self._retry_at] if self._retry_at is not None else [])
        return min(waits, default=None)
