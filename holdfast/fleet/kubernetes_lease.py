"""The lease of a run in Kubernetes: its controllers may move between machines, but only one acts at a time."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.resources.coordination_v1 import Lease

from holdfast.fleet.kubernetes_client import CONFLICT, KubernetesClient, KubernetesError, ask_until_refused
from holdfast.fleet.pod_manifest import MANAGED_BY, run_labels
from holdfast.journal.journal_errors import LeaseLostError

_LASTS_S = 30.0
_RENEW_S = 5.0
_LOOK_S = 1.0


class KubernetesLease:
    def __init__(self, client: KubernetesClient, run: str, holder: str, note: Path, say: Callable[[str], None]) -> None:
        """`note` is a file. It holds the name of the run's controller that last took the lease on this machine."""
        self._client, self._run, self._holder, self._note, self._say = client, run, holder, note, say
        self._seen = ""  # the holder and its last renewal, by its own clock
        self._seen_at = 0.0  # when it changed last, by ours: clocks of other hosts are not compared

    async def take(self) -> None:
        """Wait until no other controller of this run has the lease, and take it."""
        told = ""
        while True:
            try:
                lease = await ask_until_refused(self._find)
                if self._is_free(lease):
                    await self._client.replace_lease(self._renewed(lease))
                    self._note.write_text(self._holder)
                    return
                held = f"the lease of {self._run} is held by {_holder_of(lease)}; waiting until it is free"
            except KubernetesError as e:
                held = f"the lease of {self._run} cannot be taken yet: {e}"
                if e.status == CONFLICT:  # another was faster
                    continue
                if not e.status and self._was_ours():
                    self._say(f"{held}; going on, as this run's last controller was here, too")
                    return
            if held != told:
                self._say(told := held)
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Renew the lease forever. Raise LeaseLostError if another controller has it."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                lease = await self._find()
                if (other := _holder_of(lease)) not in ("", self._holder):
                    raise LeaseLostError(f"another controller, {other}, has the lease of {self._run}; this one ends")
                await self._client.replace_lease(self._renewed(lease))
            except KubernetesError:
                continue  # nobody else gets it from a cluster that cannot be asked; a conflict is looked at again

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

    def _was_ours(self) -> bool:
        try:
            return self._note.read_text() == self._holder
        except OSError:
            return False

    def _is_free(self, lease: Lease) -> bool:
        """Return whether the lease can be taken: it is ours, has no holder, or was not renewed in time."""
        spec = lease.spec or LeaseSpec()
        if _holder_of(lease) in ("", self._holder):
            return True
        seen = f"{spec.holderIdentity} {spec.renewTime}"
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() > self._seen_at + (spec.leaseDurationSeconds or _LASTS_S)

    def _renewed(self, lease: Lease) -> Lease:
        now = datetime.now(UTC)
        now = now.replace(microsecond=now.microsecond or 1)  # the API server wants all six digits
        old = lease.spec or LeaseSpec()
        ours = old.holderIdentity == self._holder
        lease.spec = LeaseSpec(
            holderIdentity=self._holder,
            leaseDurationSeconds=round(_LASTS_S),
            acquireTime=old.acquireTime if ours and old.acquireTime else now,
            renewTime=now,
            leaseTransitions=(old.leaseTransitions or 0) + (not ours),
        )
        return lease


def _holder_of(lease: Lease) -> str:
    return (lease.spec.holderIdentity if lease.spec else None) or ""
