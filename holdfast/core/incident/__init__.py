"""One incident: its cause, similar past failures, the ladder of remedies, and the sentence about it."""
