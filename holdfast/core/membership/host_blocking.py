"""Blocks hosts whose machines are at fault, and refuses new nodes on blocked hosts."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Set

import msgspec

from holdfast.model.action import Block, Dismiss, Dismissal, Say
from holdfast.model.decider_events import Outcome, Ready
from holdfast.model.job_and_seats import HostIdentity

_NAMED = 5  # blocked hosts that one sentence names
BLOCKED_EXIT = 93  # exit code of a refused node: the same command would be refused again


class BlockLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the list of blocked hosts."""

    path: str = ""  # of the list; empty: blocked.json in HOLDFAST_HOME
    age_s: float = 604800.0  # a host stays blocked for so long; 0: this job blocks nobody


class BlockedHost(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list of blocked hosts."""

    host: str  # its name, for people
    id: str = ""  # as in HostIdentity, or the name again if a person gave it; "": only the GPUs are blocked
    gpus: tuple[str, ...] = ()
    reason: str
    run_id: str = ""  # "": a person put it on the list
    incident: int = 0  # of that run; 0: none
    who: str = ""  # the person
    at: float
    until: float


def matching_entry(
    entries: Iterable[BlockedHost], host: str, identity: HostIdentity, now: float
) -> tuple[BlockedHost, str] | None:
    """Return the entry that blocks this host, and what it blocks: the host's name or the id of one of its GPUs. Return
    None if no entry blocks the host.

    A node that reports no identity is on the same host as the controller, and is never blocked.
    """
    if not identity.id:
        return None
    for entry in entries:
        if entry.until <= now:
            continue
        if entry.id and entry.id in (identity.id, host):
            return entry, entry.host
        if gpu := next((gpu for gpu in identity.gpus if gpu in entry.gpus), ""):
            return entry, gpu
    return None


def is_gpu_id(name: str) -> bool:
    """Return whether this is the UUID of a GPU, or of a part of one, as its driver writes it."""
    return name.startswith(("GPU-", "MIG-"))


def lift_entries(entries: Iterable[BlockedHost], name: str) -> tuple[BlockedHost, ...]:
    """Return the entries without this host or GPU. The host of a lifted GPU, and its other GPUs, stay blocked."""
    others = [entry for entry in entries if name not in (entry.host, entry.id)]
    left = [msgspec.structs.replace(entry, gpus=tuple(gpu for gpu in entry.gpus if gpu != name)) for entry in others]
    return tuple(entry for entry in left if entry.id or entry.gpus)


class HostFaults:
    """Machines found at fault, and hosts that were refused, as part of the job's state."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        # Of evicted nodes, until they are blocked or cleared: the machine's fault, or "", and the incident.
        self._evicted: dict[str, tuple[str, int]] = {}
        self.blocking: dict[int, tuple[str, str]] = {}  # id and name of each host, by the Block that has no outcome yet
        self._blocked: dict[str, str] = {}  # ids of hosts that were blocked or refused here, and their names
        self._refused: set[str] = set()  # of these, those that the console was told of

    def on_evicted(self, nodes: Iterable[str], faults: Mapping[str, str], incident: int) -> None:
        """Record the faults of evicted nodes' machines. A fault that is recorded already is not replaced."""
        known = {node for node, (fault, _) in self._evicted.items() if fault}
        self._evicted |= {node: (faults.get(node, ""), incident) for node in nodes if node not in known}

    def on_examined(self, node: str, fault: str) -> None:
        """Record the result of an evicted node's examination: `fault` is what was found, or "" if nothing was."""
        _, incident = self._evicted.pop(node, ("", 0))
        if fault:
            self._evicted[node] = (fault, incident)

    def on_accepted(self, ready: Ready) -> None:
        """Forget past faults and refusals of a node and its host, because the job has accepted the node again."""
        self._evicted.pop(ready.node, None)
        self._blocked.pop(ready.identity.id, None)
        self._refused.discard(ready.identity.id)

    @property
    def has_evicted(self) -> bool:
        """Return whether any evicted nodes have hosts that may have to be blocked."""
        return bool(self._evicted)

    def block_gone(self, gone: Container[str], met: Mapping[str, Ready], staying: Iterable[str]) -> list[Block | Say]:
        """Return the actions that block the hosts of evicted nodes found at fault. `gone` has the nodes that have left,
        `met` the reports of all nodes on their hosts, and `staying` the nodes that remain.

        A host id or GPU that a remaining node has as well is not blocked, because this sound node would be refused,
        too. Nodes have the same id if they share a host or if their hosts were made from one image.
        """
        left = sorted(node for node in self._evicted if node in gone)
        bad = [(node, *found) for node in left if (found := self._evicted.pop(node))[0]]
        others = [met[node].identity for node in staying if bad and node in met]
        shared = {id for other in others for id in (other.id, *other.gpus)}
        return [action for node, reason, incident in bad for action in self._block(met[node], shared, reason, incident)]

    def _block(self, ready: Ready, shared: Set[str], reason: str, incident: int) -> Iterator[Block | Say]:
        own = ready.identity
        gpus = tuple(gpu for gpu in _gpus_at_fault(own, reason) if gpu not in shared)
        left = HostIdentity(id="" if own.id in shared else own.id, gpus=gpus)
        if left.id or left.gpus:
            block = Block(id=next(self._ids), host=ready.host, identity=left, reason=reason, incident=incident)
            self.blocking[block.id] = left.id, ready.host
            yield block
        if own.id and not left.id:
            what = "its GPUs are blocked, but not its host" if left.gpus else "its host is not blocked"
            why = f"another node has the same host id, {own.id}; HOLDFAST_HOST_ID can tell them apart"
            yield Say(text=f"{ready.node} is bad, and {what}: {why}")

    def on_block_outcome(self, outcome: Outcome) -> None:
        """Record a host as blocked if its Block succeeded. A Block fails if the list of hosts cannot be written."""
        id, host = self.blocking.pop(outcome.action)
        if outcome.ok and id:
            self._blocked[id] = host

    def refuse(self, ready: Ready) -> tuple[Dismiss | Say, ...]:
        """Return the actions that refuse a node of a blocked host. The console reports each host once."""
        dismiss = Dismiss(
            id=next(self._ids), node=ready.node, reason=ready.blocked, code=BLOCKED_EXIT, cause=Dismissal.REFUSED
        )
        known = ready.identity.id in self._refused
        self._refused.add(ready.identity.id)
        self._blocked[ready.identity.id] = ready.host
        return (dismiss,) if known else (dismiss, Say(text=f"{ready.node} is refused: {ready.blocked}"))

    @property
    def wait_cause(self) -> str:
        """Return which hosts are blocked, for the message of a job that waits for nodes; "" if none is."""
        if not self._blocked:
            return ""
        names = sorted(set(self._blocked.values()))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        blocked = f"blocked: {', '.join(names[:_NAMED])}{more}"
        return f"{blocked} (holdfast blocked says why, and with --lift HOST lets it join again)"


def _gpus_at_fault(identity: HostIdentity, fault: str) -> tuple[str, ...]:
    """Return the GPUs that the text of a fault names; if it names none, all GPUs of the host."""
    told = zip(identity.gpus, identity.gpu_names, strict=False)
    named = tuple(gpu for gpu, names in told if any(n and re.search(rf"{re.escape(n)}\b", fault) for n in names))
    return named or identity.gpus
