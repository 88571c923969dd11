"""The lease of a run in Kubernetes: its controllers may move between machines, but only one acts at a time."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.resources.coordination_v1 import Lease

from holdfast.controller_interfaces import FleetRefusal
from holdfast.decoding import from_json
from holdfast.fleet.kubernetes_client import CONFLICT, KubernetesClient, KubernetesError, ask_until_refused
from holdfast.fleet.pod_manifest import MANAGED_BY, run_labels
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.journal.lease_term import LeaseTerm, boot_time, read_boot_id
from holdfast.wire.run_and_node_specs import publish_file

LASTS_S = 60.0  # an API server may be away for almost as long
_MARGIN_S = 5.0
_RENEW_S = 5.0
_LOOK_S = 1.0


class _Note(msgspec.Struct, frozen=True):
    """What a controller leaves on its machine for the next one there."""

    holder: str = ""
    boot: str = ""  # of the machine: its clock begins anew with each
    asked_at: float = 0.0  # when the newest renewal began, by that clock


class KubernetesLease:
    def __init__(self, client: KubernetesClient, run: str, holder: str, note: Path, say: Callable[[str], None]) -> None:
        """`note` is a file. It says which controller of the run last had the lease on this machine, and until when."""
        self._client, self._run, self._holder, self._note, self._say = client, run, holder, note, say
        self._term = LeaseTerm(f"the lease of {run}", LASTS_S, _MARGIN_S)
        self._told = ""  # why the lease was not taken at the last try
        self._seen = ""  # the holder and its last renewal, by its own clock
        self._seen_at = 0.0  # when it changed last, by ours: clocks of other hosts are not compared

    async def take(self) -> None:
        """Wait until no other controller of this run has the lease, and take it."""
        while True:
            try:
                lease, asked_at = await ask_until_refused(self._find, self._say_refused), boot_time()
                if self._is_free(lease):
                    await self._client.replace_lease(self._renewed(lease))
                    self._term.begin(asked_at)
                    self._write_note(asked_at)
                    return
                held = f"the lease of {self._run} is held by {_holder_of(lease)}; waiting until it is free"
            except KubernetesError as e:
                held = f"the lease of {self._run} cannot be taken yet: {e}"
                if e.status == CONFLICT:  # another was faster
                    continue
                if not e.status and self._continue_term():
                    self._say(
                        f"{held}; going on for {self._term.left_s:.0f} s, as this run's last controller was here, too"
                    )
                    return
            except FleetRefusal as e:
                if not self._note.exists():
                    raise
                # The run has had a controller before: it is not ended, as its ranks may train.
                held = f"the lease of {self._run} cannot be taken yet: {e}"
            self._say_once(held)
            await asyncio.sleep(_LOOK_S)

    def _say_refused(self, why: str) -> None:
        self._say_once(f"the lease of {self._run} cannot be taken yet: {why}")

    def _say_once(self, text: str) -> None:
        if text != self._told:
            self._say(text)
        self._told = text

    def check(self) -> None:
        """Raise LeaseLostError if another controller may have the lease by now. This asks nobody."""
        self._term.check()

    async def keep(self) -> None:
        """Renew the lease forever. Raise LeaseLostError if another controller has it, or may have it because the API
        server has not answered for too long: the server may answer others."""
        pause_s = _RENEW_S
        while True:
            await asyncio.sleep(min(pause_s, self._term.left_s))
            pause_s, asked_at = _RENEW_S, boot_time()
            try:
                lease = await self._find()
                if (other := _holder_of(lease)) not in ("", self._holder):
                    raise LeaseLostError(f"another controller, {other}, has the lease of {self._run}; this one ends")
                self._term.check()  # before it is written: it is not renewed after its time
                await self._client.replace_lease(self._renewed(lease))
                self._term.renew(asked_at)
                self._write_note(asked_at)
            except KubernetesError:
                self._term.check()
                pause_s = _LOOK_S  # a conflict is looked at again, and a server that is away may be back

    async def let_go(self) -> None:
        """Give up the lease. Delete it if holdfast made it; Kubernetes then deletes the run's other objects with it."""
        try:
            lease = await self._find()
            labels = (lease.metadata.labels if lease.metadata else None) or {}
            if labels.get(MANAGED_BY[0]) == MANAGED_BY[1]:
                await self._client.delete_lease(self._run)
            else:
                lease.spec = LeaseSpec(holderIdentity="")
                await self._client.replace_lease(lease)
        except KubernetesError as e:
            self._say(f"the lease of {self._run} is left in Kubernetes: {e}")
        await self._client.close()

    async def _find(self) -> Lease:
        return await self._client.get_or_make_lease(self._run, run_labels(self._run))

    def _write_note(self, asked_at: float) -> None:
        with contextlib.suppress(OSError):  # then the next controller here waits for the API server
            publish_file(self._note, msgspec.json.encode(_Note(self._holder, read_boot_id(), asked_at)))

    def _continue_term(self) -> bool:
        """Go on with the term of this machine's last controller. Return False if there was none, or it is over."""
        try:
            note = from_json(self._note.read_bytes(), _Note)
        except (OSError, msgspec.DecodeError):
            return False
        if (note.holder, note.boot) != (self._holder, read_boot_id()):
            return False
        self._term.begin(note.asked_at)
        return self._term.left_s > 0

    def _is_free(self, lease: Lease) -> bool:
        """Return whether the lease can be taken: it is ours, has no holder, or was not renewed in time."""
        spec = lease.spec or LeaseSpec()
        if _holder_of(lease) in ("", self._holder):
            return True
        seen = f"{spec.holderIdentity} {spec.renewTime}"
        if seen != self._seen:
            self._seen, self._seen_at = seen, boot_time()
        return boot_time() > self._seen_at + (spec.leaseDurationSeconds or LASTS_S)

    def _renewed(self, lease: Lease) -> Lease:
        now = datetime.now(UTC)
        now = now.replace(microsecond=now.microsecond or 1)  # the API server wants all six digits
        old = lease.spec or LeaseSpec()
        ours = old.holderIdentity == self._holder
        lease.spec = LeaseSpec(
            holderIdentity=self._holder,
            leaseDurationSeconds=round(LASTS_S),
            acquireTime=old.acquireTime if ours and old.acquireTime else now,
            renewTime=now,
            leaseTransitions=(old.leaseTransitions or 0) + (not ours),
        )
        return lease


def _holder_of(lease: Lease) -> str:
    return (lease.spec.holderIdentity if lease.spec else None) or ""
