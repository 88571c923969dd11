"""How many of a rank's snapshot slots may be pinned at once, so that the rank can go on taking snapshots."""

FLOOR_SLOTS = 3  # with fewer, no floor can be held while snapshots go on safely


def can_spare_slot(slots: int, pinned: int, *, late: bool = False) -> bool:
    """Return whether one more slot may be pinned. Of four or more slots, two stay unpinned for the writer, so that the
    newest snapshot is always whole. One stays unpinned if there are fewer slots or copies on peers are `late`. With
    one, the newest whole snapshot may for a moment be some steps older."""
    return slots - pinned > (2 if slots > 3 and not late else 1)
