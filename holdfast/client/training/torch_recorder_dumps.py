"""Reads what torch's flight recorders of this very process hand over. Nothing of it comes from another process."""

import pickle  # noqa: TID251 - torch's own; its JSON takes three times as long
from collections.abc import Callable
from typing import Any


def load_dump(ask: Callable[..., bytes], entries: bool, stacks: bool = False, active: bool = False) -> dict[str, Any]:
    """Ask a recorder for its entries, with their stacks, and only for those under way; and for its groups' counts."""
    found: dict[str, Any] = pickle.loads(ask(entries, stacks, active))
    return found
