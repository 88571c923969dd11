"""How a job ended: its exit code, its reason, which also depends on whether its final state is on storage, and whether
its ranks had come to their end."""

from holdfast.model.action import Finish
from holdfast.model.decider_events import Ended, Event, Order, Outcome
from holdfast.model.stored_checkpoint_report import StorageReport

UNSTORED = 94  # exit code: the script ended well, and its final state is not on storage


def read_storage(event: Event) -> StorageReport | None:
    """Return the storage report in this event; None if it has none."""
    if isinstance(event, Outcome):
        return event.storage
    return event if isinstance(event, StorageReport) else None


def describe_early_end(event: Event) -> str:
    """Return how a job ended that this event ended: "stopped" or "ended"; "" if its ranks had come to their end."""
    match event:
        case Ended():
            return ""
        case Order(verb="stop"):
            return "stopped"
    return "ended"


def describe_end(finish: Finish | None, storage: StorageReport | None, *, done: bool) -> tuple[int | None, str]:
    """Return a job's exit code and the reason for its end; None and "" if it does not end."""
    if finish is None:
        return None, ""
    missed = storage.missed if storage and done and finish.code == 0 else None
    return (UNSTORED, f"{finish.reason}, but {missed.why}") if missed else (finish.code, finish.reason)
