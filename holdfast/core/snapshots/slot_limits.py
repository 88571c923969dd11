"""How many of a rank's snapshot slots may be pinned at once, so that the rank can go on taking snapshots."""

FLOOR_SLOTS = 3  # with fewer, no floor can be held while snapshots go on safely


def can_spare_slot(slots: int, pinned: int) -> bool:
    """Return whether one more slot may be pinned. With four or more slots two stay with the writer, so that a whole
    newest snapshot always exists; with fewer, one stays, and the newest whole snapshot may briefly be a step or two
    older."""
    return slots - pinned > (2 if slots > 3 else 1)
