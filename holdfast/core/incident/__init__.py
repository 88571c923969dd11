"""One incident: what failed before, the ladder of remedies, the sentence about it."""
