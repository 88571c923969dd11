"""Fleet of pods: each node is a pod, which joins the job like a host on which somebody typed `holdfast run`."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.controller_interfaces import FleetRefusal, Notes
from holdfast.decoding import from_json
from holdfast.fleet.kubernetes_client import (
    FORBIDDEN,
    NOT_FOUND,
    KubernetesClient,
    KubernetesError,
    ask_until_refused,
)
from holdfast.fleet.pod_manifest import (
    EPOCH_NOTE,
    EVICTED_TAINT,
    AvoidedHosts,
    Manifest,
    PodShape,
    make_pod,
    make_secret,
    owner_reference,
    pod_name,
    run_labels,
)
from holdfast.fleet.pod_reading import HostView, PodView, describe_pod, has_ended, is_in_doubt
from holdfast.fleet.pod_table import PodTable
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure

_RECORDS = "pods.json"
_AT_ONCE = 16  # requests
_LOOK_S = 0.2
_GRACE_S = 10.0  # for a node that we end ourselves: it was told to leave before
_BEYOND_S = 30.0  # after its grace a pod that has not ended is not certain to end
_AVOIDED = 100  # hosts at most: a manifest has an end
_log = logging.getLogger(__name__)


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet records about a node until the node's end is proven."""

    created: bool = False  # its pod is known to have been made
    released: bool = False


class FleetRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `pods.json`, by which a restarted controller knows its nodes."""

    next: int = 0  # number of the next node: no name is used twice
    nodes: dict[str, PodRecord] = {}
    avoided: dict[str, float] = {}  # hosts of evicted nodes, and when
    gathered: bool = False  # the job has had enough machines at one time


class FleetWishes(msgspec.Struct, frozen=True, kw_only=True):
    """The job's settings for its fleet, such as how to start a node and how long to avoid hosts."""

    command: Callable[[str], Sequence[str]]  # that makes the pod of this name a node
    files: Callable[[str], Mapping[str, bytes]]  # that its secret brings: a token, and the job
    least: int  # nodes without which the job does not begin
    gather_s: float  # machines that wait for others are given back after so long; 0: never
    avoid_s: float  # for how long the host of an evicted node is avoided


class KubernetesFleet:
    can_acquire = True
    survey_s = 1.0

    def __init__(
        self,
        notes: Notes,
        shape: PodShape,
        wishes: FleetWishes,
        client: KubernetesClient,
        epoch: Callable[[], int],
    ) -> None:
        """`epoch` returns this controller's number, and raises if another controller acts by now."""
        self._epoch = epoch
        self._notes, self._shape, self._wishes, self._client = notes, shape, wishes, client
        found = notes.get_note(_RECORDS)
        self._records = from_json(found, FleetRecords) if found else FleetRecords()
        self._table = PodTable(client, shape.run)
        self._owner: Manifest | None = None
        self._making: set[str] = set()
        self._ending: set[str] = set()
        self._unreplaced: set[str] = set()  # nodes that failed or came too late, and none was asked for since
        self._creating = asyncio.Lock()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._hosts: dict[str, HostView | None] = {}
        self._waiting_since: float | None = None  # some nodes have machines, and too few
        self._withdrawn: dict[str, str] = {}

    async def close(self) -> None:
        await self._table.close()
        await self._client.close()

    def nodes(self) -> tuple[str, ...]:
        return tuple(node for node, record in self._records.nodes.items() if not record.released)

    def departures(self) -> tuple[Departure, ...]:
        return ()  # they are on the disks of other hosts

    # --- acquiring ---------------------------------------------------------------------------------------------

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        first = self._records.next
        names = tuple(f"n{number}" for number in range(first, first + count))
        self._making.update(names)
        self._keep(next=first + count, nodes=self._records.nodes | {name: PodRecord() for name in names})
        try:
            async with self._creating:
                gone = frozenset(self._unreplaced)
                owner, avoided = await self._find_owner(), await self._find_bad_hosts(evicted, gone)
                await self._call_all([self._create_node(name, owner, avoided) for name in names])
                self._unreplaced -= gone
        except OSError:
            await self._undo(names)
            raise
        finally:
            self._making.difference_update(names)
        return names

    async def _create_node(self, node: str, owner: Manifest, avoided: AvoidedHosts) -> None:
        if self._records.nodes.get(node, PodRecord(released=True)).released:
            return  # it was given back before it was made
        secret = make_secret(self._shape, node, self._wishes.files(node), owner)
        await ask_until_refused(lambda: self._client.create_secret(secret), _log.warning)
        pod = make_pod(self._shape, node, self._wishes.command(node), owner, avoided)
        pod["metadata"].setdefault("annotations", {})[EPOCH_NOTE] = str(self._epoch())
        self._table.note_created(await ask_until_refused(lambda: self._client.create_pod(pod), _log.warning))
        self._keep_node(node, created=True)

    async def _undo(self, names: Sequence[str]) -> None:
        """Delete the pods and secrets of an acquisition that failed; a later survey deletes any that remain."""
        made = [name for name in names if self._records.nodes.get(name, PodRecord()).created]
        self._keep(nodes={node: one for node, one in self._records.nodes.items() if node not in names})
        with contextlib.suppress(OSError):
            await self._call_all([self._delete_node(name) for name in names])
        for name in made:
            self._table.pods.pop(name, None)

    async def _delete_node(self, node: str) -> None:
        await self._client.delete_pod(pod_name(self._shape.run, node), _GRACE_S)
        await self._client.delete_secret(pod_name(self._shape.run, node))

    async def _find_owner(self) -> Manifest:
        if self._owner is None:
            run = self._shape.run
            labels = run_labels(run)
            lease = await ask_until_refused(lambda: self._client.get_or_make_lease(run, labels), _log.warning)
            self._owner = owner_reference(self._shape.run, (lease.metadata and lease.metadata.uid) or "")
        return self._owner

    async def _find_bad_hosts(self, evicted: Collection[str], unreplaced: Collection[str]) -> AvoidedHosts:
        """Return the hosts to avoid. Those of nodes that were or are being evicted are never used; those whose pods
        failed, came too late or are in doubt are used if there are no others."""
        await self._table.refresh(anew=True)
        if not self._wishes.avoid_s:
            return AvoidedHosts()
        nodes = {*self._records.nodes, *evicted, *unreplaced}  # of a pod that has just gone, no record may be left
        pods = {node: self._table.pods.get(node) or self._table.removed.get(node) for node in sorted(nodes)}
        oldest = time.time() - self._wishes.avoid_s
        known = [host for host, at in self._records.avoided.items() if at > oldest]
        bad = [pod.spec.node_name for node, pod in pods.items() if pod and node in evicted]
        worse = [
            pod.spec.node_name
            for node, pod in pods.items()
            if pod and (node in unreplaced or pod.status.phase == "Failed" or is_in_doubt(pod))
        ]
        never = [*dict.fromkeys(filter(None, (*known, *bad)))][-_AVOIDED:]
        return AvoidedHosts(never=tuple(never), last=tuple(dict.fromkeys(filter(None, worse)).keys() - {*never}))

    # --- giving back -------------------------------------------------------------------------------------------

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        if node not in self._records.nodes:
            return
        self._keep_node(node, released=True)
        self._ending.add(node)  # first: a survey would take it for a stray, and its host would be forgotten
        pod = self._table.pods.get(node)
        failed = pod is not None and pod.status.phase == "Failed" and not pod.metadata.deletion_timestamp
        if cause is Dismissal.LATE or (cause is Dismissal.GONE and failed):
            self._unreplaced.add(node)  # nobody ended it, so the one pod that takes its place begins elsewhere
        try:
            async with self._creating:  # from here on its pod is there or will never be
                pass
            if cause is Dismissal.EVICTED and self._wishes.avoid_s:
                await self._avoid_host_of(node, reason)
            await self._end_pod(node)
        finally:
            self._ending.discard(node)
            with contextlib.suppress(KubernetesError):  # it goes with the run's lease at the latest
                await self._client.delete_secret(pod_name(self._shape.run, node))
        self._keep(nodes={name: one for name, one in self._records.nodes.items() if name != node})

    async def _end_pod(self, node: str) -> None:
        """Delete the pod, and wait for proof that it has ended. Raise OSError if no proof comes in time."""
        name = pod_name(self._shape.run, node)
        until, asked = time.monotonic() + _GRACE_S + _BEYOND_S, False
        while True:
            try:
                await self._table.refresh()  # first: of a pod that goes unseen nobody knows whether it has ended
                asked = asked or await self._client.delete_pod(name, _GRACE_S)
            except KubernetesError as e:
                if time.monotonic() > until:
                    raise OSError(f"whether {name} has ended is not known: {e}") from None
            else:
                if await self._is_over(node, name):
                    return
                if time.monotonic() > until:
                    raise OSError(f"{name} has not ended {_BEYOND_S:g} s after its grace of {_GRACE_S:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _is_over(self, node: str, name: str) -> bool:
        """Return whether the pod has ended. Raise OSError if nobody can tell."""
        pod = self._table.pods.get(node)
        if pod is not None:
            seen = describe_pod(pod, await self._look_at_host(pod))
            if seen.state is FleetState.UNKNOWN:
                raise OSError(f"whether {name} has ended is not known: {seen.reason}")
            return has_ended(pod)
        if (last := self._table.removed.get(node)) is not None:
            if not has_ended(last, removed=True):
                raise OSError(f"{name} was removed by force; its containers may run on {last.spec.node_name}")
            return True
        if self._records.nodes[node].created:
            raise OSError(f"{name} is not there any more, and nobody saw it end")
        return True

    async def _avoid_host_of(self, node: str, reason: str) -> None:
        """Keep this job's later nodes off this node's host. Other jobs' nodes avoid the host if we may taint it."""
        with contextlib.suppress(KubernetesError):
            await self._table.refresh(anew=True)
        pod = self._table.pods.get(node) or self._table.removed.get(node)
        if pod is None or not (host := pod.spec.node_name):
            return
        self._keep(
            avoided={name: at for name, at in self._records.avoided.items() if name != host} | {host: time.time()}
        )
        try:
            await self._client.taint_host(host, EVICTED_TAINT, self._shape.run)
        except KubernetesError as e:
            _log.info("%s is avoided by this job alone (%s): %s", host, reason, e)

    # --- surveying ---------------------------------------------------------------------------------------------

    async def survey(self) -> dict[str, FleetNode]:
        await self._table.refresh()
        self._check_epochs()
        await self._delete_strays()
        found = {node: await self._describe(node) for node in self.nodes()}
        await self._gather(found)
        return {node: self._withdrawn_text(node, seen) for node, seen in found.items() if node in self.nodes()}

    def _check_epochs(self) -> None:
        """Raise LeaseLostError if a later controller has made pods: then our records are old and its pods no strays."""
        own = self._epoch()
        if (newest := max((pod.epoch for pod in self._table.pods.values()), default=0)) > own:
            raise LeaseLostError(
                f"pods of {self._shape.run} were made by controller {newest} of this run, a later one than this, "
                f"which is {own} and ends"
            )

    async def _describe(self, node: str) -> FleetNode:
        if pod := self._table.pods.get(node):
            return describe_pod(pod, await self._look_at_host(pod))
        if pod := self._table.removed.get(node):
            return describe_pod(pod, removed=True)
        if node in self._making:
            return FleetNode(state=FleetState.QUEUED, reason="its pod is being made")
        if not self._records.nodes[node].created:
            return FleetNode(state=FleetState.GONE, reason="its pod was never made")
        return FleetNode(state=FleetState.UNKNOWN, reason="its pod is not there any more, and nobody saw it end")

    async def _look_at_host(self, pod: PodView) -> HostView | None:
        """Return a pod's host; None if we may not read it. It is read anew only if host or pod is in trouble."""
        name = pod.spec.node_name
        known = self._hosts.get(name)
        if name and (name not in self._hosts or is_in_doubt(pod) or (known is not None and known.trouble)):
            try:
                self._hosts[name] = await self._client.find_host(name)
            except KubernetesError as e:
                if e.status not in (FORBIDDEN, NOT_FOUND):  # another try may succeed
                    raise
                self._hosts[name] = None
        return self._hosts.get(name)

    async def _delete_strays(self) -> None:
        """Delete this run's pods that have no record, which an interrupted acquisition leaves, and those of nodes that
        were given back. The record of a node that was given back is kept until its end is proven."""
        records = self._records.nodes
        left = {node for node, record in records.items() if record.released} - self._ending
        for node in left:
            if (
                node not in self._table.pods
                and (last := self._table.removed.get(node))
                and has_ended(last, removed=True)
            ):
                self._keep(nodes={name: one for name, one in self._records.nodes.items() if name != node})
        strays = (self._table.pods.keys() - records.keys() - self._making) | (self._table.pods.keys() & left)
        deleted = [node for node in strays if not self._table.pods[node].metadata.deletion_timestamp]
        with contextlib.suppress(KubernetesError):  # the next survey tries again
            await self._call_all([self._delete_node(node) for node in sorted(deleted)])

    async def _gather(self, found: dict[str, FleetNode]) -> None:
        """Give all pods back if too few of them got machines in time. Otherwise two jobs could each hold machines that
        the other one waits for."""
        having = [node for node, seen in found.items() if seen.state in (FleetState.STARTING, FleetState.UP)]
        queued = [node for node, seen in found.items() if seen.state is FleetState.QUEUED]
        if self._records.gathered or self._shape.is_queued or not self._wishes.gather_s:
            return
        if len(having) >= self._wishes.least:
            self._keep(gathered=True)
            return
        if not having or not queued:
            self._waiting_since = None
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if now < self._waiting_since + self._wishes.gather_s:
            return
        count = f"only {len(having)} of {self._wishes.least} machines came within {self._wishes.gather_s:g} s"
        self._waiting_since = None
        self._withdrawn |= dict.fromkeys(found, f"{count}, so all were given back")
        await self._call_all([self._delete_node(node) for node in found])

    def _withdrawn_text(self, node: str, seen: FleetNode) -> FleetNode:
        said = self._withdrawn.get(node)
        return msgspec.structs.replace(seen, reason=said) if said and seen.state is FleetState.GONE else seen

    # --- what is kept ------------------------------------------------------------------------------------------

    def _keep(self, **changed: Any) -> None:
        self._records = msgspec.structs.replace(self._records, **changed)
        self._notes.put_note(_RECORDS, msgspec.json.encode(self._records))

    def _keep_node(self, node: str, **changed: bool) -> None:
        if node in self._records.nodes:
            record = msgspec.structs.replace(self._records.nodes[node], **changed)
            self._keep(nodes=self._records.nodes | {node: record})

    async def _call_all(self, calls: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Await all calls, a few at a time. Raise the first FleetRefusal among the errors, else the first error."""

        async def call(one: Coroutine[Any, Any, None]) -> None:
            async with self._room:
                await one

        errors = [e for e in await asyncio.gather(*map(call, calls), return_exceptions=True) if e is not None]
        for error in sorted(errors, key=lambda e: not isinstance(e, FleetRefusal)):
            raise error
