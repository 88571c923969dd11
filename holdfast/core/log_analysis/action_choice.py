"""Decides what to do about a root cause; a machine is evicted only if a witness accuses it."""

import msgspec

from holdfast.core.log_analysis.benign_lines import is_guess
from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.core.log_analysis.root_cause import CauseFinding, rival_causes
from holdfast.core.log_analysis.service_refusals import is_refusal

EVICT, ASK, MEND = "evict_and_restart", "run_diagnostics", "fix_config"
_REFUSED = "Give the job names, rights and an account that the service accepts, or let it do without the service."
_SURE = 6.0  # weight of the evidence on which a machine may be sent away


class ActionChoice(msgspec.Struct, frozen=True, kw_only=True):
    action: str
    reason: str = ""  # why a machine that is accused leaves or stays, or why waiting does not help; else empty
    hint: str = ""  # where that of the class would mislead


def choose_action(finding: CauseFinding, catalog: FailureCatalog) -> ActionChoice:
    """Return the action for a root cause: the action of its catalog row or class. But an eviction is returned only if a
    witness reports the fault.

    Ranks see only symptoms, and a wrong eviction is worse than a question. So a fault that only ranks report is probed.
    """
    root = finding.root
    action = catalog.action_of(root.row)
    if not root.row.action and is_refusal(root):
        return ActionChoice(
            action=MEND, reason="The service answers and refuses: waiting does not help.", hint=_REFUSED
        )
    if action != EVICT:
        return ActionChoice(action=action)
    if root.weight < _SURE or root.row.role != "cause":
        return ActionChoice(action=ASK, reason="This is too little to take a machine out: probe it first.")
    heard = [root, *finding.hits]
    witness = next((hit for hit in heard if _is_witness(hit, root)), None)
    if witness is None:
        told = "Only the job's own log says so, not kernel, driver, monitor or scheduler: probe first."
        return ActionChoice(action=ASK, reason=told)
    heavier = [hit for hit in rival_causes(finding) if hit.weight >= root.weight and not root.said.kernel]
    if {catalog.action_of(hit.row) for hit in heavier} - {EVICT, ASK}:
        return ActionChoice(action=ASK, reason="Other lines point elsewhere: probe the machine first.")
    if any(hit.klass == root.klass and hit.weight > root.weight and catalog.action_of(hit.row) == ASK for hit in heard):
        return ActionChoice(action=ASK, reason="A heavier line says that the machine lives: probe it first.")
    who = "The kernel" if witness.said.kernel else "One who has looked at the machine itself"
    return ActionChoice(action=EVICT, reason=f"{who} says so.")


def _is_witness(hit: CatalogHit, root: CatalogHit) -> bool:
    """Return whether this hit confirms the root cause. The hit must come from a witness, such as the kernel, and have
    the same class, the same node and a high weight."""
    sees = (hit.row.witness and not is_guess(hit.said.text)) or hit.said.kernel
    near = not (hit.node and root.node) or hit.node == root.node
    return sees and near and hit.klass == root.klass and hit.row.role == "cause" and hit.weight >= _SURE
